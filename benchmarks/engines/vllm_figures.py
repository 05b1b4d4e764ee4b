"""What the runs of `benchmarks.vllm` came to, and what of it was promised. Nothing here needs vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np

from prefixd.workloads.latency_figures import digest

LEAST_SAVING = 2.0
"""Without prefixd at least this many times as many prompt tokens are computed again."""
LEAST_RATE = 0.95
"""With nothing to hit, requests a second with prefixd are at least this share of those without."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One answered request: what was generated, and the seconds from asking to the first token, queue included."""

    tokens: tuple[int, ...]
    ttft_s: float


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens by where their KV came from, as vLLM's own metrics count them."""

    total: int = 0
    local: int = 0
    """vLLM's own prefix cache."""
    cpu: int = 0
    disk: int = 0
    external: int = 0
    """Of prefixd, whichever tier: cpu, disk and what no tier was named for."""

    @property
    def computed(self) -> int:
        """Tokens that were neither in vLLM's cache nor in prefixd's."""
        return self.total - self.local - self.external

    def __add__(self, other: Self) -> PromptTokens:
        return PromptTokens(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __sub__(self, other: Self) -> PromptTokens:
        return PromptTokens(*(getattr(self, each.name) - getattr(other, each.name) for each in fields(self)))

    def to_plain(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"computed": self.computed}


@dataclass(frozen=True, slots=True)
class Stage:
    """A turn of all conversations."""

    name: str
    replies: tuple[Reply, ...]
    elapsed_s: float
    prompt: PromptTokens

    def to_plain(self) -> dict[str, Any]:
        """As JSON types; `ttft_s` in the requests' order."""
        return {"name": self.name, **_rates([self]), "ttft_s": [round(reply.ttft_s, 5) for reply in self.replies]}


@dataclass(frozen=True, slots=True)
class Run:
    """One configuration's way through the chat: its turns, and the turn after the engine's restart."""

    name: str
    stages: tuple[Stage, ...]
    start_s: tuple[float, ...]
    """Seconds that the engine took to start, each time."""

    @property
    def outputs(self) -> list[tuple[int, ...]]:
        """The generated tokens of all requests in their order."""
        return [reply.tokens for stage in self.stages for reply in stage.replies]

    def to_plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **_rates(self.stages),
            "output_digest": digest(self.outputs),
            "engine_start_s": [round(seconds, 2) for seconds in self.start_s],
            "stages": [stage.to_plain() for stage in self.stages],
        }


@dataclass(frozen=True, slots=True)
class Round:
    """The same prompts, all of them new, on vLLM alone and on vLLM with prefixd; seconds each took for all of them."""

    requests: int
    alone_s: float
    prefixd_s: float
    same_tokens: bool
    alone_cpu_s: float
    """CPU time of the process, until it had nothing left to do; of the others too."""
    prefixd_cpu_s: float
    daemon_cpu_s: float

    @property
    def rate(self) -> float:
        """Requests a second with prefixd, as a share of those without."""
        return self.alone_s / self.prefixd_s


def nothing_to_hit(rounds: Sequence[Round]) -> dict[str, Any]:
    """The figures of at least one round: medians, the share in each round and its quartiles.

    CPU times are of a request. The share that is judged is the median of the rounds': the two runs of a round are
    neighbours in time, so what the machine does otherwise is in both.
    """
    shares = [each.rate for each in rounds]
    low, _, high = statistics.quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else (shares[0],) * 3
    requests = sum(each.requests for each in rounds)
    return {
        "rounds": len(rounds),
        "requests": requests,
        "alone_requests_per_s": statistics.median(each.requests / each.alone_s for each in rounds),
        "prefixd_requests_per_s": statistics.median(each.requests / each.prefixd_s for each in rounds),
        "share": statistics.median(shares),
        "share_quartiles": [low, high],
        "shares": [round(share, 4) for share in shares],
        "same_tokens": all(each.same_tokens for each in rounds),
        **{
            f"{name}_cpu_ms": 1e3 * sum(getattr(each, f"{name}_cpu_s") for each in rounds) / requests
            for name in ("alone", "prefixd", "daemon")
        },
    }


def broken_promises(alone: Run, prefixd: Run, nothing: dict[str, Any], *, times: bool = True) -> list[str]:
    """What does not hold, a line each; `nothing` is of `nothing_to_hit`. Without `times` they are not judged."""
    broken = []
    pairs = list(zip(alone.outputs, prefixd.outputs, strict=True))
    different = sum(one != other for one, other in pairs)
    if different:
        broken.append(f"{different} of {len(pairs)} requests got other tokens with prefixd than from vLLM alone")
    if not nothing["same_tokens"]:
        broken.append("prompts that nobody asked before got other tokens with prefixd than from vLLM alone")
    saving = computed_saving(alone, prefixd)
    if saving < LEAST_SAVING:
        broken.append(f"prefixd saved {saving:.2f} times the prompt tokens, not {LEAST_SAVING:g} times")
    if not times:
        return broken
    before, after = (_quantiles(run.stages)["p50"] for run in (alone, prefixd))
    if after >= before:
        broken.append(f"the median time to the first token is {after:.3f} s with prefixd, {before:.3f} s without")
    if nothing["share"] < LEAST_RATE:
        broken.append(
            f"with nothing to hit, prefixd leaves {nothing['share']:.1%} of vLLM's requests a second, "
            f"not {LEAST_RATE:.0%}"
        )
    return broken


def computed_saving(alone: Run, prefixd: Run) -> float:
    """Prompt tokens that vLLM alone computed, for each that vLLM with prefixd did."""
    return _prompt(alone.stages).computed / max(1, _prompt(prefixd.stages).computed)


def _rates(stages: Sequence[Stage]) -> dict[str, Any]:
    requests, elapsed = sum(len(stage.replies) for stage in stages), sum(stage.elapsed_s for stage in stages)
    return {
        "requests": requests,
        "elapsed_s": elapsed,
        "requests_per_s": requests / elapsed,
        "ttft": _quantiles(stages),
        "prompt_tokens": _prompt(stages).to_plain(),
    }


def _prompt(stages: Sequence[Stage]) -> PromptTokens:
    return sum((stage.prompt for stage in stages), PromptTokens())


def _quantiles(stages: Sequence[Stage]) -> dict[str, float]:
    """Between the two nearest values where they fall between them, as the plot has them."""
    p50, p95 = np.percentile([reply.ttft_s for stage in stages for reply in stage.replies], (50, 95))
    return {"p50": float(p50), "p95": float(p95)}
