"""A daemon in its own process whose disk fails on command.

The orders (`steered_daemon`) are one JSON object: the name of a call of `FileOps` -> what happens to it. That is the
name of an errno (`{"pwrite": "ENOSPC", "commit": "EIO"}`), or

- for `pread`, `copy_mapped` and `pwrite`, `wrong`: the call succeeds with a byte of each page altered;
- for `commit`, `half`: LMDB itself fails while it writes its meta page, so that it does not know what is durable;
- for `commit`, `late`: the transaction is durable, but the call fails.

`free_bytes` may also be a number: what the file system says it has left. `delay_ms`, a number, is how long every read,
write, sync and commit takes at least.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lmdb

from benchmarks.stand_ins.steered_daemon import Orders, SteeredDaemon, serve
from prefixd_swap import FileOps

_PAGE_BYTES = 4096
_SLOW = ("pread", "copy_mapped", "pwrite", "fdatasync", "commit")
_WRITES = ("mkdir", "rename", "fallocate", "pwrite", "fdatasync", "unlink", "commit")

FAULTS: dict[str, Mapping[str, str | int]] = {
    "disk full": {"fallocate": "ENOSPC", "pwrite": "ENOSPC", "commit": "ENOSPC", "free_bytes": 0},
    "no room for a slab": {"fallocate": "ENOSPC", "free_bytes": 0},
    "no room for the index": {"commit": "ENOSPC"},
    "read error": {"pread": "EIO", "copy_mapped": "EIO"},
    "write error": {"pwrite": "EIO"},
    "sync error": {"fdatasync": "EIO"},
    "index error": {"commit": "EIO"},
    "index error half-way": {"commit": "half"},
    "index error afterwards": {"commit": "late"},
    "read-only file system": dict.fromkeys(_WRITES, "EROFS"),
    "no descriptors for slabs": {"open": "EMFILE"},
    "wrong bytes read": {"pread": "wrong", "copy_mapped": "wrong"},
    "wrong bytes written": {"pwrite": "wrong"},
}
"""Orders by the trouble that they imitate."""


class FaultyOps(FileOps):
    """The real calls, unless the orders in `path` say otherwise."""

    def __init__(self, path: Path) -> None:
        self._file = Orders(path)
        self._orders: Mapping[str, str | int] = {}

    def order(self, call: str) -> str | int | None:
        if (changed := self._file.changed()) is not None:
            self._orders = changed
        return self._orders.get(call)

    def _refuse(self, call: str) -> str | int | None:
        """Raises the errno that is ordered for `call`; other orders are returned."""
        order = self.order(call)
        if call in _SLOW and isinstance(delay_ms := self._orders.get("delay_ms"), int):
            time.sleep(delay_ms / 1000)
        if isinstance(order, str) and order.startswith("E"):
            code = int(getattr(errno, order))
            if call == "commit":
                raise _lmdb_error(code)
            raise OSError(code, os.strerror(code))
        return order

    def open(self, path: Path, flags: int) -> int:
        self._refuse("open")
        return super().open(path, flags)

    def mkdir(self, path: Path) -> None:
        """As ordered, unless the directory is there: then there is nothing to do."""
        if not path.is_dir():
            self._refuse("mkdir")
        super().mkdir(path)

    def rename(self, old: Path, new: Path) -> None:
        self._refuse("rename")
        super().rename(old, new)

    def fallocate(self, fd: int, nbytes: int) -> None:
        self._refuse("fallocate")
        super().fallocate(fd, nbytes)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        order = self._refuse("pread")
        count = super().pread(fd, buffer, offset)
        if order == "wrong":
            _spoil(buffer[:count])
        return count

    def map(self, fd: int, nbytes: int) -> int:
        self._refuse("map")
        return super().map(fd, nbytes)

    def copy_mapped(self, address: int, buffer: memoryview) -> int:
        order = self._refuse("copy_mapped")
        count = super().copy_mapped(address, buffer)
        if order == "wrong":
            _spoil(buffer[:count])
        return count

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        if self._refuse("pwrite") == "wrong":
            spoilt = memoryview(mmap.mmap(-1, len(buffer)))  # whole pages, for O_DIRECT
            spoilt[:] = buffer
            _spoil(spoilt)
            buffer = spoilt
        return super().pwrite(fd, buffer, offset)

    def fdatasync(self, fd: int) -> None:
        self._refuse("fdatasync")
        super().fdatasync(fd)

    def sync_directory(self, path: Path) -> None:
        self._refuse("sync_directory")
        super().sync_directory(path)

    def unlink(self, path: Path) -> None:
        self._refuse("unlink")
        super().unlink(path)

    def commit(self, transaction: lmdb.Transaction[bytes]) -> None:
        order = self._refuse("commit")
        if order == "half":
            with _failing_meta_page():
                super().commit(transaction)
            return
        super().commit(transaction)
        if order == "late":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def free_bytes(self, path: Path) -> int:
        order = self._refuse("free_bytes")
        return order if isinstance(order, int) else super().free_bytes(path)


class FaultyDaemon(SteeredDaemon):
    """A daemon whose disk fails between `break_disk` and `heal_disk`."""

    MODULE = "benchmarks.checks.fault_injection.faulty_daemon"

    def run_limited(self) -> None:
        """From its next start on it may lock hardly any memory."""
        self._program = ("-m", "benchmarks.common.limited", "memory", *self._program)

    def break_disk(self, orders: Mapping[str, str | int] | str) -> None:
        """From its next file call on the disk obeys `orders`, or those of the trouble in FAULTS with that name."""
        self._orders.write(FAULTS[orders] if isinstance(orders, str) else orders)

    def heal_disk(self) -> None:
        """From its next file call on the disk works."""
        self.break_disk({})


def _lmdb_error(code: int) -> lmdb.Error:
    error = lmdb.DiskError(os.strerror(code)) if code == errno.ENOSPC else lmdb.Error(os.strerror(code))
    vars(error)["code"] = code
    return error


@contextmanager
def _failing_meta_page() -> Iterator[None]:
    """Meanwhile LMDB's descriptor for meta pages, which is the one with O_DSYNC, is a full device."""
    chosen = [fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_meta(fd)]
    if not chosen:
        raise RuntimeError("no descriptor of data.mdb has O_DSYNC; this LMDB writes its meta pages another way")
    kept = [(fd, os.dup(fd)) for fd in chosen]
    full = os.open("/dev/full", os.O_RDWR | os.O_CLOEXEC)
    try:
        for fd, _ in kept:
            os.dup2(full, fd, inheritable=False)
        yield
    finally:
        for fd, copy in kept:
            os.dup2(copy, fd, inheritable=False)
            os.close(copy)
        os.close(full)


def _is_meta(fd: int) -> bool:
    try:
        path = os.readlink(f"/proc/self/fd/{fd}")
        return path.endswith("/data.mdb") and bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DSYNC)
    except OSError:  # closed since it was listed
        return False


def _spoil(data: memoryview) -> None:
    for at in range(0, len(data), _PAGE_BYTES):
        data[at] ^= 1


if __name__ == "__main__":
    serve(FaultyOps)
