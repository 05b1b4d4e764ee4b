"""Limits the pages of a file that a library has mapped: mapped pages count as this process's memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

_PAGES_A_TOUCH = 16  # a touch of one page maps all cached pages of the 64 KiB around it


class MappedFile:
    """The read-only mapping of a file, somewhere in this process.

    Args:
        path: the file.
        most_bytes: its pages are unmapped when about this many bytes are mapped.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path = os.path.realpath(path)
        self._most = most_bytes // (_PAGES_A_TOUCH * mmap.PAGESIZE)
        self._touched = 0
        self._ranges: list[tuple[int, int]] | None = None

    def moved(self) -> None:
        """Call after the library has mapped the file again, maybe at another address."""
        self._ranges = None

    def touch(self, places: int) -> None:
        """Count `places` places of the file that were read; unmaps all pages above the limit."""
        self._touched += places
        if self._touched >= self._most:
            self.let_go()

    def let_go(self) -> None:
        """Unmaps all pages. They stay in the page cache, and a read maps them again."""
        self._touched = 0
        if self._ranges is None:
            self._ranges = _ranges(self._path)
        for start, nbytes in self._ranges:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def _ranges(path: str) -> list[tuple[int, int]]:
    """Start and length of every mapping of `path`; none where the system does not tell."""
    try:
        lines = os.fsdecode(Path("/proc/self/maps").read_bytes()).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        fields = line.split(maxsplit=5)
        if fields[-1] == path:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            found.append((start, end - start))
    return found


_libc = ctypes.CDLL(None)
