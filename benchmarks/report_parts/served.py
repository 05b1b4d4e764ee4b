"""The sections of `benchmarks.chat` and `benchmarks.tree_search`, which serve one workload in several ways."""

from __future__ import annotations

from typing import Any

from benchmarks.report_parts import runs
from benchmarks.report_parts.page import Card, Section
from benchmarks.report_parts.results import Result
from benchmarks.report_parts.runs import Run, fastest

_NEAR = 0.95


def chat(result: Result) -> Section:
    """Conversations that grow turn by turn."""
    content = result.content
    finding = (
        f"{content['conversations']} conversations of {content['turns']:.1f} turns ({content['source']}), up to "
        f"{content['users']} at once."
    )
    return _section(result, "Chat: conversations that come back", "For chat?", finding)


def tree_search(result: Result) -> Section:
    """A search whose requests share what they have in common."""
    finding = "Programs are repaired by breadth-first search; a language server decides what is cut and what goes on."
    return _section(result, "Tree search: many continuations of one prompt", "For search and agents?", finding)


def _section(result: Result, title: str, question: str, finding: str) -> Section:
    ways: list[dict[str, Any]] = result.content["ways"]
    found = [Run.of(way) for way in ways]
    without = next(run for way, run in zip(ways, found, strict=True) if not way["tiers"])
    best = fastest(found)
    shares = [way["hit_share"] for way in ways if way["name"] == best.name]
    near = sum(run.requests_per_s >= _NEAR * best.requests_per_s for run in found) - 1
    others = f"; {near} other ways are within 5% of it" if near else ""
    sooner, more = without.ttft_p50_s / best.ttft_p50_s, best.requests_per_s / without.requests_per_s
    equal = "The answers are equal." if result.content["same_answers"] else "The answers are NOT equal."
    card = Card(
        question,
        best.name,
        f"{sooner:.1f} times sooner to the first token than without a cache, {more:.1f} times the requests a second; "
        f"{shares[0]:.0%} of what could be found was found{others}",
        result.benchmark,
    )
    return Section(
        result.benchmark,
        title,
        f"{finding} {equal}",
        result,
        pictures=runs.pictures(found, title),
        tables=[runs.table(found)],
        cards=[card],
    )
