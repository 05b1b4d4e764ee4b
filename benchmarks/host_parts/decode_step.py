"""What a decode step costs the host if the GPU and its driver took no time.

Requests of 40 tokens decode, greedily, through the worker's engine on host memory, each step queued before the tokens
of the last one are read. The pass is a captured one whose replay does nothing, so what is left is Python's: planning,
the numbers of the pass, choosing tokens among 272, and the message to the daemon, encoded. step_ms_N: processor time of
a step of N requests, in the middle of 200.
"""

from __future__ import annotations

import statistics
import sys
import time

import numpy as np
import torch

from benchmarks.host_parts.free_driver import HostPart, answer
from benchmarks.kv.rig import VIRTUAL, EngineRig, Frames, Request, load_embedded_model
from prefixd.worker.graphs.captured import Compute, Replay
from prefixd.worker.graphs.decode_graphs import DecodeGraphs
from prefixd.worker.graphs.pass_graphs import PassGraphs
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel
from prefixd.worker_protocol.framing import encode

PART = HostPart("decode", "benchmarks.host_parts.decode_step", least={}, most={"step_ms_64": 1.0})
_BATCHES = (1, 8, 64, 128)
_SHORT_BATCHES = (64,)
_PROMPT_TOKENS = 40


def _step_ms(model: CausalModel, batch: int, steps: int) -> float:
    spec = model.spec
    numbers = np.random.default_rng(0)
    output = 2 * steps + 8
    frames = Frames(spec, batch * -(-(_PROMPT_TOKENS + output) // spec.block_tokens))
    kv = frames.kv(VIRTUAL, batch)
    assert isinstance(kv, VirtualKv)
    logits = torch.from_numpy(numbers.standard_normal((2 * batch, spec.vocab_size), np.float32))
    graphs = DecodeGraphs(kv.manager.kv, lambda step: logits[: step.rows], batch, _refused, capture=_captured)
    rig = EngineRig(model, kv, frames, concurrent=batch, max_step_tokens=4096, graphs=PassGraphs(graphs), ahead=True)
    prompts = [numbers.integers(0, spec.vocab_size, _PROMPT_TOKENS).tolist() for _ in range(batch)]
    rig.submit([Request(prompt, output, all_frames=True) for prompt in prompts])
    while graphs.replays < 1:
        rig.step()
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        messages = rig.engine.step()
        for message in messages:
            encode(message)
        times.append(time.thread_time() - begin)
        rig.take(messages)
    rig.close()
    frames.close()
    return 1e3 * statistics.median(times)


def _captured(compute: Compute) -> Replay:
    result = compute()
    return lambda: result


def _refused(reason: str) -> None:
    raise RuntimeError(reason)


def _measure(short: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    model = load_embedded_model()
    batches, steps = (_SHORT_BATCHES, 10) if short else (_BATCHES, 200)
    return {f"step_ms_{batch}": _step_ms(model, batch, steps) for batch in batches}


if __name__ == "__main__":
    answer(_measure("--short" in sys.argv))
