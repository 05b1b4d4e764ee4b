"""Draws a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefixd.base.errors import ConfigError
from prefixd.planner.curve import OPTIMUM, Curve
from prefixd.planner.machine.planned_codecs import EXACT
from prefixd.planner.sweep import GIB, Point, enough


def check_drawable(file: Path) -> None:
    """Checks, before the minutes that a plan takes, that a plot can be written to `file`. Raises ConfigError."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise ConfigError("matplotlib is not installed, so there is no plot: pip install matplotlib") from error
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if file.suffix.removeprefix(".").lower() not in kinds:
        raise ConfigError(f"--plot {file} names no kind of picture; end it with one of .{', .'.join(kinds)}")


def draw_plan(points: Sequence[Point], curve: Curve | None, token_bytes: int, file: Path) -> None:
    """Draws hits and waiting times over the disk's size, a line for each size of memory and each policy; and the curve.

    `check_drawable` has checked matplotlib and the file's kind.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10 if curve is None else 15, 4), layout="constrained")
    hits, waits, *others = figure.subplots(1, 2 if curve is None else 3)
    codecs = {plan.plan.codec.name for plan, _ in points}
    lines: dict[str, list[Point]] = {}
    for plan, figures in points:
        settings = plan.plan.settings
        label = f"{plan.cpu_bytes / GIB:g} GiB, {settings.scheduler.policy}, {settings.cache.eviction}"
        label += f", {plan.plan.codec.name}" if codecs > {EXACT.name} else ""
        lines.setdefault(label, []).append((plan, figures))
    for label, line in lines.items():
        ordered = sorted(line, key=lambda point: point[0].disk_bytes)
        sizes = [plan.disk_bytes / GIB for plan, _ in ordered]
        hits.plot(sizes, [100 * found.hit_rate for _, found in ordered], marker="o", label=label)
        waits.plot(sizes, [found.ttft_s.p50 for _, found in ordered], marker="o", label=label)
    legend = "CPU tier, policy, eviction" + (", codec" if codecs > {EXACT.name} else "")
    best, found = enough(points)
    hits.plot([best.disk_bytes / GIB], [100 * found.hit_rate], "k*", markersize=14, label="enough")
    if (most := points[0][1].achievable_hit_rate) is not None:
        hits.axhline(100 * most, color="grey", linestyle="--", label="without limits")
    hits.set(xlabel="disk tier, GiB", ylabel="prompt tokens found, %", ylim=(0, None), title="Hits by the disk's size")
    waits.set(xlabel="disk tier, GiB", ylabel="time to first token, p50, s", ylim=(0, None))
    waits.set(title="Wait for the first token")
    waits.legend(title=legend, fontsize="small")
    hits.legend(title=legend, fontsize="small")
    if curve is not None:
        (axes,) = others
        sizes = [size * curve.block_tokens * token_bytes / GIB for size in curve.capacities]
        for policy, rates in curve.hit_rates.items():
            style = "--" if policy == OPTIMUM else "-"
            axes.plot(sizes, [100 * (1 - rate) for rate in rates], style, marker=".", label=policy)
        axes.axhline(100 * (1 - curve.most), color="grey", linestyle=":", label="without limits")
        axes.set(xlabel="one tier of so many GiB", ylabel="blocks not found, %", xscale="log", ylim=(0, 100))
        axes.set(title="Misses by size and eviction policy")
        axes.legend(fontsize="small")
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:
        raise ConfigError(f"{file} cannot be drawn ({error}); end its name in .png, .svg or .pdf") from error
