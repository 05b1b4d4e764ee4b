"""`docs/results.md`, `docs/papers.md` and the figures in the README, from the files in `benchmarks/results`.

docs/results.md says what each file measured in one sentence, with its date, commit and machine; docs/papers.md compares
the papers' figures with ours. A result that was measured with uncommitted changes is refused.

    python -m benchmarks.results_page           # writes all three
    python -m benchmarks.results_page --check   # fails when one of them is stale; `make check` does it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from benchmarks.common import harness
from benchmarks.papers_parts import comparison_page
from benchmarks.papers_parts.catalogue import FIGURES
from benchmarks.results_parts import provenance
from benchmarks.results_parts.attacks import ATTACKS
from benchmarks.results_parts.cache import CACHE
from benchmarks.results_parts.coded_blocks import CODECS
from benchmarks.results_parts.engines import ENGINES
from benchmarks.results_parts.gpu import GPU
from benchmarks.results_parts.readme import BLOCKS
from benchmarks.results_parts.results import Result, read_results
from benchmarks.results_parts.serving import SERVING
from benchmarks.results_parts.wording import Sentence

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/results.md"
PAPERS = ROOT / "docs/papers.md"
README = ROOT / "README.md"

SECTIONS: Mapping[str, Mapping[str, Sentence]] = {
    "Beside vLLM and SGLang": ENGINES,
    "prefixd's own server": SERVING,
    "On a GPU": GPU,
    "The cache": CACHE,
    "Codecs": CODECS,
    "Crashes, damage, attacks": ATTACKS,
}
"""By heading: the sentence of each file, by its name or a pattern of names, in the order of the page."""

_INTRODUCTION = """# Results

Written by `python -m benchmarks.results_page` from the files in [`benchmarks/results`](../benchmarks/results). A file
has all figures of a run, the versions, and the command that measures it again (`circumstances.command`). A sentence
says what speaks for prefixd and what speaks against it. A commit with "+ changes" is of a tree with uncommitted
changes, from before such results were refused. What each benchmark does: [benchmarks](benchmarks.md).
"""


def page(results: Sequence[Result]) -> str:
    """`docs/results.md` of these results."""
    parts = [_INTRODUCTION]
    for title, sentences in SECTIONS.items():
        rows = [
            _row(result, sentence)
            for pattern, sentence in sentences.items()
            for result in sorted(results, key=_numbers_last)
            if fnmatchcase(result.file, pattern)
        ]
        if rows:
            parts += [
                f"## {title}\n",
                "| result | date | commit | machine | file |",
                "|---|---|---|---|---|",
                *rows,
                "",
            ]
    return "\n".join(parts)


def readme(text: str, results: Sequence[Result]) -> str:
    """The README with the figures of these results.

    Raises BenchmarkError: it has no place for them, or a result is missing.
    """
    by_file = {result.file: result.content for result in results}
    for name, lines in BLOCKS.items():
        begin, end = f"<!-- {name}: python -m benchmarks.results_page -->", f"<!-- end of {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise harness.BenchmarkError(f"README.md has no lines {begin!r} and {end!r} for what the results say")
        try:
            text = "\n".join([before + begin, "", *lines(by_file), "", end + after])
        except LookupError as error:
            raise harness.BenchmarkError(f"README.md: {error.args[0]!r} is missing in the results") from error
    return text


def papers(results: Sequence[Result]) -> str:
    """`docs/papers.md` of these results. Raises BenchmarkError for a row that cannot be shown."""
    rows = [result.content["rows"] for result in results if result.benchmark == "papers"]
    of_gpus = {result.file: result.content for result in results if result.benchmark == "gpu"}
    return comparison_page.page(FIGURES, rows[0] if rows else {}, of_gpus)


def check(results: Sequence[Result]) -> None:
    """Raises BenchmarkError, which lists every result that has no sentence or is refused."""
    patterns = [pattern for sentences in SECTIONS.values() for pattern in sentences]
    lines = [line for result in results for line in provenance.refusals(result)]
    lines += [
        f"{result.file} has no sentence: add one to benchmarks/results_parts, or take the file out of the folder"
        for result in results
        if not any(fnmatchcase(result.file, pattern) for pattern in patterns)
    ]
    if lines:
        raise harness.BenchmarkError("\n       ".join(lines))


def _row(result: Result, sentence: Sentence) -> str:
    date = str(result.content["circumstances"]["date"])[:10]
    file = f"[`{result.file}`](../benchmarks/results/{result.file})"
    cells = (_said(result, sentence) + ".", date, provenance.commit(result), provenance.machine(result), file)
    return f"| {' | '.join(cells)} |"


def _said(result: Result, sentence: Sentence) -> str:
    try:
        return sentence(result.content)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise harness.BenchmarkError(
            f"{result.file} lacks a figure that its sentence has ({type(error).__name__}: {error}); measure it again: "
            f"{provenance.command(result)}, or mend its sentence in benchmarks/results_parts"
        ) from error


def _numbers_last(result: Result) -> tuple[str, int]:
    """Sorts `header_16.json` before `header_256.json`."""
    stem, _, number = result.file.removesuffix(".json").rpartition("_")
    return (stem, int(number)) if number.isdecimal() else (result.file, 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = harness.bare_parser("results_page", __doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is stale")
    options = parser.parse_args(arguments)
    results = read_results(RESULTS)
    check(results)
    written = {
        PAGE: page(results),
        PAPERS: papers(results),
        README: readme(README.read_text(encoding="utf-8"), results),
    }
    for file, content in written.items():
        if file.exists() and file.read_text(encoding="utf-8") == content:
            continue
        if options.check:
            raise harness.BenchmarkError(f"{file.relative_to(ROOT)} is stale; run `python -m benchmarks.results_page`")
        file.write_text(content, encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")


if __name__ == "__main__":
    harness.run(main)
