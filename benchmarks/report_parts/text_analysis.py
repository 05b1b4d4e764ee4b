"""The section of `benchmarks.text_analysis`."""

from __future__ import annotations

from benchmarks.report_parts import runs
from benchmarks.report_parts.page import Card, Section
from benchmarks.report_parts.results import Result
from benchmarks.report_parts.runs import Run, fastest


def section(result: Result) -> Section:
    """Requests a second of every way of serving them."""
    content = result.content
    found = [Run.of(plain) for plain in content["configs"]]
    by_name = {run.name: run for run in found}
    best, without = fastest(found), by_name["no-cache"]
    gain = best.requests_per_s / without.requests_per_s
    over = best.requests_per_s / by_name["fcfs"].requests_per_s
    card = Card(
        "Which policy for many requests over few prefixes?",
        best.name,
        f"{gain:.1f} times the requests a second of no cache, {over:.2f} times those of first come, first served",
        "text_analysis",
    )
    return Section(
        "text_analysis",
        "Text analysis: many requests share a few prefixes",
        f"{content['prefixes']} prefixes of {content['prefix_tokens']} tokens, of which {content['gpu_prefixes']} fit "
        f"into GPU memory, {content['cpu_prefixes']} into CPU memory and {content['disk_prefixes']} on disk; "
        f"{content['requests']} requests. The answers are {'equal' if content['same_answers'] else 'NOT equal'}.",
        result,
        pictures=runs.pictures(found, "Text analysis"),
        tables=[runs.table(found)],
        cards=[card],
    )
