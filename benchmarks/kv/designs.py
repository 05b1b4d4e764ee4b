"""Requests a second of virtual tensors over block tables, on the same requests and the same frames."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from benchmarks.kv.rig import PAGED, VIRTUAL, EngineRig, Frames, Request
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel

# Printable characters: what the embedded model's prompts are made of.
_FIRST_TOKEN, _LAST_TOKEN = 0x20, 0x7E
_DESIGNS = (VIRTUAL, PAGED)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests: the same arguments give the same ones. Lengths are in tokens.

    prefix_tokens: what all begin with, in memory before the clock runs; whole blocks, 0 for nothing.
    least_tokens, most_tokens: of a prompt behind the prefix.  concurrent: requests at a time.
    """

    name: str
    requests: int
    prefix_tokens: int
    least_tokens: int
    most_tokens: int
    output_tokens: int
    concurrent: int
    seed: int = 0


def random_tokens(source: Random, count: int) -> list[int]:
    """Tokens of a prompt."""
    return source.choices(range(_FIRST_TOKEN, _LAST_TOKEN + 1), k=count)


def compare(
    model: CausalModel, work: Workload, repetitions: int, max_step_tokens: int, step: Callable[[], None]
) -> dict[str, Any]:
    """Runs each repetition's requests on both designs side by side: the two engines take turns, a pass each.

    A design's time is that of its own passes, so a machine that is busy with other things slows both alike. Every
    repetition has requests of its own, and finds nothing mapped from the one before but the prefix. The ratio is the
    median of the repetitions'. `step` is called after each repetition, of which there is one more, to warm up.
    """
    block_tokens = model.spec.geometry.block_tokens
    blocks = work.prefix_tokens // block_tokens
    longest = -(-(work.most_tokens + work.output_tokens) // block_tokens) + 1
    frames = Frames(model.spec, blocks + 2 * work.concurrent * longest)
    rigs = {
        design: EngineRig(
            model,
            frames.kv(design, work.concurrent),
            frames,
            concurrent=work.concurrent,
            max_step_tokens=max_step_tokens,
        )
        for design in _DESIGNS
    }
    try:
        source = Random(f"{work.name} {work.seed}")
        prefix = random_tokens(source, blocks * block_tokens)
        cached = frames.take(blocks)
        if prefix:
            rigs[VIRTUAL].compute(prefix, cached)
        times: list[dict[str, float]] = []
        same = True
        for _ in range(1 + repetitions):
            lengths = [source.randint(work.least_tokens, work.most_tokens) for _ in range(work.requests)]
            requests = [
                Request([*prefix, *random_tokens(source, length)], work.output_tokens, cached) for length in lengths
            ]
            numbers = {design: rig.submit(requests) for design, rig in rigs.items()}
            times.append(_take_turns(rigs))
            virtual, paged = ([rigs[design].outputs.pop(number) for number in numbers[design]] for design in _DESIGNS)
            same = same and virtual == paged
            step()
        virtual_kv = rigs[VIRTUAL].kv
        assert isinstance(virtual_kv, VirtualKv)
        counts = asdict(virtual_kv.manager.mapping.counts)
    finally:
        for rig in rigs.values():
            rig.close()
        frames.close()
    return {**asdict(work), "same_tokens": same, **_summary(work.requests, times[1:]), "virtual_blocks": counts}


def _take_turns(rigs: dict[str, EngineRig]) -> dict[str, float]:
    """Step all rigs to the ends of their requests; the seconds that each one took."""
    seconds = dict.fromkeys(rigs, 0.0)
    order = list(rigs)
    while any(rig.busy for rig in rigs.values()):
        order.reverse()  # the second one finds the caches full of the first one's keys
        for design in order:
            if rigs[design].busy:
                began = time.perf_counter()
                rigs[design].step()
                seconds[design] += time.perf_counter() - began
    return seconds


def _summary(requests: int, times: Sequence[dict[str, float]]) -> dict[str, Any]:
    ratios = [seconds[PAGED] / seconds[VIRTUAL] for seconds in times]
    return {
        "virtual_over_paged": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        **{
            f"{design}_requests_per_s": _spread([requests / seconds[design] for seconds in times])
            for design in _DESIGNS
        },
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    numbers = {"least": min(values), "median": statistics.median(values), "most": max(values)}
    return {name: round(value, 3) for name, value in numbers.items()}
