"""A daemon in its own process whose disk has a given bandwidth and latency, whatever the machine's disk can do.

`python -m benchmarks.storage.throttled_daemon --bytes-per-s N --latency-s S PARENT serve ...` is `prefixd serve ...`
that ends with process PARENT and whose disk tier's file calls take the time that they would take on such a disk. A
harness uses `ThrottledDaemon`, which starts it.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lmdb

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd_swap import FileOps


class ThrottledOps(FileOps):
    """The real files on a disk that serves one call after the other, in the order in which they come.

        call 1   |transfer|--latency--|
        call 2            |transfer|--latency--|      the disk is free for the next transfer, the caller is not
        call 3                     |transfer|--latency--|

    A read or write of n bytes transfers for n / bytes_per_s seconds, a sync or a commit for none; each returns
    `latency_s` seconds after that. So several callers at a time get all of the bandwidth, and one whose call is behind
    others' waits for theirs. The real call runs meanwhile and adds nothing unless it takes longer. Nothing is synced:
    not for a store whose durability is in question.

    Args:
        bytes_per_s: bandwidth of reads and writes together.
        latency_s: of each call.
        clock: seconds; passed in so that tests own the time.
        sleep: waits so many seconds by the clock.
    """

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the disk has transferred everything that was asked for

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Read at the disk's speed."""
        with self._served(len(buffer)):
            return super().pread(fd, buffer, offset)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        """Copy at the disk's speed, as if nothing of the mapping was in memory."""
        with self._served(len(buffer)):
            return super().copy_mapped(address, buffer)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write at the disk's speed."""
        with self._served(len(buffer)):
            return super().pwrite(fd, buffer, offset)

    def fdatasync(self, fd: int) -> None:
        """Wait for what the disk was asked for before."""
        with self._served(0):
            pass

    def commit(self, transaction: lmdb.Transaction[bytes]) -> None:
        """Commit, after what the disk was asked for before."""
        with self._served(0):
            super().commit(transaction)

    @contextmanager
    def _served(self, nbytes: int) -> Iterator[None]:
        """Within it the real call is made; it is left when the disk would have answered."""
        with self._lock:
            self._free_s = max(self._clock(), self._free_s) + nbytes / self._bytes_per_s
            answered_s = self._free_s + self._latency_s
        yield
        self._sleep(max(0.0, answered_s - self._clock()))


class ThrottledDaemon(DaemonProcess):
    """A daemon whose disk is throttled as `ThrottledOps` describes."""

    def __init__(
        self, settings: Mapping[str, object] | None = None, *, bytes_per_s: float, latency_s: float, **how: Any
    ) -> None:
        """As `DaemonProcess`."""
        program = (
            *("-m", "benchmarks.storage.throttled_daemon"),
            *("--bytes-per-s", repr(bytes_per_s), "--latency-s", repr(latency_s)),
        )
        super().__init__(settings, program=program, **how)


def main() -> None:
    """The daemon."""
    from prefixd.cli import tethered

    parser = argparse.ArgumentParser(prog="python -m benchmarks.storage.throttled_daemon")
    parser.add_argument("--bytes-per-s", type=float, required=True)
    parser.add_argument("--latency-s", type=float, required=True)
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="PARENT serve ...")
    options = parser.parse_args()
    sys.argv[1:] = options.rest
    tethered.main(ThrottledOps(options.bytes_per_s, options.latency_s))


if __name__ == "__main__":
    main()
