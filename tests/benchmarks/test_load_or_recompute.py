"""The benchmark of loading against computing in short; how long anything takes is not for a test to judge."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks import load_or_recompute
from benchmarks.common.harness import BenchmarkError
from benchmarks.load_or_recompute import Point
from benchmarks.stand_ins.throttled import DiskRate
from benchmarks.ways_of_serving.ttft import prompt_of
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS


def point(auto: float, always: float, never: float) -> Point:
    median = {"auto": auto, "always": always, "never": never}
    lower, upper = ({mode: factor * ms for mode, ms in median.items()} for factor in (0.9, 1.1))
    return Point(100.0, 5.0, 256, median, lower, upper)


@pytest.mark.slow
def test_a_disk_is_measured_and_a_load_abandoned(tmp_path: Path) -> None:
    rate, lengths = DiskRate(50e6, 0.001), (64, 1024)

    with load_or_recompute.running(tmp_path, lengths) as subjects:
        points = load_or_recompute.measure_disk(subjects, rate, lengths, 1, 1, 1, lambda: None)
        ratio = load_or_recompute.measure_abandoned(subjects["auto"], rate, 1024, 1.0, 1)
        with pytest.raises(BenchmarkError, match="were on the GPU tier still"):
            subjects["auto"].first_token_s(prompt_of(1024, 0))
    assert [(each.mb_per_s, each.latency_ms, each.tokens) for each in points] == [(50.0, 1.0, 64), (50.0, 1.0, 1024)]
    for each in points:
        assert min(each.ttft_ms.values()) > 0
        blocks = each.tokens // BLOCK_TOKENS
        assert each.ttft_ms["always"] >= 1000 * blocks * BLOCK_BYTES / 50e6, "so long do they take"
    assert ratio > 0
    result = load_or_recompute.summary(points, ratio)
    assert [each["tokens"] for each in result["points"]] == [64, 1024]


def test_the_summary_has_the_worst_point_and_counts_wins() -> None:
    points = [point(100, 90, 200), point(50, 80, 200), point(95, 100, 100)]
    result = load_or_recompute.summary(points, 1.1)
    assert result["worst_regret"] == pytest.approx(0.111)
    assert result["both_at_once_wins"] == 1


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"worst_regret": 0.11}, "worst_regret is 0.11, more than 0.1"),
        ({"both_at_once_wins": 0}, "both_at_once_wins is 0"),
        ({"abandoned_ratio": 1.21}, "abandoned_ratio is 1.21"),
        ({}, ""),
    ],
)
def test_what_is_missed_is_told(broken: dict[str, Any], words: str) -> None:
    fine = {"worst_regret": 0.1, "worst_point": "here", "both_at_once_wins": 1, "abandoned_ratio": 1.2}
    found = load_or_recompute.violations({**fine, **broken})
    assert len(found) == bool(broken)
    assert words in "".join(found)


@pytest.mark.parametrize("wrong", ["200", "0:1", "10:-1", "a:b", "nan:0", "10:nan", "inf:0"])
def test_a_disk_that_is_none_is_refused(wrong: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="MB/s"):
        load_or_recompute.disks(wrong)
