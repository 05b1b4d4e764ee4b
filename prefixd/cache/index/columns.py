"""Memory for columns that grow in place, without copying rows.

A column that outgrows a few pages reserves addresses for far more rows than it has. Addresses cost nothing: the kernel
provides a page of memory at the first write to it, and a row that was never written reads as 0.

    addresses   |<- rows in use ->|<- capacity ->|<-------------- reserved --------------->|
    memory      |#################|              |                                         |

A longer column is then a longer view of the same memory, and views of the shorter one stay valid.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]
Reserve = Callable[[int], mmap.mmap | None]
"""(nbytes): a mapping of bytes that read as 0 and take no memory before they are written, or None."""

_COPIED_BYTES = 1 << 16  # a smaller column is copied when it grows: a thousand small tables reserve next to nothing
_RESERVED_ROWS = 1 << 26  # with 300 bytes a row, 20 GB of addresses a table; a process has 128 TB
_RESERVED_BYTES = 1 << 35  # of one column, whatever a row takes
_MOST_ROWS = 1 << 31  # a row is an int32; reserved by a column that has outgrown the numbers above
_HUGE_BYTES = 1 << 22  # larger columns may use huge pages, as numpy's own arrays do
_MAP_NORESERVE = 0x4000  # Linux; Python has no name for it before 3.13
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_STRICT = "2"  # the kernel counts addresses as memory, whatever the flag says


def reserve_addresses(nbytes: int) -> mmap.mmap | None:
    """A private anonymous mapping; it ends with the last array that looks at it.

    None if addresses count as memory (RLIMIT_AS, RLIMIT_DATA, vm.overcommit_memory = 2), since a reservation would use
    up the limit, and if the kernel has no addresses or mappings left.
    """
    limits = (resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits) or _overcommit() == _STRICT:
        return None
    memory = _mapped(nbytes)
    if memory is not None:
        _advise(memory, mmap.MADV_NOHUGEPAGE, 0, nbytes)  # one row would take 2 MiB
    return memory


def zeros(count: int, dtype: npt.DTypeLike) -> Column:
    """`np.zeros` that never writes zeros itself, as `calloc` does for memory that was used before."""
    nbytes = count * np.dtype(dtype).itemsize
    memory = _mapped(nbytes) if nbytes >= _COPIED_BYTES else None
    if memory is None:
        return np.zeros(count, dtype)
    if nbytes >= _HUGE_BYTES:
        _advise(memory, mmap.MADV_HUGEPAGE, 0, nbytes)
    return np.frombuffer(memory, dtype)


class ColumnMemory:
    """The memory of one table's columns.

    Growing a table of 25 columns takes 0.1 ms at any size. A column is copied only if no addresses can be reserved, and
    once when it outgrows 67 million rows or 32 GiB.

    Args:
        reserve: where ranges of addresses come from.
        huge_pages: whether large columns use huge pages, for a column with random access. The kernel takes up to
            milliseconds to clear one, and columns of the same width reach their next page at the same row: 20 columns
            in huge pages held the event loop for 85 ms.
    """

    def __init__(self, reserve: Reserve = reserve_addresses, *, huge_pages: bool = False) -> None:
        self._reserve = reserve
        self._huge_pages = huge_pages
        self._ranges: dict[str, _Range] = {}

    def grown(self, name: str, column: Column, rows: int, *, planes: bool = False) -> Column:
        """`column` with `rows` rows, the new ones 0.

        Args:
            name: the column's name among the table's columns.
            column: [n, ...]: the result of the last call; at the first call, an array that is copied.
            rows: at least n.
            planes: the second axis is the outermost in memory, so that an index that is never written takes no memory.
        """
        held = self._ranges.get(name)
        if held is None or rows > len(held.column):
            held = self._range(column, rows, planes)
            held.column[: len(column)] = column
            self._ranges[name] = held
        if self._huge_pages:
            held.use_huge_pages(rows)
        return held.column[:rows]

    def write_ahead(self, name: str, start: int, stop: int, plane: int | None = None) -> None:
        """Asks for huge pages where the rows from `start` to `stop` lie, all of which are about to be written.

        Whole ones alone, so that no memory is taken for other rows. `plane`: of the second axis, where that is the
        outermost in memory.
        """
        if (held := self._ranges.get(name)) is not None:
            held.write_ahead(start, stop, plane)

    def forget(self, name: str) -> None:
        """Drops a column's memory; the next call of `grown` for it may have another width."""
        self._ranges.pop(name, None)

    def _range(self, like: Column, rows: int, planes: bool) -> _Range:
        """Memory for at least `rows` rows like those of `like`."""
        shape, row_bytes = like.shape[1:], like.dtype.itemsize * prod(like.shape[1:])
        if rows * row_bytes >= _COPIED_BYTES:
            ahead = min(_RESERVED_ROWS, _RESERVED_BYTES // row_bytes)
            if ahead < rows:
                ahead = max(rows, _MOST_ROWS)
            while ahead >= rows:
                memory = self._reserve(ahead * row_bytes)
                if memory is not None:
                    return _Range(np.frombuffer(memory, like.dtype), memory, ahead, shape, planes)
                ahead //= 4
        return _Range(np.zeros(rows * prod(shape), like.dtype), None, rows, shape, planes)


class _Range:
    """The memory of one column: `column` is all of it, [reserved rows, ...]."""

    def __init__(self, flat: Column, memory: mmap.mmap | None, rows: int, shape: tuple[int, ...], planes: bool) -> None:
        self._memory = memory
        self._plane_bytes = flat.nbytes // (shape[0] if planes else 1)
        if planes:
            self.column = flat.reshape(shape[0], rows, *shape[1:]).swapaxes(0, 1)
        else:
            self.column = flat.reshape(rows, *shape)

    def use_huge_pages(self, rows: int) -> None:
        """Asks the kernel for huge pages for the first `rows` rows."""
        if self._memory is None:
            return
        nbytes = self._plane_bytes * rows // len(self.column)
        if nbytes >= _HUGE_BYTES:
            for start in range(0, len(self._memory), self._plane_bytes):
                _advise(self._memory, mmap.MADV_HUGEPAGE, start, nbytes)

    def write_ahead(self, start: int, stop: int, plane: int | None) -> None:
        """As `ColumnMemory.write_ahead`."""
        if self._memory is None:
            return
        row_bytes = self._plane_bytes // len(self.column)
        begin = self._plane_bytes * (plane or 0)
        first = -(-(begin + row_bytes * start) // mmap.PAGESIZE) * mmap.PAGESIZE
        nbytes = begin + row_bytes * stop - first
        if nbytes >= _HUGE_BYTES:
            _advise(self._memory, mmap.MADV_HUGEPAGE, first, nbytes // mmap.PAGESIZE * mmap.PAGESIZE)


def _mapped(nbytes: int) -> mmap.mmap | None:
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    except (OSError, OverflowError):
        return None


def _advise(memory: mmap.mmap, advice: int, start: int, nbytes: int) -> None:
    start -= start % mmap.PAGESIZE
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(advice, start, nbytes)


def _overcommit() -> str:
    try:
        return _OVERCOMMIT.read_text().strip()
    except OSError:  # no /proc: the usual setting
        return ""
