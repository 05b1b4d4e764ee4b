"""Reads and writes slots of an open file by `pread` and `pwrite`, through the page cache or past it."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

import numpy as np

from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slots import PAGE_BYTES, round_to_slot

STEP_BYTES = 1 << 20


class EndOfFileError(OSError):
    """The file ends, at `offset`, before the end of the read."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the file ends at byte {offset}")
        self.offset = offset


class BufferedIo:
    """Reads and writes through the page cache.

    This is also the base of the other ways. Any thread may call any method; a slot is not read while it is written.

    Args:
        ops: the file calls.
        fd: descriptor of the file, open for as long as this object is used.
    """

    def __init__(self, ops: FileOps, fd: int) -> None:
        self._ops = ops
        self._fd = fd

    def read(self, into: memoryview, offset: int) -> None:
        """Fill `into` from a slot at `offset`, a multiple of 4096.

        Raises:
            EndOfFileError: the file is too short.
            OSError: the device failed.
        """
        self._fill(into, offset)

    def pieces(self, nbytes: int, offset: int) -> Iterator[memoryview]:
        """The first `nbytes` bytes of a slot at `offset`, at most 1 MiB at a time; each is overwritten by the next.

        Raises:
            EndOfFileError: the file is too short.
            OSError: the device failed.
        """
        for start in range(0, nbytes, STEP_BYTES):
            piece = scratch()[: min(STEP_BYTES, nbytes - start)]
            self._fill(piece, offset + start)
            yield piece

    def write(self, data: memoryview, offset: int) -> None:
        """Write all of `data` into a slot at `offset`; durable only after a sync of the file.

        Raises:
            OSError: the device or the file system refused.
        """
        while data:
            written = self._ops.pwrite(self._fd, data, offset)
            data, offset = data[written:], offset + written

    def sync(self) -> None:
        """Return when everything written is durable.

        Raises:
            OSError: the device failed; Linux may have dropped written pages.
        """
        self._ops.fdatasync(self._fd)

    def _fill(self, into: memoryview, offset: int) -> None:
        while into:
            got = self._ops.pread(self._fd, into, offset)
            into, offset = into[got:], offset + got
            if not got:
                raise EndOfFileError(offset)


class DirectIo(BufferedIo):
    """Reads and writes past the page cache (`O_DIRECT`), which needs addresses, lengths and offsets in whole pages.

    Slots are whole pages. Memory that is not goes through a page-aligned buffer that each thread keeps.
    """

    def read(self, into: memoryview, offset: int) -> None:
        """As `BufferedIo.read`."""
        if _is_aligned(into):
            self._fill(into, offset)
            return
        start = 0
        for piece in self.pieces(len(into), offset):
            into[start : start + len(piece)] = piece
            start += len(piece)

    def pieces(self, nbytes: int, offset: int) -> Iterator[memoryview]:
        """As `BufferedIo.pieces`."""
        for start in range(0, nbytes, STEP_BYTES):
            length = min(STEP_BYTES, nbytes - start)
            piece = scratch()[: round_to_slot(length)]
            self._fill(piece, offset + start)
            yield piece[:length]

    def write(self, data: memoryview, offset: int) -> None:
        """As `BufferedIo.write`. The last page of `data` is filled with zeros."""
        if _is_aligned(data):
            super().write(data, offset)
            return
        for start in range(0, len(data), STEP_BYTES):
            piece = data[start : start + STEP_BYTES]
            padded = scratch()[: round_to_slot(len(piece))]
            padded[: len(piece)] = piece
            padded[len(piece) :] = bytes(len(padded) - len(piece))
            super().write(padded, offset + start)

    def _fill(self, into: memoryview, offset: int) -> None:
        while into:
            got = self._ops.pread(self._fd, into, offset)
            into, offset = into[got:], offset + got
            # A direct read can continue only at a page border; it ends inside a page only at the end of the file.
            if not got or (into and got % PAGE_BYTES):
                raise EndOfFileError(offset)


def scratch() -> memoryview:
    """A page-aligned buffer of STEP_BYTES that the calling thread keeps."""
    if _local.buffer is None:
        _local.buffer = memoryview(mmap.mmap(-1, STEP_BYTES))
    return _local.buffer


def _is_aligned(data: memoryview) -> bool:
    return not (len(data) % PAGE_BYTES or np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES)


class _Local(threading.local):
    buffer: memoryview | None = None


_local = _Local()
