"""A daemon in its own process whose disk is as slow as one says, and can be made faster or slower while it runs.

`python -m benchmarks.common.throttled --rate FILE PARENT serve ...` is `prefixd serve ...` that ends with process
PARENT and whose disk tier reads and writes as FILE says. A harness uses `ThrottledDaemon`, which starts it and writes
the file: one JSON object with the fields of `DiskRate`. It is looked at before each call, and while one waits for a
disk that hangs.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd_swap import FileOps

_LOOK_S = 0.01


@dataclass(frozen=True, slots=True)
class DiskRate:
    """How fast a disk is.

    bytes_per_s: what all reads and writes have together; None for what the device has, 0 for a disk that hangs.
    latency_s: seconds that each read takes besides. Reads of several threads wait for it at the same time.
    """

    bytes_per_s: float | None = None
    latency_s: float = 0.0


class ThrottledOps(FileOps):
    """The real calls; reads and writes take as long as on a disk of the rate in `path`. Any thread may call.

    The bytes of all threads pass one after the other, each call's without a gap; with no file nothing is slowed down.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._rate = DiskRate()
        self._free_s = 0.0  # when the bytes of all calls so far have passed

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """As slow as the rate says."""
        began_s = time.monotonic()
        count = super().pread(fd, buffer, offset)
        self._pass(count, began_s, read=True)
        return count

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        """As slow as the rate says."""
        began_s = time.monotonic()
        count = super().copy_mapped(address, buffer)
        self._pass(count, began_s, read=True)
        return count

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """As slow as the rate says."""
        began_s = time.monotonic()
        count = super().pwrite(fd, buffer, offset)
        self._pass(count, began_s, read=False)
        return count

    def _pass(self, nbytes: int, began_s: float, *, read: bool) -> None:
        """Returns when a call that began then would have ended."""
        while (rate := self._now()).bytes_per_s == 0:
            time.sleep(_LOOK_S)
        with self._lock:
            self._free_s = max(self._free_s, began_s)
            if rate.bytes_per_s is not None:
                self._free_s += nbytes / rate.bytes_per_s
            ends_s = self._free_s + (rate.latency_s if read else 0.0)
        if (left_s := ends_s - time.monotonic()) > 0:
            time.sleep(left_s)

    def _now(self) -> DiskRate:
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return DiskRate()
        with self._lock:
            if (stat.st_ino, stat.st_mtime_ns) != self._seen:
                self._rate = DiskRate(**json.loads(self._path.read_text()))
                self._seen = stat.st_ino, stat.st_mtime_ns
                self._free_s = 0.0  # what waits for the old rate does so, what comes now does not wait behind it
            return self._rate


class ThrottledDaemon(DaemonProcess):
    """A daemon whose disk is as fast as `throttle` said last; at first as fast as the device."""

    def __init__(self, settings: Mapping[str, object] | None = None, **how: Any) -> None:
        """As `DaemonProcess`."""
        super().__init__(settings, **how)
        self.rate = self.directory / "rate.json"
        self._program = ("-m", "benchmarks.common.throttled", "--rate", str(self.rate))

    def throttle(self, rate: DiskRate) -> None:
        """From its next file call on the disk has this rate; a call that waits for a disk that hangs has it, too."""
        self.directory.mkdir(parents=True, exist_ok=True)
        fresh = self.rate.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(rate)))
        fresh.rename(self.rate)


def main() -> None:
    """The daemon."""
    from prefixd.cli import tethered

    if len(sys.argv) < 3 or sys.argv[1] != "--rate":
        sys.exit("usage: python -m benchmarks.common.throttled --rate FILE PARENT serve ...")
    path = Path(sys.argv[2])
    del sys.argv[1:3]
    tethered.main(ThrottledOps(path))


if __name__ == "__main__":
    main()
