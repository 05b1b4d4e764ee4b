"""One page of all results: which policy to choose, how much memory to buy, and what shows it.

Makes one HTML page of the results in a folder, to be opened in any browser; it fetches nothing.

    python -m benchmarks.text_analysis --json results/text_analysis.json
    python -m benchmarks.report results --output report.html

At its top, for each kind of requests: which queue policy, how much memory, what that brings. Below, a section for each
result, with its figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.common import harness
from benchmarks.common.options import writable
from benchmarks.report_parts import decisions, other, plan, served
from benchmarks.report_parts import text_analysis_rows as text_analysis
from benchmarks.report_parts.page import Section, render, svg
from benchmarks.report_parts.results import Result, read_results

SECTIONS: Mapping[str, Callable[[Result], Section]] = {
    "plan": plan.section,
    "text_analysis": text_analysis.section,
    "chat": served.chat,
    "tree_search": served.tree_search,
    "load_or_recompute": decisions.load_or_recompute,
    "scheduler": decisions.scheduler,
}
"""By benchmark, in the order of the page. Other results are tables, folded away at its end."""


def page(results: Sequence[Result]) -> str:
    """The page."""
    order = list(SECTIONS)
    known = sorted((r for r in results if r.benchmark in SECTIONS), key=lambda r: order.index(r.benchmark))
    unknown = [result for result in results if result.benchmark not in SECTIONS]
    return render([_section(result) for result in known], [other.section(result) for result in unknown])


def _section(result: Result) -> Section:
    try:
        section = SECTIONS[result.benchmark](result)
        for picture in section.pictures:
            svg(picture)  # now, when it is known of which file it is; the page has it from the cache
        return section
    except (ArithmeticError, AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise harness.BenchmarkError(
            f"{result.file} is no result of this version's benchmarks.{result.benchmark} ({type(error).__name__}: "
            f"{error}); run it again, or take the file out of the folder"
        ) from error


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = harness.bare_parser("report", __doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder with results (*.json)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (DIR/report.html)")
    options = parser.parse_args(arguments)
    results = read_results(options.folder)
    content = page(results)
    try:
        output = writable(str(options.output or options.folder / "report.html"))
    except argparse.ArgumentTypeError as error:
        raise harness.BenchmarkError(str(error)) from error
    output.write_text(content, encoding="utf-8")
    print(f"{len(results)} results: {output.absolute().as_uri()}")


if __name__ == "__main__":
    harness.run(main)
