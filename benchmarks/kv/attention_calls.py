"""Attention kernels a layer on the CUDA path, counted on the stand-in driver, in a process of its own.

The memory is what `create_memory("cuda")` gives, in chunks of 2 MiB, and the backend is the one of a GPU with a kernel
of its definition; the model itself runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.harness import BenchmarkError
from benchmarks.engines.varlen_reference import varlen_reference
from benchmarks.kv.designs import random_tokens
from benchmarks.kv.rig import VIRTUAL, EngineRig, Frames, Request, load_embedded_model
from benchmarks.kv.stand_in import stand_in_environment
from prefixd.worker.attention.flash_attention import FlashAttention, FlashStep
from prefixd.worker.memory.kv_memory import StepKv
from prefixd.worker.model import CausalModel
from prefixd.worker.spec.kv_groups import CUDA_CHUNK_BYTES

_STEP_TOKENS = 48
_PROMPT_TOKENS = (20, 120)
_OUTPUT_TOKENS = 6


class CountingAttention(FlashAttention):
    """Notes of every pass how many sequences it had, and whether prompts and decoding ones were among them."""

    def __init__(self) -> None:
        super().__init__(varlen_reference)
        self.passes: list[tuple[int, bool]] = []

    def begin(self, step: StepKv) -> FlashStep:
        lengths = [len(segment) for segment in step.segments]
        self.passes.append((len(lengths), min(lengths) == 1 < max(lengths)))
        return super().begin(step)


def count(batches: Sequence[int], timeout_s: float = 300) -> list[dict[str, Any]]:
    """A result for each batch, from a process of its own. Raises BenchmarkError when that fails."""
    with tempfile.TemporaryDirectory(prefix="prefixd-") as folder:
        environment = {**stand_in_environment(Path(folder)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.kv.attention_calls", *map(str, batches)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        raise BenchmarkError(f"attention calls cannot be counted on the stand-in driver: {last}")
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results


def count_here(model: CausalModel, batch: int) -> dict[str, Any]:
    """The passes of `batch` requests at a time, and twice as many requests, so that prompts meet decoding ones."""
    source = Random(batch)
    attention = CountingAttention()
    model.attention = attention
    most = _PROMPT_TOKENS[1] + _OUTPUT_TOKENS
    blocks = -(-most // model.spec.geometry.block_tokens)
    frames = Frames(model.spec, batch * blocks, device="cuda")
    rig = EngineRig(model, frames.kv(VIRTUAL, batch), frames, concurrent=batch, max_step_tokens=_STEP_TOKENS)
    try:
        lengths = [source.randint(*_PROMPT_TOKENS) for _ in range(2 * batch)]
        # Outputs of several lengths, so that the requests do not end, and begin, together.
        rig.run([Request(random_tokens(source, n), _OUTPUT_TOKENS - index % 3) for index, n in enumerate(lengths)])
    finally:
        rig.close()
        frames.close()
    passes = len(attention.passes)
    return {
        "batch": batch,
        "largest_pass": max(sequences for sequences, _ in attention.passes),
        "passes": passes,
        "mixed_passes": sum(mixed for _, mixed in attention.passes),
        "attention_calls_per_layer": attention.calls / (passes * model.spec.geometry.layers),
    }


def main() -> None:
    """Prints the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches", type=int, nargs="+")
    batches = parser.parse_args().batches
    os.environ["HF_HUB_OFFLINE"] = "1"
    model = load_embedded_model(CUDA_CHUNK_BYTES)
    print(json.dumps([count_here(model, batch) for batch in batches]))


if __name__ == "__main__":
    main()
