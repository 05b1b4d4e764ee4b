"""What the demo says about its figures: how long it takes, and why a policy of the queue was the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefixd.workloads.latency_figures import Figures
    from prefixd.workloads.text_analysis import TextAnalysis

_SECONDS_A_TOKEN = 0.003
"""Of all runs together, for a prompt token of one run, on two cores that other work keeps busy."""
_START_S = 5.0
"""A daemon's start with its model; there are five."""
_OTHERS = 0.85
"""The seconds of the runs with a cache, for each of the run without."""
_CLEAR = 1.05
"""One policy won if it is this many times as fast as the next."""
_MEANING = {
    "fcfs": "runs requests in the order of their arrival",
    "fpf": "runs the request first whose prefix is in the nearest tier, before other prefixes push it out",
    "relaxed-fpf": "runs the request first whose prefix is in the nearest tier, but lets none wait without bound",
}


def expected_s(workload: TextAnalysis) -> float:
    """Returns about how many seconds the demo takes at the most, on two cores."""
    tokens = workload.requests * (workload.prefix_tokens + workload.body_tokens)
    return 5 * _START_S + tokens * _SECONDS_A_TOKEN


def left_s(first_s: float) -> float:
    """Returns about how many seconds the runs with a cache take, by those of the run without one."""
    return 4 * _START_S + first_s * _OTHERS


def minutes(seconds: float) -> str:
    """Formats a length of time for people: `40 seconds`, `3 minutes`."""
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} seconds"
    return f"{round(seconds / 60):.0f} minutes"


def why_policy_won(runs: Sequence[Figures]) -> str:
    """Returns which of the policies was the fastest, and why, by what each found in which tier.

    Args:
        runs: runs of the same requests over the same tiers, each under the policy that is its name.
    """
    best, second, *_ = sorted(runs, key=lambda run: run.requests_per_s, reverse=True)
    rates = ", ".join(f"{run.name} {run.requests_per_s:.1f}" for run in runs)
    if best.requests_per_s < _CLEAR * second.requests_per_s:
        return (
            f"No policy won: {best.name} and {second.name} differ by less than 5% ({rates} requests/s). More "
            "--requests tell them apart better."
        )
    worst = min(runs, key=lambda run: run.requests_per_s)
    why = f"{best.name} won ({rates} requests/s): it {_MEANING[best.name]}."
    ours, theirs = best.hit_tokens, worst.hit_tokens
    if ours.gpu > theirs.gpu:
        why += (
            f" So {ours.gpu:,} prefix tokens lay in the GPU tier when their request ran, with {worst.name} "
            f"{theirs.gpu:,}; it loaded {ours.cpu + ours.disk:,} from CPU memory and disk instead of "
            f"{theirs.cpu + theirs.disk:,}"
        )
    else:
        why += f" But it found no more in the GPU tier ({ours.gpu:,}, {worst.name} {theirs.gpu:,}): it may be chance"
    if best.miss_rate < worst.miss_rate:
        return f"{why}, and computed {best.miss_rate:.0%} of the prefixes again instead of {worst.miss_rate:.0%}."
    return f"{why}; both computed as much again ({best.miss_rate:.0%}, {worst.miss_rate:.0%})."
