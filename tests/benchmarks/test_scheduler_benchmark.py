"""The scheduler's benchmark: its simulation, what it calls a failure, and a short run of its timing."""

from __future__ import annotations

import argparse

import pytest

from benchmarks.scheduler import longest_wait_s, measure, violations
from prefixd_scheduler import POLICIES


def test_a_short_run_measures_every_policy_in_both_queues() -> None:
    options = argparse.Namespace(waiting=200, decisions=300, limit=8, services=500, seed=1)
    result = measure(options, lambda: None)
    assert {where: set(policies) for where, policies in result["decision_us"].items()} == {
        "daemon": set(POLICIES),
        "vllm": set(POLICIES),
    }
    assert all(0 < each["p50"] <= each["p99"] for of in result["decision_us"].values() for each in of.values())
    for policies in result["decision_us"].values():
        for figures in policies.values():
            figures["p99"] = 50.0  # how fast this machine is now is not the test's business
    assert violations(result) == []
    result["decision_us"]["vllm"]["fpf"]["p99"] = 51.0
    result["longest_wait_s"] |= {"relaxed-fpf": 33.0, "fpf with a bound": None, "fpf": 3.0}
    assert [line.split(":")[0] for line in violations(result)] == [
        "vllm, fpf",
        "relaxed-fpf",
        "fpf with a bound",
        "fpf did not starve anybody (3 s)",
    ]


@pytest.mark.parametrize(
    ("policy", "bound_s", "least_s", "most_s"),
    [("fcfs", None, 8, 8), ("relaxed-fpf", None, 9, 32), ("fpf", 8.0, 8, 16)],
)
def test_waits_are_bounded_where_that_is_promised(
    policy: str, bound_s: float | None, least_s: int, most_s: int
) -> None:
    waited_s = longest_wait_s(policy, bound_s, 8, 500)
    assert waited_s is not None and least_s <= waited_s <= most_s


@pytest.mark.parametrize("policy", ["fpf", "lpm", "shortest-ready", "deadline"])
def test_others_starve(policy: str) -> None:
    assert longest_wait_s(policy, None, 8, 500) is None
