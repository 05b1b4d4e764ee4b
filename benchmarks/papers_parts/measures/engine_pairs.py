"""Engines of both designs on the same requests: virtual tensors over block tables, by `benchmarks.kv.designs`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from benchmarks.common.harness import BenchmarkError
from benchmarks.kv.designs import Workload, compare
from benchmarks.kv.rig import load_embedded_model
from prefixd.worker.model import CausalModel

STEP_TOKENS = 512  # `worker.max_step_tokens` as it is by default
_REPETITIONS = 3


@lru_cache(maxsize=1)
def embedded_model() -> CausalModel:
    """The small model that comes with prefixd. Raises BenchmarkError when it cannot be written."""
    return load_embedded_model()


def compare_all(works: Sequence[Workload], short: bool) -> list[dict[str, Any]]:
    """The comparison of each workload. Raises BenchmarkError where the designs give different tokens."""
    found = []
    for work in works:
        of_work = compare(embedded_model(), work, 1 if short else _REPETITIONS, STEP_TOKENS, lambda: None)
        if not of_work["same_tokens"]:
            raise BenchmarkError(f"virtual and paged give different tokens in {work.name}")
        found.append(of_work)
    return found


def decoding(batch: int, context_tokens: int, output_tokens: int) -> Workload:
    """Requests that decode behind a context whose KV is in memory; they share it, so that it is computed once."""
    return Workload(f"decode {batch} x {context_tokens}", batch, context_tokens, 1, 1, output_tokens, batch)


def prompts(tokens: int) -> Workload:
    """One prompt of so many tokens, and its first token."""
    return Workload(f"prompt of {tokens}", 1, 0, tokens, tokens, 1, 1)


def ratio(of_work: dict[str, Any]) -> float:
    """Requests a second of virtual tensors over those of block tables."""
    value: float = of_work["virtual_over_paged"]
    return value
