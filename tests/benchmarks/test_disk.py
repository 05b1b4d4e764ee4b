"""The disk benchmark, with as little to do as still goes through everything."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from benchmarks import disk
from benchmarks.common import harness
from benchmarks.storage import disk_daemon, slabs, slow_drives


@pytest.mark.slow
def test_throughput_compares_the_same_bytes(tmp_path: Path) -> None:
    result = disk.throughput(tmp_path, block_bytes=65536, blocks=16, batch=4, depth=2, rounds=2)
    assert all(value > 0 for value in result.values())
    ways = {"load_ratio": "daemon", "slabs_load_ratio": "slabs_direct"}
    ways |= {f"{way}_load_ratio": way for way in ("daemon_mmap", "daemon_buffered", "slabs_mmap", "slabs_buffered")}
    for ratio, way in ways.items():
        expected = result[f"{way}_load_gbps"] / result["raw_direct_load_gbps"]
        assert result[ratio] == pytest.approx(expected, rel=0.1, abs=0.01)


def test_modes_compares_every_way_at_every_size(tmp_path: Path) -> None:
    result = disk.modes(tmp_path, [65536, 131072], nbytes=1 << 20, depth=2, rounds=2)
    assert [(row["block_bytes"], row["io"]) for row in result["modes"]] == [
        (size, io) for size in (65536, 131072) for io in ("mmap", "direct", "buffered")
    ]
    for row in result["modes"]:
        assert all(row[f"{what}_gbps"] > 0 for what in ("store", "load", "scattered_load"))
        if row["io"] == "direct":
            assert row["store_ratio"] == row["load_ratio"] == row["scattered_load_ratio"] == 1
    assert [row["block_bytes"] for row in result["raw_direct"]] == [65536, 131072]
    for row, direct in zip(result["raw_direct"], result["modes"][1::3], strict=True):
        for what in ("store", "load", "scattered_load"):
            assert row[f"{what}_of_raw"] == pytest.approx(direct[f"{what}_gbps"] / row[f"{what}_gbps"], rel=0.01)
    assert result["of_raw_load"] == min(row["load_of_raw"] for row in result["raw_direct"])
    assert result["modes_direct_ratio"] == 1
    assert result[f"modes_{result['best_io']}_ratio"] == max(
        result[f"modes_{io}_ratio"] for io in ("mmap", "direct", "buffered")
    )


def test_a_load_that_would_not_be_cold_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    slabs.chill([file])
    with mmap.mmap(fd, 1 << 20, prot=mmap.PROT_READ) as view:
        assert not view[5000]  # mapped, and therefore kept
        with pytest.raises(harness.BenchmarkError, match="stay in the page cache"):
            slabs.chill([file])
    os.close(fd)
    slabs.chill([file])


def test_a_drive_moves_one_call_after_the_other_and_drives_at_once(tmp_path: Path) -> None:
    now_s, slept = 100.0, []

    def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))

    ops = slow_drives.SlowDrives({tmp_path / "a": 1000, tmp_path / "ab": 500}, lambda: now_s, sleep)
    files = []
    for name in ("a/1.slab", "a/2.slab", "ab/3.slab", "a/LOCK"):
        ops.mkdir((tmp_path / name).parent)
        files.append(ops.open(tmp_path / name, os.O_RDWR | os.O_CREAT))
    first, second, other, lock = files
    data, into = memoryview(bytes(range(100))), memoryview(bytearray(100))
    assert ops.pwrite(first, data, 0) == 100
    assert ops.pread(first, into, 0) == 100 and into == data
    ops.pwrite(second, data, 0)
    ops.pwrite(other, data, 0)
    ops.pwrite(lock, data, 0)
    assert slept == [0.1, 0.2, 0.3, 0.2]
    now_s = 100.25
    ops.pwrite(second, data, 0)
    assert slept[4:] == [0.15]
    for fd in files:
        os.close(fd)


def test_two_drives_are_compared_with_one_at_every_size(tmp_path: Path) -> None:
    result = slow_drives.compare(tmp_path, [65536, 1 << 20], nbytes=4 << 20, depth=2, rounds=1, bytes_per_s=1 << 30)
    assert [row["block_bytes"] for row in result["drives"]] == [65536, 1 << 20]
    for row in result["drives"]:
        for what in ("store", "load"):
            one, two = row[f"one_{what}_gbps"], row[f"two_{what}_gbps"]
            assert row[f"{what}_ratio"] == pytest.approx(two / one, rel=0.02)
    assert result["two_drives_load_ratio"] == min(row["load_ratio"] for row in result["drives"])


@pytest.mark.parametrize("blocks", [8, 14])
def test_a_round_that_memory_could_hold_is_refused(tmp_path: Path, blocks: int) -> None:
    with pytest.raises(harness.BenchmarkError, match=f"of {blocks} blocks .* multiple of --batch 4, at least 3 times"):
        disk_daemon.DaemonDisk(tmp_path / "daemon", blocks, 65536, 4)


@pytest.mark.slow
def test_a_daemon_on_a_store_that_was_filled_serves_it(tmp_path: Path) -> None:
    blocks = 10_300
    result = disk.reopen(tmp_path, blocks)
    assert result["store_reopen_s"] > 0
    assert 0 < result["reopen_s"] < result["start_s"]
    assert result["empty_daemon_bytes"] < result["bytes_per_block"] * blocks <= result["peak_bytes_per_block"] * blocks


@pytest.mark.slow
def test_a_daemon_that_lacks_blocks_is_found_out(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o700)
    slabs.fill(tmp_path / "data" / "blocks", 1_000)
    with pytest.raises(harness.BenchmarkError, match="1000 of 1001 blocks came back"):
        disk_daemon.reopen(tmp_path / "data", 1_001)
