"""What a decode step costs while blocks are mapped in the background, against one while nothing is mapped.

Some requests decode, with memory for all they will generate. Beside them there are two more virtual tensors, of which
nothing is computed, so that every step has the same batch whether something is mapped during it or not:

```
kind of step    asked for when the step begins, mapped while it computes        counted as
idle            nothing                                                         idle
boundary        a block each for two tensors that grow                          mapping
attach          a new tensor with a cached prefix of thousands of tokens        mapping
```

The kinds come in random order, equally often idle and mapping. A step is timed with the call that asks for the mapping,
as a request waits for that, too. What is still being mapped when the step ends is waited for outside of the time, and
unmapped, so that the next attach finds nothing mapped.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from benchmarks.kv.designs import random_tokens
from benchmarks.kv.rig import VIRTUAL, EngineRig, Frames, Request
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel
from prefixd_swap.vmem import FrameId

IDLE, BOUNDARY, ATTACH = "idle", "boundary", "attach"
_KINDS = (IDLE, BOUNDARY, ATTACH)
_ORDER = (IDLE, IDLE, BOUNDARY, ATTACH)
_GROWING = 2


@dataclass(frozen=True, slots=True)
class StepPlan:
    """steps: of each round, a multiple of 4.  batch: requests that decode.  prefix_tokens: what a new request attaches.

    run_blocks: of the prefix that lie next to each other: a prefix whose blocks were taken one by one has runs of 1.
    """

    rounds: int
    steps: int
    batch: int
    prompt_tokens: int
    prefix_tokens: int
    run_blocks: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of every step, and how many blocks were mapped, by kind of step."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in _KINDS})
    mapped: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_KINDS, 0))

    @property
    def mapping(self) -> list[float]:
        """Of the steps in which blocks were mapped."""
        return [*self.seconds[BOUNDARY], *self.seconds[ATTACH]]


class StepTimer:
    """Times the steps of rounds of `plan`."""

    def __init__(self, model: CausalModel, plan: StepPlan, background: Executor | None) -> None:
        geometry = model.spec.geometry
        self._plan = plan
        blocks = plan.prefix_tokens // geometry.block_tokens
        own = -(-(plan.prompt_tokens + plan.steps + 1) // geometry.block_tokens) + 1
        self._frames = Frames(model.spec, blocks + plan.batch * own + _GROWING)
        self._prefix = _in_runs(self._frames.take(blocks), plan.run_blocks, Random(plan.seed))
        self._growing = self._frames.take(_GROWING)
        kv = self._frames.kv(VIRTUAL, plan.batch + 2 * _GROWING, background)
        assert isinstance(kv, VirtualKv)
        self.kv = kv
        self._rig = EngineRig(model, kv, self._frames, concurrent=plan.batch, max_step_tokens=512)

    def round(self, source: Random) -> Round:
        """Fresh requests, and `plan.steps` decode steps of them."""
        plan = self._plan
        result = Round()
        prompts = [random_tokens(source, plan.prompt_tokens) for _ in range(plan.batch)]
        # Two tokens more than there are steps: the first comes with the prompt, and nobody ends while time is taken.
        self._rig.submit([Request(prompt, plan.steps + 2, all_frames=True) for prompt in prompts])
        self._rig.step()
        while not self._rig.decoding:
            self._rig.step()
        gc.collect()
        for _ in range(plan.steps // len(_ORDER)):
            for kind in source.sample(_ORDER, len(_ORDER)):
                self._timed(kind, result)
        while self._rig.busy:
            self._rig.step()
        return result

    def close(self) -> None:
        self._rig.close()
        self._frames.close()

    def _timed(self, kind: str, result: Round) -> None:
        growing = [self.kv.open(()) for _ in range(_GROWING)] if kind == BOUNDARY else []
        for tensor in growing:
            self.kv.wait(tensor, tensor.capacity_tokens)
        opened = list(growing)
        before = self.kv.manager.mapping.counts.mapped
        began = time.perf_counter()
        for tensor, frame in zip(growing, self._growing, strict=False):
            self.kv.extend(tensor, [frame])
        if kind == ATTACH:
            opened.append(self.kv.open(self._prefix))
        self._rig.step()
        result.seconds[kind].append(time.perf_counter() - began)
        for tensor in opened:
            self.kv.wait(tensor, tensor.capacity_tokens)
            self.kv.close(tensor, lambda: None)
        result.mapped[kind] += self.kv.manager.mapping.counts.mapped - before
        self.kv.manager.unused.reclaim()


def measure(model: CausalModel, plan: StepPlan, step: Callable[[], None], in_background: bool = True) -> dict[str, Any]:
    """Times the steps of all rounds; `step` is called after each, of which there is one more, to warm up.

    in_background: False: blocks are mapped before a step that asks for them, and it waits for them.
    """
    source = Random(f"steps {plan.seed}")
    rounds = []
    with ThreadPoolExecutor(1, "mapping") as background:
        timer = StepTimer(model, plan, background if in_background else None)
        try:
            for _ in range(1 + plan.rounds):
                rounds.append(timer.round(source))
                step()
        finally:
            timer.close()
    return summary(rounds[1:])


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """The median of the rounds' ratios of 99th percentiles: a burst of other work on the machine spoils one round.

    idle_halves_p99_ratio: the same of every second idle step to the others: what chance alone makes of it.
    """
    ratios = [p99(each.mapping) / p99(each.seconds[IDLE]) for each in rounds]
    halves = [p99(each.seconds[IDLE][::2]) / p99(each.seconds[IDLE][1::2]) for each in rounds]
    medians = [statistics.median(each.mapping) / statistics.median(each.seconds[IDLE]) for each in rounds]
    seconds = {kind: [second for each in rounds for second in each.seconds[kind]] for kind in _KINDS}
    return {
        "step_p99_ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "idle_halves_p99_ratio": round(statistics.median(halves), 3),
        "step_p50_ratio": round(statistics.median(medians), 3),
        "steps": {
            kind: {
                "steps": len(times),
                "blocks_mapped": sum(each.mapped[kind] for each in rounds),
                "p50_ms": round(statistics.median(times) * 1e3, 3),
                "p99_ms": round(p99(times) * 1e3, 3),
            }
            for kind, times in seconds.items()
        },
    }


def p99(times: Sequence[float]) -> float:
    """The 99th percentile."""
    return float(np.percentile(times, 99))


def _in_runs(frames: Sequence[FrameId], length: int, source: Random) -> list[FrameId]:
    """The frames in shuffled runs of `length` neighbours."""
    runs = [frames[start : start + length] for start in range(0, len(frames), length)]
    source.shuffle(runs)
    return [frame for run in runs for frame in run]
