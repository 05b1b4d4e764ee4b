"""The figures and tables of the papers that prefixd follows: the paper's value, ours, their ratio, and why they differ.

    python -m benchmarks.papers --list            # names, seconds on two cores, whether times or counts are compared
    python -m benchmarks.papers                   # all that a CPU can show, in less than 40 minutes
    python -m benchmarks.papers vtensor-8 'jenga-*'

Each figure is measured alone, by the code of the benchmark of its subject. On a CPU with small models, so ratios are
compared and not times; what only a GPU can show is read from the files of `benchmarks.gpu` in benchmarks/results.
Each row has the machine it is of. Times need a machine that does nothing else; counts do not.

--json FILE keeps the rows of other figures that the file has: `--json benchmarks/results/papers.json` measures a row
anew, and `make results` writes docs/papers.md from it. The file is written after each figure. A figure that fails is
named with its error, the others run on, and the exit status is 2.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import ROOT
from benchmarks.papers_parts.catalogue import FIGURES
from benchmarks.papers_parts.comparison_page import lines_of
from benchmarks.papers_parts.figure import Figure, Measured
from benchmarks.papers_parts.gpu_files import on_gpu
from benchmarks.papers_parts.measured_rows import read_rows, row_of, write_rows
from benchmarks.results_parts.results import read_results

RESULTS = ROOT / "benchmarks/results"


def chosen_figures(patterns: Sequence[str]) -> list[Figure]:
    """The figures that the patterns name, all for no pattern. Raises BenchmarkError for a pattern that names none."""
    for pattern in patterns:
        if not any(fnmatchcase(figure.name, pattern) for figure in FIGURES):
            raise harness.BenchmarkError(f"{pattern!r} is no figure; --list shows the names, such as {FIGURES[0].name}")
    return [each for each in FIGURES if not patterns or any(fnmatchcase(each.name, pattern) for pattern in patterns)]


def run(figures: Sequence[Figure], short: bool, file: Path | None, plots: Path | None) -> list[str]:
    """Measures the figures one after the other and prints the comparison of each; returns what failed, a line each."""
    gpu_files = {result.file: result.content for result in read_results(RESULTS) if result.benchmark == "gpu"}
    rows = read_rows(file) if file is not None else {}
    failed = []
    for figure in figures:
        row = None
        if figure.cpu is not None:
            print(f"{figure.name}: up to {figure.seconds} s on two cores ...", file=sys.stderr, flush=True)
            began = time.perf_counter()
            try:
                measured = figure.cpu(short)
            except Exception as error:  # whatever breaks in one figure, the others are worth having
                if not isinstance(error, harness.BenchmarkError):
                    traceback.print_exc()
                failed.append(f"{figure.name}: {type(error).__name__}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
                continue
            row = rows[figure.name] = row_of(measured, time.perf_counter() - began, short)
            if file is not None:
                write_rows(file, rows)
            _plot(figure, measured, plots)
        print("\n".join(lines_of(figure, row, on_gpu(figure, gpu_files))), "\n", flush=True)
    return failed


def _plot(figure: Figure, measured: Measured, folder: Path | None) -> None:
    if folder is None or measured.curve is None:
        return
    curve = measured.curve

    def draw(axes: Any) -> None:
        curve.draw(axes)
        axes.set_title(f"{figure.paper.name}, {figure.place}: {figure.shows}", fontsize=9, wrap=True)

    folder.mkdir(parents=True, exist_ok=True)
    harness.plot(folder / f"{figure.name}.png", draw)


def _list() -> None:
    for figure in FIGURES:
        kind = "times" if figure.timed else "counts"
        cpu = "only on a GPU" if figure.cpu is None else f"{figure.seconds:>4} s  {kind}"
        print(f"{figure.name:<30} {cpu:<13}  {figure.paper.name}, {figure.place}: {figure.shows}")
    print(f"{'all that a CPU can show':<30} {sum(each.seconds for each in FIGURES):>4} s")


def make_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = harness.parser("papers", __doc__)
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="a name, or a pattern such as 'jenga-*' (all)")
    parser.add_argument("--list", action="store_true", help="print the names of the figures and measure nothing")
    parser.add_argument("--short", action="store_true", help="as little as still goes through everything; no figures")
    parser.add_argument("--plot-dir", type=Path, metavar="FOLDER", help="draw the curves of figures here")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Raises BenchmarkError when a figure failed, after the others."""
    options = make_parser().parse_args(arguments)
    if options.list:
        _list()
        return
    if options.short and options.json is not None and options.json.resolve().is_relative_to(ROOT):
        raise harness.BenchmarkError(f"--short measures nothing that {options.json} could keep; write it elsewhere")
    failed = run(chosen_figures(options.figures), options.short, options.json, options.plot_dir)
    if failed:
        raise harness.BenchmarkError("; ".join(failed))


if __name__ == "__main__":
    harness.run(main)
