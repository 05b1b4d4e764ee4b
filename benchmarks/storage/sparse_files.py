"""Slab files that take little space on the device: of a slot only the pages that have content."""

from __future__ import annotations

import ctypes
import os

import numpy as np

from prefixd_swap.slab.files.file_ops import FileOps

_PAGE_BYTES = 4096
_PAGE_WORDS = _PAGE_BYTES // 8
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


class SparseFiles(FileOps):
    """The real files, but zeros are holes, and nothing waits for the device. Bytes are read back as they were written.

    Not for a store whose durability is in question.
    """

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Give the file its size and no space."""
        os.ftruncate(fd, nbytes)

    def fdatasync(self, fd: int) -> None:
        """Nothing: the process that wrote the bytes reads them back."""

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write `buffer` up to the last page that has content, and punch a hole for the zeros behind it."""
        if len(buffer) % _PAGE_BYTES or offset % _PAGE_BYTES:
            return super().pwrite(fd, buffer, offset)
        pages = np.frombuffer(buffer, np.uint64).reshape(-1, _PAGE_WORDS)
        used = np.flatnonzero(pages.max(axis=1))
        end = (int(used[-1]) + 1) * _PAGE_BYTES if len(used) else 0
        if end == len(buffer):
            return super().pwrite(fd, buffer, offset)
        if end:
            super().pwrite(fd, buffer[:end], offset)
        hole = (ctypes.c_int64(offset + end), ctypes.c_int64(len(buffer) - end))
        if _libc.fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, *hole):
            return super().pwrite(fd, buffer, offset)
        return len(buffer)
