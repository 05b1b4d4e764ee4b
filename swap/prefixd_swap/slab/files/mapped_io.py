"""Reads slots of an open file through a memory map; every fault is an error code instead of a signal.

Touching a byte of a map that the file has lost, or that the device cannot read, raises SIGBUS. So no code touches the
map: the kernel copies out of it (`process_vm_readv` of this process by itself). It looks the pages up as for a
debugger's read, waits for pages that are not there yet, and gives EFAULT where a touch would raise SIGBUS. Check and
copy are one step, so the file cannot be cut off between them.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import weakref

from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.pread_io import BufferedIo, EndOfFileError

log = logging.getLogger(__name__)
_FAULT_AROUND = 64 << 10
"""A fault also maps the cached pages within these bytes around it (the kernel's default, fault_around_bytes)."""


class MappedIo(BufferedIo):
    """Reads through one shared mapping of the file, writes as `BufferedIo`; leaves nothing in the page cache.

    The first read makes the mapping, which ends with this object. Bytes that were read, or written and synced, are
    dropped from the page cache, so that memory holds no block twice.

    Args:
        ops: the file calls.
        fd: descriptor of the file, open for as long as this object is used.
        nbytes: size of the file.
    """

    def __init__(self, ops: FileOps, fd: int, nbytes: int) -> None:
        super().__init__(ops, fd)
        self._nbytes = nbytes
        self._lock = threading.Lock()
        self._address = 0  # of the mapping; 0 as long as there is none
        self._refused = False  # the kernel did not map the file: it is read by `pread`
        self._written: list[tuple[int, int]] = []  # first and end byte of what was written since the last sync
        self._read: list[tuple[int, int]] = []  # first and end byte of each read under way

    def write(self, data: memoryview, offset: int) -> None:
        """As `BufferedIo.write`. Readers of the mapping see it at once: it is shared."""
        super().write(data, offset)
        with self._lock:
            self._written.append(_pages(offset, len(data)))

    def sync(self) -> None:
        """As `BufferedIo.sync`."""
        with self._lock:
            written, self._written = self._written, []
        super().sync()
        for first, end in written:
            self._ops.drop_cached(self._fd, first, end - first)

    def _fill(self, into: memoryview, offset: int) -> None:
        address = self._map()
        end = offset + len(into)
        if not address or end > self._nbytes:
            super()._fill(into, offset)
            return
        pages = _pages(offset, len(into))
        with self._lock:
            self._read.append(pages)
        try:
            self._ops.read_ahead(address + pages[0], pages[1] - pages[0])
            self._copy(address + offset, into)
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            super()._fill(into, offset)  # EFAULT stands for every fault; a plain read gives the error
        finally:
            self._drop(address, pages)
        size = os.fstat(self._fd).st_size
        if size < end:  # the rest of the file's last page reads as zeros
            raise EndOfFileError(size)

    def _copy(self, address: int, into: memoryview) -> None:
        while into:
            got = self._ops.copy_mapped(address, into)
            into, address = into[got:], address + got

    def _drop(self, address: int, pages: tuple[int, int]) -> None:
        """Drop pages that were read from the page cache, after unmapping them: the cache keeps mapped pages.

        A fault also maps cached pages around it, which other threads may be reading. Their drop cannot remove these
        pages, so this one drops them too, except pages that are still being read.
        """
        first = max(pages[0] - _FAULT_AROUND, 0)
        end = min(pages[1] + _FAULT_AROUND, _pages(0, self._nbytes)[1])
        self._ops.unmap_pages(address + first, end - first)
        with self._lock:
            self._read.remove(pages)
            others = sorted(self._read)
        for start, stop in others:
            if start < end and stop > first:
                if start > first:
                    self._ops.drop_cached(self._fd, first, start - first)
                first = min(stop, end)
        if first < end:
            self._ops.drop_cached(self._fd, first, end - first)

    def _map(self) -> int:
        """Address of the mapping, 0 if the kernel refuses it."""
        with self._lock:
            if not self._address and not self._refused:
                try:
                    self._address = self._ops.map(self._fd, self._nbytes)
                except OSError as error:  # mappings or addresses are used up; the bytes may be good
                    self._refused = True
                    log.warning(
                        "a slab of %d bytes cannot be mapped (%s) and is read by pread; raise vm.max_map_count or "
                        "`ulimit -v`, or set disk.io to direct",
                        self._nbytes,
                        error.strerror,
                    )
                else:
                    unmap = weakref.finalize(self, self._ops.unmap, self._address, self._nbytes)
                    unmap.atexit = False  # a thread may still read; the mapping ends with the process
            return self._address


def _pages(offset: int, nbytes: int) -> tuple[int, int]:
    """First and end byte of the system's pages that hold these bytes; they may be larger than 4096 bytes."""
    return offset // mmap.PAGESIZE * mmap.PAGESIZE, -(-(offset + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
