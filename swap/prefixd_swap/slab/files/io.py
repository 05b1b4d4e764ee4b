"""The ways to read and write the disk tier's files: memory-mapped, direct or buffered.

    mmap      copies reads out of a memory map (`MappedIo`), writes through the page cache; drops both from the cache
    direct    reads and writes past the page cache (`DirectIo`)
    buffered  reads and writes through the page cache, which keeps them while it has room (`BufferedIo`)

The bytes in the files are the same, so a directory may be opened with another way each time.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.mapped_io import MappedIo
from prefixd_swap.slab.files.pread_io import BufferedIo, DirectIo, scratch
from prefixd_swap.slots import PAGE_BYTES

DiskIo = Literal["mmap", "direct", "buffered"]

log = logging.getLogger(__name__)


def open_flags(io: DiskIo) -> int:
    """The flags of `open` that `io` needs."""
    return os.O_DIRECT if io == "direct" else 0


def slot_io(io: DiskIo, ops: FileOps, fd: int, nbytes: int) -> BufferedIo:
    """Reads and writes the slots of a file of `nbytes` bytes, which was opened with `open_flags(io)`."""
    if io == "mmap":
        return MappedIo(ops, fd, nbytes)
    return DirectIo(ops, fd) if io == "direct" else BufferedIo(ops, fd)


def usable(wanted: DiskIo, path: Path, ops: FileOps) -> DiskIo:
    """`wanted` if the kernel and the file system of `path` support it, else buffered, with a warning in the log.

    Raises:
        OSError: the file cannot be opened at all.
    """
    os.close(ops.open(path, os.O_RDONLY))
    if wanted == "buffered":
        return wanted
    try:
        try_read(path, ops, wanted)
    except OSError as refused:
        try:
            try_read(path, ops, "buffered")
        except OSError:  # the device fails, so it is unknown whether the way works
            return wanted
        log.warning(
            "disk.io = %s does not work in %s (%s); the disk tier is read and written through the page cache instead",
            wanted,
            path.parent,
            refused.strerror,
        )
        return "buffered"
    return wanted


def try_read(path: Path, ops: FileOps, io: DiskIo) -> None:
    """Read the beginning of a file from the device, after dropping it from the page cache.

    Raises:
        OSError: the file cannot be opened or read.
    """
    with _opened(path, ops, io) as fd:
        page = scratch()[:PAGE_BYTES]
        ops.drop_cached(fd, 0, PAGE_BYTES)
        if io != "mmap" or not _copies_mapped(ops, fd, page):
            ops.pread(fd, page, 0)


def _copies_mapped(ops: FileOps, fd: int, page: memoryview) -> bool:
    """Copy the file's first page out of a mapping; False if the page cannot be read.

    Raises:
        OSError: the kernel does not map the file, or does not copy out of mappings.
    """
    address = ops.map(fd, len(page))
    try:
        ops.copy_mapped(address, page)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False  # a plain read gives the reason
    finally:
        ops.unmap(address, len(page))
    return True


@contextmanager
def _opened(path: Path, ops: FileOps, io: DiskIo) -> Iterator[int]:
    fd = ops.open(path, os.O_RDONLY | open_flags(io))
    try:
        yield fd
    finally:
        os.close(fd)
