"""The store's half of the disk benchmark, with as little to do as still goes through everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import _slabs


def test_throughput_compares_the_same_bytes(tmp_path: Path) -> None:
    result = _slabs.throughput(tmp_path, block_bytes=65536, blocks=6, batch=4, depth=2, rounds=2)
    assert all(value > 0 for value in result.values())
    ratio = result["store_direct_load_gbps"] / result["raw_direct_load_gbps"]
    assert result["load_ratio"] == pytest.approx(ratio, rel=0.1, abs=0.01)


def test_a_store_that_was_filled_opens_whole(tmp_path: Path) -> None:
    _slabs.fill(tmp_path / "store", 30_000)
    result = _slabs.reopen(tmp_path / "store", 30_000)
    assert result["store_reopen_s"] > 0
