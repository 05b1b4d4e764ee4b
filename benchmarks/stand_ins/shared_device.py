"""A device for several daemons on one machine: host memory, of which all of them together have no more than the device.

`python -m benchmarks.stand_ins.shared_device FILE PARENT serve ...` is `prefixd serve ...` that ends with process
PARENT and whose GPU tier is in the memory of the device in FILE. FILE has the device's size and what each process has
taken; a process locks it to take or give back, so the free bytes are those of one moment, as a GPU's driver gives them.
What a process had is free when it has ended.

It stands for a GPU that two daemons share, where there is none: a machine's own free memory changes with all that runs
on it. Only the tier's memory counts: no weights, and not the CPU tier.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefixd.cli import tethered
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.serving.models import gpu_memory
from prefixd_swap import OutOfMemoryError
from prefixd_swap.vmem import HostMemory


class SharedDevice:
    """The device in a file.

    Args:
        path: the file.
        nbytes: makes the device, of so many bytes; None: it is there.

    Attributes:
        total_bytes: all its bytes.
    """

    def __init__(self, path: Path, nbytes: int | None = None) -> None:
        self._path = path
        if nbytes is not None:
            path.write_text(json.dumps({"nbytes": nbytes, "taken": {}}))
        with self._locked() as (total_bytes, _):
            self.total_bytes = total_bytes

    def free_bytes(self) -> int:
        """Bytes that no process has."""
        with self._locked() as (nbytes, taken):
            return nbytes - sum(taken.values())

    def take(self, nbytes: int) -> None:
        """Gives bytes to this process. Raises OutOfMemoryError if fewer are free."""
        with self._locked() as (total, taken):
            free = total - sum(taken.values())
            if nbytes > free:
                raise OutOfMemoryError(f"{nbytes} bytes are wanted, {free} of the device's {total} are free")
            own = str(os.getpid())
            taken[own] = taken.get(own, 0) + nbytes

    def give_back(self, nbytes: int) -> None:
        """Takes bytes from this process, which has no use for them any more."""
        with self._locked() as (_, taken):
            taken[str(os.getpid())] -= nbytes

    @contextmanager
    def _locked(self) -> Iterator[tuple[int, dict[str, int]]]:
        """The device's bytes, and by process those taken; changes are kept unless the block raises."""
        with self._path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            content = json.load(file)
            taken = {pid: nbytes for pid, nbytes in content["taken"].items() if Path(f"/proc/{pid}").exists()}
            yield content["nbytes"], taken
            file.seek(0)
            file.truncate()
            json.dump({"nbytes": content["nbytes"], "taken": taken}, file)


class DeviceMemory(HostMemory):
    """Host memory whose chunks are of a device."""

    def __init__(self, chunk_bytes: int | None, device: SharedDevice) -> None:
        super().__init__(chunk_bytes)
        self._device = device

    def available_bytes(self) -> int:
        """Free bytes of the device."""
        return self._device.free_bytes()

    def total_bytes(self) -> int:
        """All bytes of the device."""
        return self._device.total_bytes

    def _create(self, chunks: range) -> None:
        nbytes = len(chunks) * self.chunk_bytes
        self._device.take(nbytes)
        try:
            super()._create(chunks)
        except BaseException:
            self._device.give_back(nbytes)
            raise

    def _destroy(self, chunks: range) -> None:
        super()._destroy(chunks)
        self._device.give_back(len(chunks) * self.chunk_bytes)


class SharingDaemon(DaemonProcess):
    """A daemon whose GPU tier is in the memory of a `SharedDevice`.

    Args:
        settings: by dotted name.
        device: the device's file.
    """

    def __init__(self, settings: dict[str, object], device: Path) -> None:
        super().__init__(settings, program=("-m", "benchmarks.stand_ins.shared_device", str(device)))


def main() -> None:
    """Runs the daemon."""
    if len(sys.argv) < 3:
        sys.exit("usage: python -m benchmarks.stand_ins.shared_device FILE PARENT serve ...")
    device = SharedDevice(Path(sys.argv.pop(1)))

    def create_memory(_: str, chunk_bytes: int | None = None) -> DeviceMemory:
        return DeviceMemory(chunk_bytes, device)

    vars(gpu_memory)["create_memory"] = create_memory
    tethered.main()


if __name__ == "__main__":
    main()
