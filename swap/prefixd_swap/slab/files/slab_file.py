"""One slab: a preallocated file of slots."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path

import xxhash

from prefixd_swap.errors import LostBytesError, StorageError
from prefixd_swap.slab.files.file_ops import FileOps, storage_error
from prefixd_swap.slab.files.io import DiskIo, open_flags, slot_io
from prefixd_swap.slab.files.pread_io import EndOfFileError
from prefixd_swap.slots import PAGE_BYTES

INDEX_BITS = 26
"""A slot's number is its slab's number, then its index in the slab, in units of 4096 bytes, in the low 26 bits."""
MAX_NUMBER = (1 << 63 - INDEX_BITS - (PAGE_BYTES - 1).bit_length()) - 1
"""The highest number of a slab: a slot's address in bytes must fit into a signed 64-bit number."""

_NAME = re.compile(r"([0-9a-f]{10})\.slab")
_OWN_FAULTS = frozenset({errno.EIO, errno.EISDIR, errno.ELOOP, errno.ENOENT, errno.EUCLEAN})
"""Errors in opening a file that concern only this file, which is then given up. Errors that an operator can end, such
as too many open files or a missing right, are not among them: the file's blocks would leave the index for good."""


class UnreadableSlabError(StorageError):
    """This slab cannot be opened; others may be."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class SlabFile:
    """`count` units of 4096 bytes; the file's name is its number. `SlabFiles` decides where slots begin and end.

    The descriptor is closed with the last reference, so a reader can finish on a slab that was deleted.
    """

    def __init__(self, number: int, path: Path, count: int, fd: int, ops: FileOps, io: DiskIo) -> None:
        self.number = number
        self.path = path
        self.count = count
        self.failed = False
        """Whether a sync has failed: the kernel may have dropped pages that were written since the last one."""
        self.lost_from: int | None = None
        """First unit that is gone from the file, set by `find_loss`: the slab is then given up."""
        self._fd = fd
        self._ops = ops
        self._io = slot_io(io, ops, fd, self.nbytes)
        weakref.finalize(self, os.close, fd)

    @property
    def nbytes(self) -> int:
        """Size of the file in bytes."""
        return self.count * PAGE_BYTES

    @classmethod
    def create(cls, folder: Path, number: int, count: int, ops: FileOps, io: DiskIo = "buffered") -> SlabFile:
        """Make and preallocate the file with `count` units, durably.

        Raises:
            DiskFullError: the file system has no room for it; nothing of it stays.
            StorageError: any other failure; nothing of it stays.
        """
        path = folder / f"{number:010x}.slab"
        try:
            fd = ops.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | open_flags(io))
        except OSError as error:
            raise storage_error(f"creating the slab {path}", error) from error
        slab = cls(number, path, count, fd, ops, io)
        try:
            ops.fallocate(fd, slab.nbytes)
            ops.fdatasync(fd)
            ops.sync_directory(folder)
        except OSError as error:
            with contextlib.suppress(StorageError):  # the next start finds a file that cannot be deleted now
                slab.unlink()
            raise storage_error(f"preallocating {slab.nbytes} bytes for the slab {path}", error) from error
        return slab

    @classmethod
    def reopen(cls, path: Path, ops: FileOps, io: DiskIo = "buffered") -> SlabFile | None:
        """The slab in that file, with the units that it holds; None when the name is not a slab's.

        Raises:
            UnreadableSlabError: this file cannot be opened; others may be.
            StorageError: no file can be opened.
        """
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        number = int(match[1], 16)
        if number > MAX_NUMBER:
            return None
        try:
            count = min(path.stat().st_size // PAGE_BYTES, 1 << INDEX_BITS)
            fd = ops.open(path, os.O_RDWR | open_flags(io))
            return cls(number, path, count, fd, ops, io)
        except OSError as error:
            fault = storage_error(f"opening the slab {path}", error)
            if error.errno in _OWN_FAULTS:
                raise UnreadableSlabError(str(fault), number) from error
            raise fault from error

    def write(self, index: int, data: memoryview) -> None:
        """Write a slot's bytes; durable only after `sync`.

        Raises:
            LostBytesError: the file was deleted or cut off; writing would only make it grow again.
            StorageError: the device or the file system refused.
        """
        if self.find_loss():
            raise LostBytesError(
                f"{self.path} was deleted or cut off while in use; leave the files of a running daemon alone, and "
                "check the file system"
            )
        try:
            self._io.write(data, index * PAGE_BYTES)
        except OSError as error:
            raise storage_error(f"writing the slot at byte {index * PAGE_BYTES} of {self.path}", error) from error

    def read(self, index: int, into: memoryview) -> None:
        """Read a slot's first `len(into)` bytes.

        Raises:
            StorageError: the device failed, or the file ends too early.
        """
        with self._reading(index):
            self._io.read(into, index * PAGE_BYTES)

    def read_run(self, index: int, nbytes: int) -> memoryview:
        """Read at most 1 MiB of adjacent slots into a buffer of this thread, which its next read overwrites.

        Raises:
            StorageError: as `read`.
        """
        with self._reading(index):
            (run,) = self._io.pieces(nbytes, index * PAGE_BYTES)
        return run

    def checksum(self, index: int, nbytes: int) -> int:
        """xxh3_64 of a slot's first `nbytes` bytes.

        Raises:
            StorageError: as `read`.
        """
        digest = xxhash.xxh3_64()
        with self._reading(index):
            for piece in self._io.pieces(nbytes, index * PAGE_BYTES):
                digest.update(piece)
        return digest.intdigest()

    def sync(self) -> None:
        """Return when everything written is durable.

        A failed sync is final. Linux reports a lost page once and then marks it clean, so the next sync would succeed
        although data is gone (Rebello et al., "Can Applications Recover from fsync Failures?", USENIX ATC 2020).

        Raises:
            StorageError: this sync or an earlier one failed.
        """
        if self.failed:
            raise StorageError(f"{self.path} failed to sync earlier; it is deleted when its last block goes")
        try:
            self._io.sync()
        except OSError as error:
            self.failed = True
            raise storage_error(f"syncing {self.path}", error) from error

    def find_loss(self) -> bool:
        """Whether the file was deleted or cut off while in use; sets `lost_from`.

        The bytes of a deleted file could still be read, but would be gone at the next start.

        Raises:
            StorageError: the file's size cannot be read.
        """
        try:
            stat = os.fstat(self._fd)
        except OSError as error:
            raise storage_error(f"reading the size of {self.path}", error) from error
        kept = stat.st_size // PAGE_BYTES if stat.st_nlink else 0
        if kept < self.count:
            self.lost_from = min(kept, self.count if self.lost_from is None else self.lost_from)
        return self.lost_from is not None

    def sync_again(self) -> None:
        """Use the file again after a failed sync. No write to it may be under way or unsynced.

        No record names the pages that the kernel dropped: their writers got an error.

        Raises:
            StorageError: it still cannot be synced.
        """
        failed, self.failed = self.failed, False
        try:
            self.sync()
        except StorageError:
            self.failed = failed
            raise

    def unlink(self) -> None:
        """Delete the file; its space returns when the last reader is done.

        Raises:
            StorageError: the file system refused.
        """
        try:
            self._ops.unlink(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise storage_error(f"deleting the slab {self.path}", error) from error

    @contextlib.contextmanager
    def _reading(self, index: int) -> Iterator[None]:
        try:
            yield
        except EndOfFileError as error:
            raise LostBytesError(
                f"{self.path} ends at byte {error.offset}, inside the slot at byte {index * PAGE_BYTES}; "
                "drop its blocks"
            ) from error
        except OSError as error:
            raise storage_error(f"reading the slot at byte {index * PAGE_BYTES} of {self.path}", error) from error
