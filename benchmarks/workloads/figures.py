"""What a way of serving came to, as JSON, as a table and as plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common.harness import Outcome
from benchmarks.workloads.asking import Asked
from benchmarks.workloads.ways import NO_CACHE, Way
from prefixd.workloads.latency_figures import HitTokens, Quantiles, digest, quantile


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

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


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
    """Whether the model said the same in all ways."""
    return len({run.output_digest for run in figures}) == 1


def outcome_of(title: str, result: Mapping[str, Any], measured: Sequence[Figures], wrong: Sequence[str]) -> Outcome:
    """A benchmark's outcome, of `result` and the figures of its ways; `wrong`: what is not as it should be."""
    compared = {
        "same_answers": same_answers(measured),
        "shortcomings": list(wrong),
        "ways": [run.to_plain() for run in measured],
    }
    return Outcome(
        {**result, **compared},
        wrong,
        show=lambda: print_table(title, measured),
        draw=lambda axes: draw(axes, measured),
        columns=3,
    )


def print_table(title: str, figures: Sequence[Figures]) -> None:
    """One row a way, on stdout."""
    table = Table(title=title)
    table.add_column("way")
    for column in ("requests/s", "first token p50", "p95", "hits", "of possible", "gpu", "cpu", "disk"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in figures:
        tiers = (run.hit_tokens.gpu, run.hit_tokens.cpu, run.hit_tokens.disk)
        table.add_row(
            run.name,
            f"{run.requests_per_s:.2f}",
            f"{run.ttft_s.p50 * 1e3:.0f} ms",
            f"{run.ttft_s.p95 * 1e3:.0f} ms",
            f"{run.hit_rate:.1%}",
            f"{run.hit_share:.1%}" if run.tiers else "",
            *(str(tokens) for tokens in tiers),
        )
    Console(width=120).print(table)


def draw(axes: Sequence[Any], figures: Sequence[Figures]) -> None:
    """Three plots in a row: time to the first token, requests a second, and hit tokens by tier."""
    names = [run.name for run in figures]
    rows = range(len(figures))
    latency, throughput, hits = axes
    latency.barh(rows, [run.ttft_s.p95 for run in figures], color="#bbccee", label="p95")
    latency.barh(rows, [run.ttft_s.p50 for run in figures], color="#4477aa", label="p50")
    latency.set_xlabel("time to first token (s)")
    latency.legend(fontsize="small")
    throughput.barh(rows, [run.requests_per_s for run in figures], color="#4477aa")
    throughput.set_xlabel("requests / s")
    cached = [run for run in figures if run.name != NO_CACHE]
    before = [0] * len(figures)
    for tier, colour in (("gpu", "#228833"), ("cpu", "#ccbb44"), ("disk", "#ee6677")):
        tokens = [getattr(run.hit_tokens, tier) for run in figures]
        hits.barh(rows, tokens, left=before, color=colour, label=tier)
        before = [left + more for left, more in zip(before, tokens, strict=True)]
    if cached:
        possible = max(run.possible_tokens for run in cached)
        hits.axvline(possible, color="black", linestyle="--", linewidth=1, label="possible")
        hits.set_xlim(0, max(1, possible) * 1.1)
    hits.set_xlabel("hit tokens")
    hits.legend(fontsize="small")
    for index, each in enumerate(axes):
        each.set_yticks(rows, names if not index else [""] * len(names), fontsize="small")
        each.invert_yaxis()
