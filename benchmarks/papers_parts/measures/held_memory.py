"""Memory that the KV of requests holds while the load rises and falls (vTensor, figure 11b)."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from random import Random

from benchmarks.kv.designs import random_tokens
from benchmarks.kv.rig import VIRTUAL, EngineRig, Frames, Request
from benchmarks.papers_parts.measures.engine_pairs import STEP_TOKENS
from prefixd.worker.model import CausalModel

_QUIET, _BUSY = 2, 16


@dataclass(frozen=True, slots=True)
class HeldByLoad:
    """held: bytes after each pass. quiet, busy: the most held in a wave of few and of many requests, medians."""

    held: list[int]
    quiet: float
    busy: float


def held_by_load(model: CausalModel, short: bool) -> HeldByLoad:
    """Waves of few requests and of many, in turn, on one engine; a wave begins when the one before it has ended."""
    few, many, waves, tokens = (1, 2, 1, 24) if short else (_QUIET, _BUSY, 3, 256)
    source, spec = Random("waves"), model.spec
    frames = Frames(spec, 1, most=many * (spec.sequence_capacity // spec.geometry.block_tokens) + 1)
    rig = EngineRig(model, frames.kv(VIRTUAL, many), frames, concurrent=many, max_step_tokens=STEP_TOKENS)
    held, peaks = list[int](), {few: list[int](), many: list[int]()}
    try:
        for requests in (few, many) * waves:
            begin = len(held)
            rig.run(
                [Request(random_tokens(source, tokens), tokens // 8) for _ in range(requests)],
                lambda: held.append(frames.pool.used_count * spec.geometry.block_bytes),
            )
            peaks[requests].append(max(held[begin:]))
    finally:
        rig.close()
        frames.close()
    return HeldByLoad(held, statistics.median(peaks[few]), statistics.median(peaks[many]))
