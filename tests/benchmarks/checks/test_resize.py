"""The resize benchmark in short, and that it sees what it looks for."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.checks import resize
from benchmarks.common.harness import BenchmarkError

SHORT = [
    "--rounds",
    "1",
    "--clients",
    "3",
    "--prompts",
    "4",
    "--max-tokens",
    "8",
    "--gpu-bytes",
    "16MiB",
    "--pause-s",
    "0.2",
]
GOOD = resize.Resize(1000, 1000, 1000, 0.5, 3, 2, "")


@pytest.mark.slow
def test_a_short_run(tmp_path: Path) -> None:
    plan = resize.make_plan(resize.main.parser().parse_args(SHORT))
    steps: list[None] = []
    load, resizes = asyncio.run(resize.measure(plan, tmp_path, lambda: steps.append(None)))
    expected = asyncio.run(resize.undisturbed(plan, tmp_path, load.answers))
    result = resize.summary(load, resizes, expected)
    assert not resize.violations(result)
    assert [each.target_bytes for each in resizes] == [4 << 20, 16 << 20] and len(steps) == 2
    assert result["requests"] >= 3 and result["memory_off"] == 0 and len(load.answers) >= 3
    load.answers[next(iter(load.answers))].add((1, 2, 3))
    assert not resize.summary(load, resizes, expected)["same_tokens"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"failed_requests": 2, "failures": ["no room"]}, "failed_requests is 2; no room"),
        ({"same_tokens": False}, "same_tokens is False"),
        ({"memory_off": 0.11}, "memory_off is 0.11, more than 0.1"),
        ({"unfinished_resizes": 1}, "unfinished_resizes is 1"),
    ],
)
def test_each_figure_has_a_limit(broken: dict[str, Any], words: str) -> None:
    good = {"failed_requests": 0, "failures": [], "same_tokens": True, "memory_off": 0.1, "unfinished_resizes": 0}
    assert resize.violations(good) == []
    assert "; ".join(resize.violations({**good, **broken})) == words


def test_the_worst_resize_counts() -> None:
    load = resize.Load(requests=1, answers={0: {(1,)}})
    bad = replace(GOOD, memory_bytes=1200, unfinished="held")
    result = resize.summary(load, [GOOD, bad], {0: (1,)})
    assert (result["memory_off"], result["unfinished_resizes"]) == (0.2, 1)
    assert not resize.summary(resize.Load(), [GOOD, GOOD], {})["same_tokens"], "nothing was compared"


def test_a_process_without_a_tier_cannot_be_measured() -> None:
    with pytest.raises(BenchmarkError, match="no file prefixd-gpu-tier"):
        resize.memory_bytes(os.getpid())


def test_the_help_has_an_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["resize", "--help"])
    with pytest.raises(SystemExit, match="0"):
        resize.main()
    said = capsys.readouterr().out
    assert "--gpu-bytes" in said and "Example: python -m benchmarks.checks.resize" in said
