"""The figure of `benchmarks.peers`, drawn from its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.peers_parts.cache_figures import HIGHER_IS_BETTER, PARTS
from benchmarks.peers_parts.caches import LABELS

_COLOURS = {"vllm": "#bbbbbb", "prefixd": "#4477aa", "lmcache": "#ee8866", "offloading": "#44aa99"}
_TITLES = {
    "requests_per_s": ("Requests a second", "requests / s"),
    "ttft_p50_s": ("Time to the first token, median", "seconds"),
    "ttft_p95_s": ("Time to the first token, 95%", "seconds"),
}


def draw(panels: Sequence[Any], caches: dict[str, Any]) -> None:
    """A panel for each figure: medians of the rounds, and a point for each round."""
    for axes, figure in zip(panels, HIGHER_IS_BETTER, strict=True):
        _draw_figure(axes, caches, figure)


def _draw_figure(axes: Any, caches: dict[str, Any], figure: str) -> None:
    width = 0.8 / len(caches)
    for number, (name, parts) in enumerate(caches.items()):
        places = [part + (number - (len(caches) - 1) / 2) * width for part in range(len(PARTS))]
        medians = [parts[part][figure] for part in PARTS]
        bars = axes.bar(places, medians, 0.94 * width, color=_COLOURS[name], label=LABELS[name])
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=4)
        for place, part in zip(places, PARTS, strict=True):
            values = parts[part]["rounds"][figure]
            axes.plot([place] * len(values), values, "k.", markersize=4)
    title, unit = _TITLES[figure]
    axes.set_xticks(range(len(PARTS)), PARTS)
    axes.set_ylabel(unit)
    axes.margins(y=0.15)
    axes.set_title(title, fontsize=10)
    if figure == "requests_per_s":
        axes.legend(frameon=False, fontsize=8)
