"""Draws a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.jenga_parts.subjects import DRAFT, SUBJECTS

COLORS = {
    "baseline": "#bbbbbb",
    "virtual": "#4477aa",
    "paged": "#ee6677",
    "halves": "#66ccee",
    "alone": "#ccbb44",
    "draft": "#228833",
}
TITLES = {
    "waste": "allocated bytes not needed, of all",
    "found": "prompt tokens found, of all",
    "requests_per_s": "requests a second",
    "passes": "passes of a model with a draft",
}


def draw(panels: Sequence[Any], models: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """A panel a figure: a bar a way, in groups of a subject. Subjects without the figure are left out."""
    for axes, (figure, title) in zip(panels, TITLES.items(), strict=True):
        shown = {name: ways for name, ways in models.items() if figure != "passes" or DRAFT in SUBJECTS[name].ways}
        labelled: set[str] = set()
        for number, (name, ways) in enumerate(shown.items()):
            width = 0.8 / len(SUBJECTS[name].ways)
            for place, (way, figures) in enumerate(ways.items()):
                at = number + (place - (len(ways) - 1) / 2) * width
                label = None if way in labelled else way
                bars = axes.bar(at, figures[figure], width, color=COLORS[way], label=label)
                labelled.add(way)
                axes.bar_label(bars, fmt=_number, fontsize=8)
        axes.set_xticks(range(len(shown)), list(shown))
        axes.set_title(title, fontsize=10)
        axes.margins(y=0.15)
    panels[0].legend()


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
