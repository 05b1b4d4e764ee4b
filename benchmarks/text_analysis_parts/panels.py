"""The paper's figures: requests a second, the share that was computed, and the first token's latency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.text_analysis_parts.measuring import Measured

_TITLES = {
    "goals": "against no cache and everything on GPU",
    "policies": "policies of the queue",
    "header": "a header before all, half of them new",
    "tiers": "tiers, with and without prefetch",
    "eviction": "eviction",
    "latency": "one request after the other",
}


def panels(measured: Sequence[Measured]) -> list[list[Measured]]:
    """What stands side by side: the runs of one suite and prefix length."""
    found: dict[tuple[str, int], list[Measured]] = {}
    for run in measured:
        found.setdefault((run.suite, run.cell.prefix_tokens), []).append(run)
    return list(found.values())


def draw(axes: Sequence[Any], measured: Sequence[Measured]) -> None:
    """A panel each: bars of requests a second, or of the time to the first token, with what was computed."""
    for panel, runs in zip(axes, panels(measured), strict=True):
        suite, length = runs[0].suite, runs[0].cell.prefix_tokens
        names = [run.cell.name.replace(", ", ",\n") for run in runs]
        latency = runs[0].cell.one_by_one or suite == "header"
        values = [run.figures.ttft_s.p50 * 1e3 if latency else run.figures.requests_per_s for run in runs]
        bars = panel.barh(names, values, color="#4477aa")
        panel.invert_yaxis()
        panel.bar_label(bars, [f" {run.figures.miss_rate:.0%} computed" for run in runs], fontsize=7)
        panel.margins(x=0.35)
        panel.tick_params(labelsize=7)
        panel.set_xlabel("ms to the first token, p50" if latency else "requests / s")
        panel.set_title(f"{_TITLES[suite]}\n(prefixes of {length} tokens)", fontsize=9)
