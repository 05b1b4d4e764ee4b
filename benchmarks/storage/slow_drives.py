"""Drives of a given speed, each under a folder of its own, and what two of them give over one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.storage import slabs
from prefixd_swap import FileOps


class SlowDrives(FileOps):
    """The real files. Slabs below each folder move at most so many bytes a second, one call after the other.

    The real call runs meanwhile, and adds nothing unless it takes longer. Slabs are not synced, so only the index waits
    for the machine's own device: not for a store whose durability is in question.

    Args:
        bytes_per_s: by folder.
        clock: seconds; passed in so that tests own the time.
        sleep: waits for a number of seconds by the clock.
    """

    def __init__(
        self,
        bytes_per_s: Mapping[Path, float],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._drives = {f"{folder}/": rate for folder, rate in bytes_per_s.items()}
        self._free_s = dict.fromkeys(self._drives, 0.0)  # when each drive has moved all that it was asked for
        self._of: dict[int, str] = {}  # descriptor -> drive
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()

    def open(self, path: Path, flags: int) -> int:
        fd = super().open(path, flags)
        drive = next((drive for drive in self._drives if str(path).startswith(drive)), None)
        with self._lock:
            self._of.pop(fd, None)
            if drive is not None and path.suffix == ".slab":
                self._of[fd] = drive
        return fd

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._moves(fd, len(buffer)):
            return super().pread(fd, buffer, offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._moves(fd, len(buffer)):
            return super().pwrite(fd, buffer, offset)

    def fdatasync(self, fd: int) -> None:
        """Nothing: the process that wrote the bytes reads them back."""

    @contextmanager
    def _moves(self, fd: int, nbytes: int) -> Iterator[None]:
        with self._lock:
            drive = self._of.get(fd)
            answered_s = self._clock()
            if drive is not None:
                answered_s = max(answered_s, self._free_s[drive]) + nbytes / self._drives[drive]
                self._free_s[drive] = answered_s
        yield
        if drive is not None:
            self._sleep(max(0.0, answered_s - self._clock()))


def compare(
    folder: Path, sizes: Sequence[int], nbytes: int, depth: int, rounds: int, bytes_per_s: float
) -> dict[str, Any]:
    """One drive against two of the same speed, by size of a block: GB/s of stores and loads of one prompt, medians.

    Args:
        folder: where to work.
        sizes: bytes of a block.
        nbytes: bytes of the prompt, stored in four durable batches.
        depth: calls at a time.
        rounds: rounds that count.
        bytes_per_s: of each drive.
    """
    rows = [_compare(folder / f"drives-{size}", size, nbytes, depth, rounds, bytes_per_s) for size in sizes]
    least = {f"two_drives_{what}_ratio": min(row[f"{what}_ratio"] for row in rows) for what in ("store", "load")}
    return least | {"drives": rows}


def _compare(folder: Path, size: int, nbytes: int, depth: int, rounds: int, bytes_per_s: float) -> dict[str, Any]:
    def store(name: str, count: int) -> Callable[[ThreadPoolExecutor], slabs.Way]:
        paths = [folder / name / str(drive) for drive in range(count)]
        ops = SlowDrives(dict.fromkeys(paths, bytes_per_s))
        return lambda pool: slabs.Store(paths[0], blocks, size, depth, "direct", ops, paths[1:])

    blocks = max(1, nbytes // size)
    ways = {"one": store("one", 1), "two": store("two", 2)}
    found = slabs.throughput(ways, size, blocks, max(1, blocks // 4), depth, rounds)
    row: dict[str, Any] = {"block_bytes": size}
    for what in ("store", "load"):
        one, two = (found[way][f"{what}_gbps"] for way in ("one", "two"))
        row |= {f"one_{what}_gbps": round(one, 4), f"two_{what}_gbps": round(two, 4)}
        row[f"{what}_ratio"] = round(two / one, 3)
    return row
