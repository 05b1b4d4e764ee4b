"""The disk tier's directory: one owner at a time, and a mark that says whose format it is.

`LOCK` is held with flock(2) and names its holder; `SUPERBLOCK` is written once, before anything else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from pathlib import Path

import xxhash

from prefixd_swap.errors import DirectoryInUseError, FormatError
from prefixd_swap.file_ops import FileOps, storage_error
from prefixd_swap.slab_io import supports_direct
from prefixd_swap.slots import PAGE_BYTES

MAGIC = b"prefixd\0"
VERSION = 1

_SUPERBLOCK = struct.Struct("<8sII")  # magic, version, page bytes; an xxh3_64 of these follows
_CHECK = struct.Struct("<Q")


class DataDirectory:
    """A directory held for this process alone until `close`."""

    def __init__(self, path: Path, ops: FileOps) -> None:
        """Create or take the directory.

        Raises:
            DirectoryInUseError: another store holds it.
            FormatError: it holds another version's files, or somebody else's.
            StorageError: it cannot be made, read or written.
        """
        self.path = path
        self.slabs = path / "slabs"
        self.index = path / "index"
        self._ops = ops
        try:
            ops.mkdir(path)
            _refuse_foreign(path)
            self._fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(f"opening the data directory {path}", error) from error
        try:
            self._lock()
            self._check_superblock()
            ops.mkdir(self.slabs)
            ops.sync_directory(path)
        except OSError as error:
            os.close(self._fd)
            raise storage_error(f"preparing the data directory {path}", error) from error
        except BaseException:
            os.close(self._fd)
            raise

    def supports_direct(self) -> bool:
        """Whether the file system here takes `O_DIRECT`.

        Raises:
            StorageError: it cannot be read at all.
        """
        try:
            return supports_direct(self.path / "SUPERBLOCK", self._ops)
        except OSError as error:
            raise storage_error(f"reading {self.path / 'SUPERBLOCK'}", error) from error

    def close(self) -> None:
        """Let another process take the directory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            raise DirectoryInUseError(
                f"{self.path} is in use by process {holder or 'unknown'}; stop it or choose another directory"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _check_superblock(self) -> None:
        name = self.path / "SUPERBLOCK"
        fields = _SUPERBLOCK.pack(MAGIC, VERSION, PAGE_BYTES)
        if not name.exists():
            self._write_superblock(name, fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields)))
            return
        found = name.read_bytes()
        if not found.startswith(MAGIC):
            raise FormatError(f"{name} is not a prefixd superblock; choose an empty directory")
        damaged = FormatError(f"{name} is damaged; delete {self.path} to start with an empty cache")
        if len(found) < _SUPERBLOCK.size:
            raise damaged
        _, version, page_bytes = _SUPERBLOCK.unpack_from(found)
        if version != VERSION:
            age, remedy = (
                ("a newer", "upgrade prefixd, choose another directory")
                if version > VERSION
                else ("an older", "use the prefixd that wrote it, choose another directory")
            )
            raise FormatError(
                f"{self.path} has format {version}, of {age} prefixd than this one, which reads format {VERSION}; "
                f"{remedy}, or delete this one to start with an empty cache"
            )
        if page_bytes != PAGE_BYTES:
            raise FormatError(
                f"{self.path} has pages of {page_bytes} bytes, this prefixd has pages of {PAGE_BYTES}; "
                "choose another directory, or delete this one to start with an empty cache"
            )
        check = found[_SUPERBLOCK.size :]
        if check != _CHECK.pack(xxhash.xxh3_64_intdigest(found[: _SUPERBLOCK.size])):
            raise damaged

    def _write_superblock(self, name: Path, content: bytes) -> None:
        fresh = name.with_suffix(".new")
        fd = self._ops.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self._ops.pwrite(fd, memoryview(content), 0)
            self._ops.fdatasync(fd)
        finally:
            os.close(fd)
        self._ops.rename(fresh, name)
        self._ops.sync_directory(self.path)
        with contextlib.suppress(OSError):  # we may lack the right to open the parent
            self._ops.sync_directory(self.path.parent)


def _refuse_foreign(path: Path) -> None:
    """Leave a directory alone that was never ours: one with files in it and no superblock."""
    names = {entry.name for entry in path.iterdir()}
    foreign = sorted(names - {"LOCK", "SUPERBLOCK.new"})  # a crash may have left these two alone
    if foreign and "SUPERBLOCK" not in names:
        raise FormatError(
            f"{path} has no superblock but holds {foreign[0]!r}; choose an empty directory, "
            "or delete this one if it was prefixd's"
        )
