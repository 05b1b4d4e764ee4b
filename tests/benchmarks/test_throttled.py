"""A disk that is as slow as a file says."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from benchmarks.stand_ins import throttled
from benchmarks.stand_ins.steered_daemon import Orders
from benchmarks.stand_ins.throttled import ThrottledOps


def write(path: Path, **rate: float) -> None:
    Orders(path).write(rate)


def test_reads_of_all_threads_share_the_bandwidth_and_wait_for_the_latency_side_by_side(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(bytes(64 << 10))
    ops = ThrottledOps(tmp_path / "rate.json")
    write(tmp_path / "rate.json", bytes_per_s=1 << 20, latency_s=0.1)
    fd = ops.open(data, os.O_RDONLY)
    began_s = time.monotonic()
    threads = [threading.Thread(target=ops.pread, args=(fd, memoryview(bytearray(64 << 10)), 0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert time.monotonic() - began_s >= 4 / 16 + 0.1  # the bytes pass one after the other, however late a thread is


def test_a_disk_that_hangs_goes_on_at_the_next_rate(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"abc")
    ops = ThrottledOps(tmp_path / "rate.json")
    write(tmp_path / "rate.json", bytes_per_s=0)
    fd = ops.open(tmp_path / "data", os.O_RDONLY)
    thread = threading.Thread(target=ops.pread, args=(fd, memoryview(bytearray(3)), 0))
    thread.start()
    thread.join(5 * throttled._LOOK_S)
    assert thread.is_alive()
    write(tmp_path / "rate.json")
    thread.join(60)
    assert not thread.is_alive()
    os.close(fd)
