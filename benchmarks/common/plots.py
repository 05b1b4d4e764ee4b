"""The plots of benchmarks: bars side by side, and lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Values = Sequence[float]


def bars(axes: Any, groups: Sequence[str], series: Mapping[str, Values], title: str, x: str) -> None:
    """Draws one bar of every series in each group, with its value; no bar for NaN.

    Args:
        axes: matplotlib's.
        groups: names below the groups.
        series: by name, a value for each group.
        title: what is measured, and its unit: it stands above and at the axis of the values.
        x: what the groups are.
    """
    if not series:
        return
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [group + (number - (len(series) - 1) / 2) * width for group in range(len(groups))]
        made = axes.bar(places, values, 0.94 * width, label=name)
        axes.bar_label(made, list(map(_label, values)), fontsize=6)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(title, fontsize=8)
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8)


def _label(value: float) -> str:
    if value != value:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


def lines(
    axes: Any, series: Mapping[str, tuple[Values, Values]], x: str, y: str, title: str, legend: str | None = None
) -> None:
    """Draws the lines; both axes are logarithmic."""
    for name, (places, values) in series.items():
        axes.plot(places, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.legend(title=legend, fontsize="small")
