"""The figures of a way of serving, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common.harness import Outcome, Table
from benchmarks.ways_of_serving.ways import Way
from benchmarks.workloads.asking import Asked
from prefixd.workloads.latency_figures import HitTokens, Quantiles, digest, quantile

_SHOWN = (
    *("name", "requests_per_s", "ttft_s.p50", "ttft_s.p95", "hit_rate", "hit_share"),
    *("hit_tokens.gpu", "hit_tokens.cpu", "hit_tokens.disk"),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """A way's figures.

    ttft_s: the client's seconds from sending a request to its first token. hit_tokens: prompt tokens that were not
    computed, by the tier they came from; hit_rate: their share of all prompt tokens. possible_tokens: prompt tokens
    that a cache without a limit would have had; hit_share: the share of these that were hits (1 if there are none).
    output_digest: of what the model says, in the requests' order; see `Asked.likeliest`.
    """

    name: str
    policy: str
    tiers: str
    requests: int
    elapsed_s: float
    requests_per_s: float
    ttft_s: Quantiles
    prompt_tokens: int
    output_tokens: int
    hit_tokens: HitTokens
    hit_rate: float
    possible_tokens: int
    hit_share: float
    output_digest: str


def summarise(way: Way, asked: Sequence[Asked], elapsed_s: float) -> Figures:
    """The figures of requests, at least one, that took `elapsed_s` seconds together."""
    hits = HitTokens(
        gpu=sum(each.gpu_tokens for each in asked),
        cpu=sum(each.cpu_tokens for each in asked),
        disk=sum(each.disk_tokens for each in asked),
    )
    waits = sorted(each.ttft_s for each in asked)
    prompt_tokens = sum(each.prompt_tokens for each in asked)
    possible_tokens = sum(each.possible_tokens for each in asked)
    hit_tokens = sum(each.hit_tokens for each in asked)
    return Figures(
        name=way.name,
        policy=way.policy,
        tiers=way.tiers,
        requests=len(asked),
        elapsed_s=elapsed_s,
        requests_per_s=len(asked) / elapsed_s,
        ttft_s=Quantiles(quantile(waits, 0.5), quantile(waits, 0.95)),
        prompt_tokens=prompt_tokens,
        output_tokens=sum(len(each.output) for each in asked),
        hit_tokens=hits,
        hit_rate=hit_tokens / prompt_tokens,
        possible_tokens=possible_tokens,
        hit_share=hit_tokens / possible_tokens if possible_tokens else 1.0,
        output_digest=digest([each.likeliest for each in asked]),
    )


def same_answers(figures: Sequence[Figures]) -> bool:
    """Returns True if the model gave the same answers in all ways."""
    return len({run.output_digest for run in figures}) == 1


def outcome_of(result: Mapping[str, Any], measured: Sequence[Figures], wrong: Sequence[str]) -> Outcome:
    """A benchmark's outcome, of `result` and the figures of its ways; `wrong`: missed bounds in words."""
    ways = [asdict(run) for run in measured]
    compared = {"same_answers": same_answers(measured), "shortcomings": list(wrong), "ways": ways}
    return Outcome({**result, **compared}, wrong, [Table(ways, _SHOWN)])
