"""What workloads came to: a run each for the ways of serving them that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report_parts.page import Picture, Table
from prefixd.base.tiers import QUOTA_TIERS

TIERS = QUOTA_TIERS
TIER_COLORS = {"gpu": "#228833", "cpu": "#4477aa", "disk": "#ccbb44"}
PLAIN, BEST = "#b9c4d0", "#2b6cb0"


@dataclass(frozen=True, slots=True)
class Run:
    """One way of serving a workload."""

    name: str
    requests_per_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    hit_tokens: Mapping[str, int]
    """By tier."""

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Run:
        """From what `prefixd.workloads.latency_figures.Figures.to_plain` gives."""
        waits, hits = plain["ttft_s"], plain["hit_tokens"]
        return cls(plain["name"], plain["requests_per_s"], waits["p50"], waits["p95"], {t: hits[t] for t in TIERS})


def fastest(runs: Sequence[Run]) -> Run:
    """The run with most requests a second."""
    return max(runs, key=lambda run: run.requests_per_s)


def pictures(runs: Sequence[Run], title: str, best: Run) -> list[Picture]:
    """Requests a second, time to the first token and where hits came from, side by side; a row a run. Names differ."""

    def draw(figure: Any) -> None:
        rate, wait, tiers = figure.subplots(1, 3, sharey=True)
        names = [run.name for run in runs]
        bars = rate.barh(
            names, [run.requests_per_s for run in runs], color=[BEST if run is best else PLAIN for run in runs]
        )
        rate.bar_label(bars, fmt="%.3g", padding=3)
        rate.set_title("requests a second (more is better)")
        rate.margins(x=0.15)
        bars = wait.barh(names, [run.ttft_p50_s for run in runs], color=PLAIN)
        wait.bar_label(bars, [duration(run.ttft_p50_s) for run in runs], padding=3)
        wait.set_title("first token, median (less is better)")
        wait.margins(x=0.2)
        left = [0.0] * len(runs)
        for tier in TIERS:
            tokens = [run.hit_tokens[tier] / 1e3 for run in runs]
            tiers.barh(names, tokens, left=left, label=tier, color=TIER_COLORS[tier])
            left = [done + more for done, more in zip(left, tokens, strict=True)]
        tiers.set_title("thousand prompt tokens found")
        tiers.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=len(TIERS), frameon=False)
        rate.invert_yaxis()
        for axes in (rate, wait):
            axes.xaxis.set_visible(False)
            axes.spines["bottom"].set_visible(False)

    says = f"{title}: {best.name} serves {best.requests_per_s:.3g} requests a second"
    return [Picture(says, draw, width_in=11, height_in=1.0 + 0.38 * len(runs))]


def table(runs: Sequence[Run], best: Run) -> Table:
    """Every figure of every run; the row of `best` is marked."""
    rows = [
        (
            run.name,
            f"{run.requests_per_s:.3g}",
            duration(run.ttft_p50_s),
            duration(run.ttft_p95_s),
            *(f"{run.hit_tokens[tier]:,}" for tier in TIERS),
        )
        for run in runs
    ]
    columns = ("", "requests/s", "first token p50", "p95", *(f"tokens from {tier}" for tier in TIERS))
    return Table(columns, rows, best=list(runs).index(best))


def duration(seconds: float) -> str:
    """Three digits, in the unit that reads well."""
    if seconds >= 100:
        return f"{seconds / 60:.3g} min"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
