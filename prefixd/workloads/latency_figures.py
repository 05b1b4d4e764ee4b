"""Computes hits, rates and latencies of a run of requests."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_FIRST = 32


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One finished request. `ttft_s`: seconds at the client from sending it to its first token, queue included."""

    output: tuple[int, ...]
    ttft_s: float
    gpu_tokens: int
    cpu_tokens: int
    disk_tokens: int

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed; more than the prefix if the body was cached too."""
        return self.gpu_tokens + self.cpu_tokens + self.disk_tokens


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 95th percentile."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True)
class HitTokens:
    """Prompt tokens that were not computed, by the tier that had them."""

    gpu: int
    cpu: int
    disk: int


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a run.

    requests_per_s counts the measured requests; cold_requests_per_s also counts the warm-up before them and its time.
    miss_rate is the share of the prefixes' tokens that had to be computed.
    output_digest covers the output tokens of all requests in order, first_outputs_digest those of the first 32, so that
    it can be compared with a run of fewer of the same requests.
    """

    name: str
    requests: int
    elapsed_s: float
    requests_per_s: float
    cold_requests_per_s: float
    ttft_s: Quantiles
    hit_tokens: HitTokens
    miss_rate: float
    output_digest: str
    first_outputs_digest: str = ""

    def to_plain(self) -> dict[str, Any]:
        """As JSON types."""
        return asdict(self)


def summarise(
    name: str,
    results: Sequence[RequestResult],
    *,
    elapsed_s: float,
    prefix_tokens: int,
    warm_up_requests: int = 0,
    warm_up_s: float = 0.0,
) -> Figures:
    """Computes the figures of at least one result, in the requests' order; `prefix_tokens`: length of a prefix."""
    hits = HitTokens(
        gpu=sum(result.gpu_tokens for result in results),
        cpu=sum(result.cpu_tokens for result in results),
        disk=sum(result.disk_tokens for result in results),
    )
    prefix_hits = sum(min(result.hit_tokens, prefix_tokens) for result in results)
    waits = sorted(result.ttft_s for result in results)
    return Figures(
        name=name,
        requests=len(results),
        elapsed_s=elapsed_s,
        requests_per_s=len(results) / elapsed_s,
        cold_requests_per_s=(len(results) + warm_up_requests) / (elapsed_s + warm_up_s),
        ttft_s=Quantiles(quantile(waits, 0.5), quantile(waits, 0.95)),
        hit_tokens=hits,
        miss_rate=1 - prefix_hits / (len(results) * prefix_tokens),
        output_digest=digest([result.output for result in results]),
        first_outputs_digest=digest([result.output for result in results[:_FIRST]]),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the quantile of sorted values by nearest rank: at least `share` of them are not above it."""
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def digest(outputs: Sequence[Sequence[int]]) -> str:
    """Returns SHA-256 over lengths and ids of all outputs, as 32-bit numbers."""
    state = hashlib.sha256()
    for output in outputs:
        state.update(array("I", [len(output), *output]).tobytes())
    return state.hexdigest()
