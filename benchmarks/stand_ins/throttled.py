"""A daemon in its own process with a disk whose speed can be changed while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import lmdb

from benchmarks.stand_ins.steered_daemon import Orders, SteeredDaemon, serve
from prefixd_swap import FileOps

_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class DiskRate:
    """How fast a disk is.

    bytes_per_s: of all reads and writes together; None for the device's own rate, 0 for a disk that hangs.
    latency_s: additional seconds of each read.
    alone: writes, syncs and commits take the latency too, and nothing is synced: the speed does not depend on the
        machine's disk.
        Not for a store whose durability is in question.
    """

    bytes_per_s: float | None = None
    latency_s: float = 0.0
    alone: bool = False


class ThrottledOps(FileOps):
    """The real files on a disk of the rate in `path`, which serves one call after the other, as they come.

        call 1   |transfer|--latency--|
        call 2            |transfer|--latency--|      the disk is free for the next transfer, the caller is not
        call 3                     |transfer|--latency--|

    So several callers at a time get all of the bandwidth, and one whose call is behind others' waits for theirs. The
    real call runs meanwhile and adds nothing unless it takes longer. Any thread may call.

    Args:
        path: a JSON object with fields of `DiskRate`; with no file nothing is slowed down.
        clock: seconds; passed in so that tests own the time.
        sleep: waits for a number of seconds by the clock.
    """

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._orders = Orders(path)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._rate = DiskRate()
        self._free_s = 0.0  # when the disk has transferred everything that was asked for

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._served(len(buffer), read=True):
            return super().pread(fd, buffer, offset)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        """Copy at the disk's speed, as if nothing of the mapping was in memory."""
        with self._served(len(buffer), read=True):
            return super().copy_mapped(address, buffer)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._served(len(buffer)):
            return super().pwrite(fd, buffer, offset)

    def fdatasync(self, fd: int) -> None:
        """Wait for what the disk was asked for before."""
        with self._served(0) as rate:
            if not rate.alone:
                super().fdatasync(fd)

    def commit(self, transaction: lmdb.Transaction[bytes]) -> None:
        """Commit, after what the disk was asked for before."""
        with self._served(0):
            super().commit(transaction)

    @contextmanager
    def _served(self, nbytes: int, *, read: bool = False) -> Iterator[DiskRate]:
        """Encloses the real call, and ends when a disk of this rate would have answered."""
        rate = self._now()
        if not nbytes and not rate.alone:  # a sync of the machine's disk takes its own time
            yield rate
            return
        while (rate := self._now()).bytes_per_s == 0:
            time.sleep(_LOOK_S)
        with self._lock:
            self._free_s = max(self._clock(), self._free_s)
            if rate.bytes_per_s is not None:
                self._free_s += nbytes / rate.bytes_per_s
            answered_s = self._free_s + (rate.latency_s if read or rate.alone else 0.0)
        yield rate
        self._sleep(max(0.0, answered_s - self._clock()))

    def _now(self) -> DiskRate:
        with self._lock:
            if (changed := self._orders.changed()) is not None:
                self._rate = DiskRate(**changed)
                self._free_s = 0.0  # calls that wait for the old rate go on; new calls do not wait behind them
            return self._rate


class ThrottledDaemon(SteeredDaemon):
    """A daemon whose disk is as fast as `throttle` said last; at first as fast as the device."""

    MODULE = "benchmarks.stand_ins.throttled"

    def throttle(self, rate: DiskRate) -> None:
        """From its next file call on the disk has this rate; a call that waits for a disk that hangs has it, too."""
        self._orders.write(asdict(rate))


if __name__ == "__main__":
    serve(ThrottledOps)
