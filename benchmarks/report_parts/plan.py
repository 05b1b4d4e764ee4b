"""The section of `prefixd plan`: what machines of several sizes would do with a trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.report_parts.page import Card, Choice, Picture, Section, Table
from benchmarks.report_parts.results import Result
from benchmarks.report_parts.runs import duration

Point = Mapping[str, Any]

_GIB = 1 << 30
_FULL = 0.98
_ALIKE = 0.01
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#777777")
_MARKS = "osD^vP*X"


def section(result: Result) -> Section:
    """Hits and waiting over the size of the tiers, and what is enough."""
    content = result.content
    points: Sequence[Point] = content["points"]
    enough = next(point for point in points if all(point[name] == value for name, value in content["enough"].items()))
    achievable = points[0]["achievable_hit_rate"]
    most = f" of {achievable:.1%} possible" if achievable is not None else ""
    tried = "the only machine tried" if len(points) == 1 else f"the cheapest of {len(points)} that finds nearly as much"
    disk = size(enough["disk_bytes"])
    bare = [point["hit_rate"] for point in points if not point["disk_bytes"]] if enough["disk_bytes"] else []
    without = f"; without a disk {max(bare):.1%} at most" if bare else ""
    full = ". One GPU is too slow for these requests: the queue grows" if enough["gpu_busy"] > _FULL else ""
    choice = Choice(
        f"Plan: {content['trace'].removesuffix('.jsonl').replace('_', ' ')} on {content['model']}",
        *_policy(points, enough),
        f"{size(enough['cpu_bytes'])} CPU, {disk} disk",
        tried,
        f"{enough['hit_rate']:.1%}{most} of the prompt tokens are found{without}{full}",
        "plan",
    )
    return Section(
        "plan",
        f"Plan: {content['trace']} on {content['model']}",
        f"{points[0]['requests']:,} requests in virtual time on {len(points)} machines; planned in "
        f"{duration(content['planning_s'])}. Columns by tier say where the tokens were when they were brought up "
        "for the request: the look-ahead may have read them from disk into CPU memory before that.",
        result,
        pictures=[_picture(points, enough, achievable), *([_curve(content["curve"])] if content["curve"] else [])],
        tables=[_table(points, enough), Table(("Assumed",), [(line,) for line in content["assumptions"]])],
        choices=[choice],
        cards=[_eviction_card(content["curve"])] if content["curve"] else [],
    )


def _policy(points: Sequence[Point], enough: Point) -> tuple[str, str]:
    """Of the policies that were planned with the sizes that are enough: the one with the soonest first token."""
    sizes = ("cpu_bytes", "disk_bytes")
    alike = [point for point in points if all(point[name] == enough[name] for name in sizes)]
    soonest = min(alike, key=lambda point: point["ttft_s"]["p50"])
    waits = ", ".join(
        f"{point['policy']} with {point['eviction']} {duration(point['ttft_s']['p50'])}, {point['hit_rate']:.1%} found"
        for point in alike
    )
    compared = f"first token, median: {waits}" if len(alike) > 1 else f"the only one planned, with {enough['eviction']}"
    return soonest["policy"], compared


def _eviction_card(curve: Mapping[str, Any]) -> Card:
    """The policy that is best where it matters most: of the widest gap between any policy and LRU."""
    rates: Mapping[str, Sequence[float]] = curve["hit_rates"]
    policies = [name for name in rates if name not in ("optimum", "random")]
    total = {name: sum(rates[name]) for name in policies}
    best = max(policies, key=lambda name: total[name])
    gains = [ours - lru for ours, lru in zip(rates[best], rates["lru"], strict=True)]
    at = max(range(len(gains)), key=lambda place: gains[place])
    tokens = [blocks * curve["block_tokens"] / 1e6 for blocks in curve["capacity_blocks"]]
    alike = next((place for place in range(len(gains)) if max(gains[place:]) < _ALIKE), None)
    until = f"; from {tokens[alike]:.3g} million on LRU finds as much, within 1%" if alike else ""
    return Card(
        "Eviction, when memory is full?",
        best,
        f"with room for {tokens[at]:.3g} million tokens it finds {rates[best][at]:.1%}, LRU {rates['lru'][at]:.1%}, "
        f"the optimum {rates['optimum'][at]:.1%}{until}",
        "plan",
    )


def _curve(curve: Mapping[str, Any]) -> Picture:
    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for number, (name, rates) in enumerate(curve["hit_rates"].items()):
            style = {"color": "black", "linestyle": "--"} if name == "optimum" else {"color": _COLORS[number]}
            axes.plot(curve["capacity_blocks"], [100 * rate for rate in rates], marker=".", label=name, **style)
        axes.axhline(100 * curve["without_limits"], color="#999999", linestyle=":", label="without limits")
        axes.set_xscale("log")
        axes.set_xlabel(f"size of one tier, blocks of {curve['block_tokens']} tokens")
        axes.set_title("blocks found, %, by eviction policy")
        axes.set_ylim(0, None)
        axes.legend(frameon=False, fontsize="small", ncols=2)

    return Picture("Blocks that one tier finds, by its size, under each eviction policy", draw, width_in=8, height_in=4)


def _picture(points: Sequence[Point], enough: Point, achievable: float | None) -> Picture:
    lines: dict[str, list[Point]] = {}
    for point in points:
        name = f"{size(point['cpu_bytes'])} CPU, {point['policy']}, {point['eviction']}"
        lines.setdefault(name, []).append(point)

    def draw(figure: Any) -> None:
        hits, waits = figure.subplots(1, 2)
        for number, (name, line) in enumerate(lines.items()):
            ordered = sorted(line, key=lambda point: int(point["disk_bytes"]))
            disks = [point["disk_bytes"] / _GIB for point in ordered]
            style = {"color": _COLORS[number % len(_COLORS)], "marker": _MARKS[number % len(_MARKS)], "label": name}
            hits.plot(disks, [100 * point["hit_rate"] for point in ordered], **style)
            waits.plot(disks, [point["ttft_s"]["p50"] for point in ordered], **style)
        hits.plot([enough["disk_bytes"] / _GIB], [100 * enough["hit_rate"]], "k*", markersize=15, label="enough")
        if achievable is not None:
            hits.axhline(100 * achievable, color="#999999", linestyle="--", label="without limits")
        hits.set_title("prompt tokens found, %")
        waits.set_title("time to the first token, median, s")
        for axes in (hits, waits):
            axes.set_xlabel("disk tier, GiB")
            axes.set_ylim(0, None)
        hits.legend(frameon=False, fontsize="small")

    says = f"{size(enough['cpu_bytes'])} of CPU memory and {size(enough['disk_bytes'])} of disk are enough"
    return Picture(says, draw, width_in=11, height_in=4)


def _table(points: Sequence[Point], enough: Point) -> Table:
    tiers = list(dict.fromkeys(tier for point in points for tier in point["hits"]))
    rows = [
        (
            f"{size(point['cpu_bytes'])} + {size(point['disk_bytes'])} disk",
            point["policy"],
            point["eviction"],
            f"{point['hit_rate']:.1%}",
            *(f"{point['hits'].get(tier, 0):.1%}" for tier in tiers),
            duration(point["ttft_s"]["p50"]),
            duration(point["ttft_s"]["p95"]),
            f"{point['requests_per_s']:.2f}",
            size(point["disk_written_bytes"]),
        )
        for point in points
    ]
    columns = (
        "CPU + disk",
        "policy",
        "eviction",
        "found",
        *(f"in {tier}" for tier in tiers),
        "first token p50",
        "p95",
        "requests/s",
        "to disk",
    )
    return Table(columns, rows, best=list(points).index(enough))


def size(nbytes: int) -> str:
    """In the unit that reads well; "no" for nothing."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.3g} {unit}" if nbytes else "no"
