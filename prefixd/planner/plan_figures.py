"""The figures of a planned run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from prefixd.workloads.latency_figures import Quantiles, quantile


@dataclass(frozen=True, slots=True)
class PlannedResult:
    """One finished request.

    Attributes:
        ttft_s: from its arrival, queue included, to its first token.
        end_s: when it ended, since the start.
        prompt_tokens, output_tokens: its sizes.
        hit_tokens: prompt tokens found, by tier, nearest first: (512, 0, 1024).
    """

    ttft_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    hit_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """The figures of a run in virtual time.

    Attributes:
        requests: finished; `refused` is how many never fitted the GPU tier.
        elapsed_s: virtual seconds from the first arrival to the last end.
        requests_per_s, prompt_tokens_per_s, output_tokens_per_s: of these.
        hit_rate: share of the prompt tokens that were found, in any tier.
        hits: of each tier.
        achievable_hit_rate: the share that a cache without limits would have found; None if it is not known.
        ttft_s: quantiles.
        disk_written_bytes, disk_read_bytes: bytes moved, as the disk keeps them.
        disk_saved_bytes: at the end, by how many bytes the disk's blocks are larger than what it keeps of them.
        evicted_blocks: of each tier.
        preempted: how often the dispatcher took a request back from the worker for lack of frames.
        gpu_busy: share of the time in which the worker computed.
    """

    requests: int
    refused: int
    elapsed_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    hit_rate: float
    hits: dict[str, float]
    achievable_hit_rate: float | None
    ttft_s: Quantiles
    disk_written_bytes: int
    disk_read_bytes: int
    disk_saved_bytes: int
    evicted_blocks: dict[str, int]
    preempted: int
    gpu_busy: float

    def to_plain(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def summarise(
    results: Sequence[PlannedResult],
    tiers: Sequence[str],
    *,
    began_s: float,
    refused: int,
    achievable: float | None,
    disk_written_bytes: int,
    disk_read_bytes: int,
    disk_saved_bytes: int,
    evicted_blocks: dict[str, int],
    preempted: int,
    busy_s: float,
) -> PlanFigures:
    """The figures of `results`, at least one; `tiers` are the names by level."""
    elapsed_s = max(result.end_s for result in results) - began_s
    prompts = sum(result.prompt_tokens for result in results)
    hits = [sum(result.hit_tokens[level] for result in results) / prompts for level in range(len(tiers))]
    waits = sorted(result.ttft_s for result in results)
    return PlanFigures(
        requests=len(results),
        refused=refused,
        elapsed_s=elapsed_s,
        requests_per_s=len(results) / elapsed_s,
        prompt_tokens_per_s=prompts / elapsed_s,
        output_tokens_per_s=sum(result.output_tokens for result in results) / elapsed_s,
        hit_rate=sum(hits),
        hits=dict(zip(tiers, hits, strict=True)),
        achievable_hit_rate=achievable,
        ttft_s=Quantiles(quantile(waits, 0.5), quantile(waits, 0.95)),
        disk_written_bytes=disk_written_bytes,
        disk_read_bytes=disk_read_bytes,
        disk_saved_bytes=disk_saved_bytes,
        evicted_blocks=evicted_blocks,
        preempted=preempted,
        gpu_busy=busy_s / elapsed_s,
    )
