"""The sections of `benchmarks.chat` and `benchmarks.tree_search`, which serve one workload in several ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report_parts import runs
from benchmarks.report_parts.page import Choice, Section
from benchmarks.report_parts.results import Result
from benchmarks.report_parts.runs import Run, duration
from prefixd.settings import SchedulerSettings

_NEAR = 0.1
"""Policies whose figures differ by less than this share are alike: each was measured once."""
_ENOUGH = 0.98
"""Of what the most tiers find: with fewer tiers that find as much, no more are needed."""
DEFAULT: str = SchedulerSettings.model_fields["policy"].default


@dataclass(frozen=True, slots=True)
class Figure:
    """What decides between the policies.

    Attributes:
        name: of the figure.
        cost: of a run, the lowest is the best.
        text: of a run, for people.
    """

    name: str
    cost: Callable[[Run], float]
    text: Callable[[Run], str]


FIRST_TOKEN = Figure("first token, median", lambda run: run.ttft_p50_s, lambda run: duration(run.ttft_p50_s))
RATE = Figure("requests/s", lambda run: -run.requests_per_s, lambda run: f"{run.requests_per_s:.3g}")


def chat(result: Result) -> Section:
    """Conversations that grow turn by turn: the time to the first token decides."""
    content = result.content
    finding = (
        f"{content['conversations']} conversations of {content['mean_turns']:.1f} turns on average "
        f"({content['source']}), up to {min(content['users'], content['conversations'])} at once."
    )
    title = "Chat: conversations that come back"
    return _section(result, title, "Chat: conversations", finding, FIRST_TOKEN)


def tree_search(result: Result) -> Section:
    """A search whose requests come in batches: the requests a second decide."""
    finding = "Programs are repaired by breadth-first search; a language server decides what is cut and what goes on."
    title = "Tree search: many continuations of one prompt"
    return _section(result, title, "Search, agents: many answers to a prompt", finding, RATE)


def _section(result: Result, title: str, requests: str, finding: str, figure: Figure) -> Section:
    ways: list[dict[str, Any]] = result.content["ways"]
    found = [Run.of(way) for way in ways]
    without = next(run for way, run in zip(ways, found, strict=True) if not way["tiers"])
    most = max((way["tiers"] for way in ways), key=lambda tiers: tiers.count("+"))
    policies = {way["policy"]: run for way, run in zip(ways, found, strict=True) if way["tiers"] == most}
    best = min(policies.values(), key=figure.cost)
    near = [
        policy
        for policy, run in policies.items()
        if figure.cost(run) < figure.cost(best) + _NEAR * abs(figure.cost(best))
    ]
    chosen = [DEFAULT] if DEFAULT in near else near
    run = min((policies[policy] for policy in chosen), key=figure.cost)
    figures = ", ".join(
        f"{policy} {figure.text(its)}" for policy, its in sorted(policies.items(), key=lambda one: figure.cost(one[1]))
    )
    memory, shares = _memory(ways, result.content)
    sooner, more = without.ttft_p50_s / run.ttft_p50_s, run.requests_per_s / without.requests_per_s
    equal = "The answers are equal." if result.content["same_answers"] else "The answers are NOT equal."
    choice = Choice(
        requests,
        " or ".join(chosen),
        f"{figure.name}: {figures}",
        memory,
        f"found, of what is possible: {shares}",
        f"first token {sooner:.3g} times sooner than without a cache, {more:.3g} times the requests/s",
        result.benchmark,
    )
    return Section(
        result.benchmark,
        title,
        f"{finding} {equal}",
        result,
        pictures=runs.pictures(found, title, run),
        tables=[runs.table(found, run)],
        choices=[choice],
    )


def _memory(ways: Sequence[Mapping[str, Any]], content: Mapping[str, Any]) -> tuple[str, str]:
    """The fewest tiers that find nearly all, with their sizes; and what each found."""
    shares: dict[str, float] = {}
    for way in ways:
        if way["tiers"]:
            shares[way["tiers"]] = max(shares.get(way["tiers"], 0.0), way["hit_share"])
    by_size = sorted(shares, key=lambda tiers: tiers.count("+"))
    fewest = next(tiers for tiers in by_size if shares[tiers] >= _ENOUGH * max(shares.values()))
    gpu = "GPU for what runs" + (f" and {content['gpu_share']:.0%} of the cache" if content["gpu_share"] else "")
    parts = {"gpu": gpu, "cpu": f"CPU for {content['cpu_share']:.0%}", "disk": "disk for all"}
    said = ", ".join(f"{tiers} {share:.0%}" for tiers, share in shares.items())
    return ", ".join(parts[tier] for tier in fewest.split("+")), said
