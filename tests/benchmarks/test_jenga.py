"""The benchmark of hybrid models in short, and that it sees what it looks for."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import jenga

GOOD: dict[str, Any] = {"hit_ratio": 2.0, "requests_ratio": 1.1, "same_tokens": True}


def test_by_rule_finds_more_in_the_same_memory_and_gives_the_same_tokens() -> None:
    steps: list[None] = []
    plan = jenga.Plan(chats=3, turns=2, user_tokens=320, output_tokens=4, at_once=1, share=0.4)
    runs = jenga.measure("window", plan, lambda: steps.append(None))
    assert [run.way for run in runs] == ["baseline", "by_rule"] and len(steps) == 2 * 3 * 2
    baseline, by_rule = runs
    assert baseline.gpu_bytes == by_rule.gpu_bytes
    assert baseline.output_digest == by_rule.output_digest
    assert by_rule.hit_tokens > baseline.hit_tokens
    assert jenga.summary(runs)["models"]["window"]["same_tokens"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({}, ""),
        ({"same_tokens": False}, "tokens differ"),
        ({"hit_ratio": 1.49}, "times the hit tokens, less than 1.5"),
        ({"requests_ratio": 0.99}, "times the requests a second, less than 1"),
    ],
)
def test_what_does_not_hold_is_said(broken: dict[str, Any], words: str) -> None:
    found = jenga.violations({"models": {"window": {**GOOD, **broken}}})
    assert words in "; ".join(found) and bool(found) == bool(words)
