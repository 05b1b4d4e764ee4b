"""Memory that the KV of a batch takes when it grows with its tokens, against the longest sequence for everyone."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.common.plots import lines
from benchmarks.kv.designs import random_tokens
from benchmarks.kv.rig import VIRTUAL, EngineRig, Frames, Request
from prefixd.worker.model import CausalModel

_GOLDEN = (5**0.5 - 1) / 2
_FILE_NAME = "/memfd:prefixd-gpu-tier"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The batches; the requests of one are those of the batch before and more.

    batches: requests at a time, ascending.  least_tokens, most_tokens: of a prompt, short ones as likely as long.
    """

    batches: Sequence[int]
    least_tokens: int
    most_tokens: int
    output_tokens: int
    seed: int = 0


def measure(model: CausalModel, plan: MemoryPlan, step: Callable[[], None]) -> list[dict[str, Any]]:
    """A result for each batch; `step` is called after each.

    held_bytes: of the frames that the requests had when they had most.  resident_bytes: what the memory file of the
    frames had then of the machine's memory; the file begins with one frame and grows when none is free.
    preallocated_bytes: of a cache that has room for the longest sequence for each request of the batch.
    """
    source = Random(f"memory {plan.seed}")
    lengths = [_length(number, plan) for number in range(plan.batches[-1])]
    prompts = [random_tokens(source, length) for length in lengths]
    results = []
    for batch in plan.batches:
        results.append(_measure(model, prompts[:batch], plan.output_tokens))
        step()
    return results


def _measure(model: CausalModel, prompts: Sequence[Sequence[int]], output_tokens: int) -> dict[str, Any]:
    spec = model.spec
    batch, longest = len(prompts), spec.sequence_capacity
    already = _resident_bytes()
    frames = Frames(spec, 1, most=1 + batch * longest // spec.geometry.block_tokens)
    rig = EngineRig(model, frames.kv(VIRTUAL, batch), frames, concurrent=batch, max_step_tokens=512)
    held = resident = 0

    def look() -> None:
        nonlocal held, resident
        held = max(held, frames.pool.used_count * spec.geometry.block_bytes)
        resident = max(resident, _resident_bytes() - already)

    try:
        rig.run([Request(prompt, output_tokens) for prompt in prompts], look)
    finally:
        rig.close()
        frames.close()
    preallocated = batch * longest * spec.geometry.token_bytes
    return {
        "batch": batch,
        "prompt_tokens": sum(map(len, prompts)),
        "held_bytes": held,
        "resident_bytes": resident,
        "preallocated_bytes": preallocated,
        "memory_ratio": round(held / preallocated, 4),
    }


def draw(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """Both memories by batch: vTensor's figure 11a."""
    batches = [result["batch"] for result in results]
    lines(
        axes,
        {
            name: (batches, [result[f"{name}_bytes"] / (1 << 20) for result in results])
            for name in ("preallocated", "held")
        },
        "requests at a time",
        "MiB of KV",
        "Memory that a batch's KV takes",
    )


def _length(number: int, plan: MemoryPlan) -> int:
    """Of prompt `number`: multiples of the golden ratio, so that the logarithms are spread evenly in every batch."""
    ratio = math.log(plan.most_tokens / plan.least_tokens)
    return round(plan.least_tokens * math.exp(ratio * ((0.5 + number * _GOLDEN) % 1)))


def _resident_bytes() -> int:
    """What the memory files of this process take of the machine's memory, mapped or not."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of the listing itself
            if os.readlink(link).startswith(_FILE_NAME):
                total += link.stat().st_blocks * 512
    return total
