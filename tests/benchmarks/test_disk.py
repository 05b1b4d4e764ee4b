"""The disk benchmark, with as little to do as still goes through everything."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import disk
from benchmarks.common import harness
from benchmarks.storage import disk_daemon, slabs


def test_throughput_compares_the_same_bytes(tmp_path: Path) -> None:
    result = disk.throughput(tmp_path, block_bytes=65536, blocks=16, batch=4, depth=2, rounds=2)
    assert all(value > 0 for value in result.values())
    for ratio, way in (("load_ratio", "daemon"), ("slabs_load_ratio", "slabs_direct")):
        expected = result[f"{way}_load_gbps"] / result["raw_direct_load_gbps"]
        assert result[ratio] == pytest.approx(expected, rel=0.1, abs=0.01)


@pytest.mark.parametrize("blocks", [8, 14])
def test_a_round_that_memory_could_hold_is_refused(tmp_path: Path, blocks: int) -> None:
    with pytest.raises(harness.BenchmarkError, match=f"of {blocks} blocks .* multiple of --batch 4, at least 3 times"):
        disk_daemon.DaemonDisk(tmp_path / "daemon", blocks, 65536, 4)


def test_a_daemon_on_a_store_that_was_filled_serves_it(tmp_path: Path) -> None:
    blocks = 10_300
    result = disk.reopen(tmp_path, blocks)
    assert result["store_reopen_s"] > 0
    assert 0 < result["reopen_s"] < result["start_s"]
    assert result["empty_daemon_bytes"] < result["bytes_per_block"] * blocks <= result["peak_bytes_per_block"] * blocks


def test_a_daemon_that_lacks_blocks_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    slabs.fill(tmp_path / "data" / "blocks", 1_000)
    with pytest.raises(harness.BenchmarkError, match="1000 of 1001 blocks came back"):
        disk_daemon.reopen(tmp_path / "data", 1_001)
