"""The section of `benchmarks.text_analysis`."""

from __future__ import annotations

from benchmarks.report_parts import runs
from benchmarks.report_parts.page import Card, Section, Table
from benchmarks.report_parts.results import Result
from benchmarks.report_parts.runs import Run, fastest


def section(result: Result) -> Section:
    """Requests a second of every way of serving them."""
    content = result.content
    ways = content["configs"]
    found = [Run.of(way) for way in ways]
    without = next(run for run, way in zip(found, ways, strict=True) if not way["serving"]["caching"])
    # What nobody can buy, a GPU that holds everything, is no choice of a policy.
    policies = [
        run
        for run, way in zip(found, ways, strict=True)
        if way["serving"]["caching"] and not way["serving"]["everything"] and way["disk_bytes_per_s"] is None
    ]
    best = fastest(policies)
    goals = [
        (
            goal["name"],
            f"{goal['prefix_tokens']:,}",
            f"{goal['value']:.2f}",
            _bound(goal["at_least"]),
            _met(goal["met"]),
        )
        for goal in content["goals"]
    ]
    card = Card(
        "Which policy for many requests over few prefixes?",
        best.name,
        f"{best.requests_per_s / without.requests_per_s:.1f} times the requests a second of no cache, "
        f"{best.requests_per_s / min(run.requests_per_s for run in policies):.2f} times those of the slowest policy",
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
        tables=[
            runs.table(found),
            Table(("ratio of requests a second", "tokens of a prefix", "measured", "at least", ""), goals),
        ],
        cards=[card],
    )


def _bound(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _met(value: bool | None) -> str:
    return "" if value is None else "met" if value else "MISSED"
