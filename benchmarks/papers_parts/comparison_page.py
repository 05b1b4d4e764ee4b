"""`docs/papers.md`: each figure of the papers beside ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common.harness import BenchmarkError
from benchmarks.papers_parts.figure import Claim, Figure
from benchmarks.papers_parts.gpu_files import COMMAND, OnGpu, on_gpu

_INTRODUCTION = """# The papers' figures

Written by `python -m benchmarks.results_page` from [`papers.json`](../benchmarks/results/papers.json) and from the
results of GPUs. Each figure has its command; `python -m benchmarks.papers` measures all that a CPU can show, and
`make gpu-check` what a GPU adds. `--list` names the figures with the seconds that each takes on two idle cores,
{minutes} minutes together. "Ratio" is our value divided by the paper's: for times less is better, for throughput more.
On a CPU models are small and random, so ratios between two ways of working are compared and not times. A value that is
missing has not been measured yet.
"""


def page(figures: Sequence[Figure], rows: Mapping[str, Any], gpu_files: Mapping[str, Mapping[str, Any]]) -> str:
    """The page. Raises BenchmarkError for a row of a figure that does not exist, and one of the short form."""
    known = {figure.name for figure in figures}
    for name, row in rows.items():
        if name not in known or row.get("short"):
            what = "is of the short form" if name in known else "is no figure"
            raise BenchmarkError(f"papers.json: the row {name!r} {what}; take it out of the file")
    minutes = round(sum(figure.seconds for figure in figures) / 60)
    parts, last = [_INTRODUCTION.format(minutes=minutes)], None
    for figure in figures:
        if figure.paper is not last:
            last = figure.paper
            parts += [f"## {last.name}\n", f"{last.title}, {last.source}. Measured there on {last.machine}.\n"]
        parts += ["\n".join(lines_of(figure, rows.get(figure.name), on_gpu(figure, gpu_files))), ""]
    return "\n".join(parts)


def lines_of(figure: Figure, row: Mapping[str, Any] | None, gpu: OnGpu | None) -> list[str]:
    """The part of the page about one figure, which the command prints, too."""
    columns: list[tuple[str, Mapping[str, float]]] = []
    if figure.cpu is not None:
        columns.append(("CPU", {} if row is None else row["values"]))
    if figure.gpu is not None:
        columns.append(("GPU" if gpu is None else gpu.device, {} if gpu is None else gpu.values))
    heads = ["", "paper", *(head for name, _ in columns for head in (name, "ratio"))]
    return [
        f"### {figure.place}: {figure.shows}",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
        *(_line(claim, [values for _, values in columns]) for claim in figure.claims),
        "",
        f"Paper: {figure.conditions}. Here: {figure.ours}. {figure.why}",
        "",
        *_measured(figure, row, gpu),
    ]


def _line(claim: Claim, columns: Sequence[Mapping[str, float]]) -> str:
    cells = [claim.text, claim.words if claim.paper is None else _said(claim.paper, claim.unit)]
    for values in columns:
        ours = values.get(claim.key)
        cells.append("" if ours is None else _said(ours, claim.unit))
        cells.append("" if ours is None or not claim.paper else f"{ours / claim.paper:.2f}")
    return f"| {' | '.join(cells)} |"


def _measured(figure: Figure, row: Mapping[str, Any] | None, gpu: OnGpu | None) -> list[str]:
    lines = []
    if figure.cpu is not None:
        if row is None:
            said = "not yet measured"
        else:
            where = row["circumstances"]
            machine = f"{where['processor'] or where['machine']}, {where['cpus']} cores"
            said = f"{where['date'][:10]}, commit {_short(where['commit'])}, {machine}, {row['seconds']:g} s"
        lines.append(f"CPU: {said}; `python -m benchmarks.papers {figure.name}`.")
    if figure.gpu is not None:
        if gpu is None:
            lines.append(f"GPU: not yet measured; `{COMMAND}`.")
        else:
            file = f"[`{gpu.file}`](../benchmarks/results/{gpu.file})"
            lines.append(f"GPU: {gpu.device}, {gpu.date[:10]}, commit {_short(gpu.commit)}, {file}.")
    return lines


def _short(commit: str) -> str:
    return commit[:9] + (" + changes" if commit.endswith("+changes") else "")


def _said(value: float, unit: str) -> str:
    """A value with its unit: "1.86 x", "38.2%", "2,048 tokens"."""
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits}%" if unit == "%" else f"{digits} {unit}"
