"""The hot path beside another commit's: the ratios, their intervals, and a short run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from benchmarks import against
from benchmarks.common.harness import BenchmarkError
from tests.benchmarks.test_benchmarks_run import result_of


def test_the_ratio_is_the_launches_and_not_a_single_ones() -> None:
    there = np.full((4, 9), 2.0)
    same = against.compare(there, there)
    assert (same["ratio"], same["low"], same["high"]) == (1.0, 1.0, 1.0)
    here = there.copy()
    here[0] *= 1.5  # where one process found its memory
    placed = against.compare(there, here)
    assert placed["ratio"] == 1.0 and placed["low"] == 1.0 < placed["high"]
    slower = against.compare(there, there * 1.1)
    assert slower["ratio"] == slower["low"] == slower["high"] == 1.1
    assert (slower["there_s"], slower["here_s"]) == (2.0, 2.2)


def test_each_tree_comes_first_as_often() -> None:
    assert [against.order(number) for number in (-1, 0, 1)] == [(1, 0), (0, 1), (1, 0)]


def test_a_commit_that_is_not_there_is_named() -> None:
    with (
        pytest.raises(BenchmarkError, match=r"commit 0123abcd: .*; name one of this repository's commits"),
        against.tree_of("0123abcd"),
    ):
        pass


@pytest.mark.slow
@pytest.mark.skipif(not (against.ROOT / ".git").exists(), reason="needs the repository's history")
def test_a_run_against_the_same_commit(tmp_path: Path) -> None:
    commit = subprocess.check_output(["git", "-C", str(against.ROOT), "rev-parse", "HEAD"], text=True).strip()
    result = result_of("against", tmp_path, commit, "--launches", "1", "--rounds", "1", "--most", "100")
    assert set(result["operations"]) == set(against.CALLS)
    for figure in result["operations"].values():
        assert figure["there_s"] > 0 and figure["low"] <= figure["ratio"] <= figure["high"]
