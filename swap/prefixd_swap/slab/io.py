"""Slots to and from memory, through the page cache or past it.

`O_DIRECT` wants addresses, lengths and offsets in whole pages. Slots are; memory that is not goes through a buffer of
pages that each thread keeps.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prefixd_swap.slab.file_ops import FileOps
from prefixd_swap.slots import PAGE_BYTES, round_to_slot

STEP_BYTES = 1 << 20


class EndOfFileError(OSError):
    """The file ends before what was to be read; `offset` is where."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the file ends at byte {offset}")
        self.offset = offset


def supports_direct(path: Path, ops: FileOps) -> bool:
    """Whether the file system of the file `path` takes `O_DIRECT`. Some say only at the first read that they do not.

    Raises:
        OSError: the file cannot be opened at all.
    """
    os.close(ops.open(path, os.O_RDONLY))
    try:
        fd = ops.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        ops.pread(fd, _scratch()[:PAGE_BYTES], 0)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def try_read(path: Path, ops: FileOps, direct: bool) -> None:
    """Read a page at the beginning of a file, with `direct` from the device itself.

    Raises:
        OSError: the file cannot be opened or read.
    """
    fd = ops.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        ops.pread(fd, _scratch()[:PAGE_BYTES], 0)
    finally:
        os.close(fd)


def write(ops: FileOps, fd: int, data: memoryview, offset: int, direct: bool) -> None:
    """Write all of `data` into a slot at `offset`. With `direct` the slot's last page is filled with zeros.

    Raises:
        OSError: as `FileOps.pwrite`.
    """
    if not direct or _is_aligned(data):
        _write(ops, fd, data, offset)
        return
    for start in range(0, len(data), STEP_BYTES):
        piece = data[start : start + STEP_BYTES]
        padded = _scratch()[: round_to_slot(len(piece))]
        padded[: len(piece)] = piece
        padded[len(piece) :] = bytes(len(padded) - len(piece))
        _write(ops, fd, padded, offset + start)


def read(ops: FileOps, fd: int, into: memoryview, offset: int, direct: bool) -> None:
    """Fill `into` from a slot at `offset`.

    Raises:
        EndOfFileError: the file is too short.
        OSError: as `FileOps.pread`.
    """
    if not direct or _is_aligned(into):
        _read(ops, fd, into, offset, direct)
        return
    start = 0
    for piece in pieces(ops, fd, len(into), offset, direct):
        into[start : start + len(piece)] = piece
        start += len(piece)


def pieces(ops: FileOps, fd: int, nbytes: int, offset: int, direct: bool) -> Iterator[memoryview]:
    """The bytes of a slot at `offset`, a piece at a time; each is overwritten by the next.

    Raises:
        EndOfFileError: the file is too short.
        OSError: as `FileOps.pread`.
    """
    for start in range(0, nbytes, STEP_BYTES):
        length = min(STEP_BYTES, nbytes - start)
        piece = _scratch()[: round_to_slot(length) if direct else length]
        _read(ops, fd, piece, offset + start, direct)
        yield piece[:length]


def _write(ops: FileOps, fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = ops.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read(ops: FileOps, fd: int, into: memoryview, offset: int, direct: bool) -> None:
    while into:
        got = ops.pread(fd, into, offset)
        into, offset = into[got:], offset + got
        # A direct read may only go on at a page: it is short in the middle of one when the file ends there.
        if not got or (direct and into and got % PAGE_BYTES):
            raise EndOfFileError(offset)


def _is_aligned(data: memoryview) -> bool:
    return not (len(data) % PAGE_BYTES or np.frombuffer(data, np.uint8).ctypes.data % PAGE_BYTES)


class _Local(threading.local):
    buffer: memoryview | None = None


_local = _Local()


def _scratch() -> memoryview:
    if _local.buffer is None:
        _local.buffer = memoryview(mmap.mmap(-1, STEP_BYTES))
    return _local.buffer
