"""The section of `benchmarks.text_analysis`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.report_parts import runs
from benchmarks.report_parts.page import Choice, Section, Table
from benchmarks.report_parts.results import Result
from benchmarks.report_parts.runs import Run, fastest


def section(result: Result) -> Section:
    """Requests a second of every way of serving them."""
    content = result.content
    ways = content["configs"]
    if all(way.get("suite") == "header" for way in ways):
        return _of_header(result)
    lengths = sorted({way["prefix_tokens"] for way in ways})
    found = [Run.of(way) for way in ways]
    if len(lengths) > 1:  # else runs of both lengths would have one name
        found = [
            replace(run, name=f"{run.name}, {way['prefix_tokens']:,} tokens")
            for run, way in zip(found, ways, strict=True)
        ]
    best: dict[str, None] = {}
    gains, compared = [], []
    for length in lengths:
        mine = [(run, way) for run, way in zip(found, ways, strict=True) if way["prefix_tokens"] == length]
        without = next((run for run, way in mine if not way["serving"]["caching"]), None)
        fast, policy, others = _policies(mine)
        best.setdefault(policy)
        if without is not None:  # the suite `eviction` has none
            gain = fast.requests_per_s / without.requests_per_s
            gains.append(f"{gain:.3g} times with prefixes of {length:,} tokens")
        compared.append(f"{length:,} tokens: {others}")
        chosen = fast
    tokens = " or ".join(f"{length:,}" for length in lengths)
    choice = Choice(
        "Text analysis: many requests, few prefixes",
        " or ".join(best),
        "requests/s, " + "; ".join(compared),
        f"GPU for {content['gpu_prefixes'] / content['prefixes']:.0%}, CPU for "
        f"{content['cpu_prefixes'] / content['prefixes']:.0%}, disk for "
        f"{'all' if content['disk_prefixes'] >= content['prefixes'] else str(content['disk_prefixes'])}",
        "of the prefixes",
        f"requests/s over no cache: {', '.join(gains) or 'not measured'}",
        "text_analysis",
    )
    return Section(
        "text_analysis",
        "Text analysis: many requests share a few prefixes",
        f"{content['prefixes']} prefixes of {tokens} tokens, of which {content['gpu_prefixes']} fit into "
        f"GPU memory, {content['cpu_prefixes']} into CPU memory and {content['disk_prefixes']} on disk; "
        f"{content['requests']} requests. The answers are {'equal' if content['same_answers'] else 'NOT equal'}.",
        result,
        pictures=runs.pictures(found, "Text analysis", chosen),
        tables=[
            runs.table(found, chosen),
            _goals(content, "ratio of requests a second"),
        ],
        choices=[choice],
    )


def _of_header(result: Result) -> Section:
    """How soon the first token is there where all prompts share a header and half of them are new."""
    content = result.content
    way = content["configs"][0]
    found = [Run.of(each) for each in content["configs"]]
    soonest = min(found, key=lambda run: run.ttft_p50_s)
    waits = ", ".join(f"{run.name} {runs.duration(run.ttft_p50_s)}" for run in found)
    title = f"Text analysis with a header of {way['header_tokens']:,} of {way['prefix_tokens']:,} tokens"
    return Section(
        f"text_analysis_header_{way['header_tokens']}",
        title,
        f"All prompts begin with the same {way['header_tokens']:,} tokens, and {way['new']:.0%} of the "
        f"{content['requests']} requests bring a prefix that nobody else has. First token at the median: {waits}. The "
        f"answers are {'equal' if content['same_answers'] else 'NOT equal'}.",
        result,
        pictures=runs.pictures(found, title, soonest),
        tables=[runs.table(found, soonest), _goals(content, "first token sooner than FCFS's, times")],
    )


def _goals(content: Mapping[str, Any], what: str) -> Table:
    rows = [
        (
            goal["name"],
            f"{goal['prefix_tokens']:,}",
            f"{goal['value']:.2f}",
            _bound(goal["at_least"]),
            _met(goal["met"]),
        )
        for goal in content["goals"]
    ]
    return Table((what, "tokens of a prefix", "measured", "at least", ""), rows)


def _policies(mine: Sequence[tuple[Run, dict[str, Any]]]) -> tuple[Run, str, str]:
    """Of the runs with prefixes of one length: the fastest that a user can choose, its policy, and all of these.

    A GPU that holds everything and a slow disk are no choice of a policy.
    """
    policies = [
        (run, way["serving"]["name"])
        for run, way in mine
        if way["serving"]["caching"] and not way["serving"]["everything"] and way["disk_bytes_per_s"] is None
    ]
    fast = fastest([run for run, _ in policies])
    said = ", ".join(f"{name.replace(', ', ' with ')} {run.requests_per_s:.3g}" for run, name in policies)
    return fast, next(name for run, name in policies if run is fast), said


def _bound(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _met(value: bool | None) -> str:
    return "" if value is None else "met" if value else "MISSED"
