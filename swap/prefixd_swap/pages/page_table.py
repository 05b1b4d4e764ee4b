"""The pages of a tier: ranges of addresses, the grid that cuts them, and the taken slots of each page.

Pages begin and end at units (`page_size`), and the table has one row a unit. A page's number is its first unit, which
is valid until a range is added or removed, or the page becomes empty and is cut again:

    unit     | 0  | 1  | 2  | 3  | 4  | 5  | 6  | 7  |
    group    |<------- 0 ------->|<------- 4 ------->|    page-sized stretches of the grid
    page     |<------- 0 ------->|<-- 4 -->|<-- 6 -->|    4 has slots of an earlier grid, 6 is free and short

`pages` decides which slot is allocated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from copy import copy as shallow_copy
from dataclasses import dataclass, replace
from itertools import chain
from operator import le
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import IntegrityError, MemoryMisuseError

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

EMPTY = 0
IRREGULAR = -1
"""A page with slots of several sizes, or with gaps: a mixed page (`mixed_pages`), or one that a restart has found."""

_COLUMNS = ("address", "end", "group", "open", "head", "length", "slot", "count", "used")


@dataclass(slots=True)
class Range:
    """Addresses that pages cover."""

    start: int
    nbytes: int
    first: int
    """Its first unit."""
    units: int
    open: bool = True
    """Whether slots in it are allocated."""
    lane: int = 0
    """Ranges of one lane share a device."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The n pages of a tier at one moment, ascending by address."""

    address: Int64s
    """[n] where each begins."""
    nbytes: Int64s
    """[n] bytes of each."""
    slot_bytes: Int64s
    """[n] bytes of its slots, EMPTY or IRREGULAR."""
    used_slots: Int64s
    """[n] slots that are taken."""
    used_bytes: Int64s
    """[n] bytes that are taken."""
    is_open: Bools
    """[n] whether its free slots are allocated."""
    groups: Int64s
    """[n] the page-sized stretch of the grid that it lies in: pages with one number become one page when all are
    empty; see `group_bytes`."""

    def __len__(self) -> int:
        return len(self.nbytes)


class Entries:
    """The columns of a table for access by entry, in a third of numpy's time."""

    __slots__ = _COLUMNS

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, column in columns.items():
            setattr(self, name, memoryview(column))  # type: ignore[arg-type]

    address: memoryview[int]
    count: memoryview[int]
    end: memoryview[int]
    group: memoryview[int]
    head: memoryview[int]
    length: memoryview[int]
    open: memoryview[int]
    slot: memoryview[int]
    used: memoryview[int]


class PageTable:
    """Ranges and their pages. After `add`, `remove` and changes of a range's `open` the caller calls `cut`."""

    def __init__(self, unit_shift: int, page_bytes: int) -> None:
        """Without a range; units have `1 << unit_shift` bytes, pages `page_bytes`."""
        self.page_bytes = page_bytes
        """Bytes of a page at present."""
        self.ranges: list[Range] = []
        self.starts: list[int] = []  # of the ranges
        self._shift = unit_shift
        # By unit, ascending by address:
        self.address, self.end = np.zeros((2, 0), np.int64)  # of the unit
        self.group = np.zeros(0, np.int64)  # first unit of the page-sized stretch of the grid that it lies in
        self.open = np.zeros(0, np.bool_)
        self.head = np.zeros(0, np.int64)  # first unit of its page
        # By unit, but 0 or None at units that do not begin a page:
        self.length = np.zeros(0, np.int64)  # bytes of the page
        self.slot = np.zeros(0, np.int64)  # bytes of its slots, EMPTY or IRREGULAR
        self.count = np.zeros(0, np.int64)  # slots that it has
        self.used = np.zeros(0, np.int64)  # slots that are taken
        self.taken: list[bytearray | dict[int, int] | None] = []  # slot -> 1; of an irregular page offset -> bytes
        self.one = self._entries()
        self._numbered: tuple[Int64s, Int64s] | None = None  # see `_numbers`

    # -- ranges -------------------------------------------------------------------------------------------------

    def add(self, start: int, nbytes: int, lane: int = 0) -> None:
        """Add a range of a lane, behind all others.

        Raises:
            MemoryMisuseError: it is empty, or begins before the end of another.
        """
        end = self.ranges[-1].start + self.ranges[-1].nbytes if self.ranges else 0
        if nbytes <= 0 or start < end:
            raise MemoryMisuseError(f"a range of {nbytes} bytes at {start} cannot follow what ends at {end}")
        units = -(-nbytes >> self._shift)
        addresses = start + (np.arange(units, dtype=np.int64) << self._shift)
        ends = np.minimum(addresses + (1 << self._shift), start + nbytes)
        self.ranges.append(Range(start, nbytes, len(self.head), units, lane=lane))
        self.starts.append(start)
        fresh = np.zeros(units, np.int64)
        self.address = np.concatenate([self.address, addresses])
        self.end = np.concatenate([self.end, ends])
        self.head = np.concatenate([self.head, np.arange(units, dtype=np.int64) + len(self.head)])
        self.length, self.slot, self.count, self.used = (
            np.concatenate([column, fresh]) for column in (self.length, self.slot, self.count, self.used)
        )
        self.taken += [None] * units

    def remove(self, start: int) -> None:
        """Remove the range that begins at `start`.

        Raises:
            MemoryMisuseError: there is none, or slots of it are taken.
        """
        at = self.range_at(start)
        gone = self.ranges[at]
        units = slice(gone.first, gone.first + gone.units)
        if self.used[units].any():
            raise MemoryMisuseError(f"{self.used_in(start)} bytes of the range at {start} are taken; free them first")
        del self.ranges[at], self.starts[at], self.taken[units]
        for later in self.ranges[at:]:
            later.first -= gone.units
        self.head = np.concatenate([self.head[: gone.first], self.head[units.stop :] - gone.units])
        self.address, self.end, self.length, self.slot, self.count, self.used = (
            np.concatenate([column[: gone.first], column[units.stop :]])
            for column in (self.address, self.end, self.length, self.slot, self.count, self.used)
        )

    def range_at(self, start: int) -> int:
        """The position in `ranges` of the range that begins at `start`.

        Raises:
            MemoryMisuseError: no range begins there.
        """
        at = bisect_left(self.starts, start)
        if at == len(self.starts) or self.starts[at] != start:
            raise MemoryMisuseError(f"no range begins at {start}; name one that was added")
        return at

    def used_in(self, start: int) -> int:
        """Bytes taken in the range that begins at `start`.

        Raises:
            MemoryMisuseError: no range begins there.
        """
        found = self.ranges[self.range_at(start)]
        units = slice(found.first, found.first + found.units)
        regular = self.slot[units] > 0
        nbytes = int((self.used[units] * self.slot[units])[regular].sum())
        for page in np.flatnonzero(self.slot[units] == IRREGULAR).tolist():
            nbytes += sum(self.irregular(found.first + page).values())
        return nbytes

    # -- the grid -----------------------------------------------------------------------------------------------

    def cut(self, page_bytes: int) -> None:
        """Cut all free space along a grid of pages of `page_bytes`, a multiple of the unit."""
        self.page_bytes = page_bytes
        self._numbered = None
        units = np.arange(len(self.head), dtype=np.int64)
        if not len(units):
            self.group, self.open = units, np.zeros(0, np.bool_)
        else:
            firsts, sizes = [each.first for each in self.ranges], [each.units for each in self.ranges]
            first = np.repeat(np.array(firsts, np.int64), sizes)
            self.open = np.repeat(np.array([each.open for each in self.ranges], np.bool_), sizes)
            step = page_bytes >> self._shift
            self.group = first + (units - first) // step * step
            taken = self.slot[self.head] != EMPTY
            begins = units == self.group
            begins[1:] |= taken[:-1]
            self.head = np.maximum.accumulate(np.where(taken, self.head, np.where(begins, units, 0)))
            heads = np.flatnonzero(self.head == units)
            self.length[:] = 0
            self.length[heads] = self.end[np.append(heads[1:], len(units)) - 1] - self.address[heads]
        self.one = self._entries()

    def is_whole(self, page: int) -> bool:
        """Whether a page is exactly a page-sized stretch of the grid."""
        end = self.units_end(page)
        begin, stop = self.one.group[page], self.group_end(end - 1)
        return (begin, stop) == (page, end) and self.one.group[end - 1] == page

    def cut_around(self, page: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Join and cut free space in the stretches of the grid that a page touches, as `cut` does everywhere.

        Returns:
            The empty pages (page, bytes) that this removed, `page` itself included, and those that it made.
        """
        self._numbered = None
        begin, stop = self.one.group[page], self.group_end(self.units_end(page) - 1)
        unit = begin
        gone: list[tuple[int, int]] = []
        runs: list[tuple[int, int]] = []
        while unit < stop:
            head = self.one.head[unit]
            end = min(self.units_end(head), stop)
            if self.one.slot[head] == EMPTY:
                gone.append((head, self.one.length[head]))
                self.length[head] = 0
                for first, last in self._by_group(unit, end):
                    if runs and runs[-1][1] == first and self.one.group[runs[-1][0]] == self.one.group[first]:
                        runs[-1] = runs[-1][0], last
                    else:
                        runs.append((first, last))
            unit = end
        made = []
        for first, last in runs:
            self.head[first:last] = first
            length = self.one.end[last - 1] - self.one.address[first]
            self.length[first] = length
            made.append((first, length))
        return gone, made

    def units_end(self, page: int) -> int:
        """The unit after the last of a page."""
        return page + (-(-self.one.length[page] >> self._shift))

    def group_end(self, unit: int) -> int:
        """The unit after the last of the page-sized stretch that `unit` lies in."""
        at = bisect_right(self.starts, self.one.address[unit]) - 1
        stop = self.ranges[at].first + self.ranges[at].units
        return min(self.one.group[unit] + (self.page_bytes >> self._shift), stop)

    # -- finding ------------------------------------------------------------------------------------------------

    def find(self, offset: int) -> int | None:
        """The page that an offset lies in; None outside the ranges."""
        at = bisect_right(self.starts, offset) - 1
        if at < 0:
            return None
        found = self.ranges[at]
        inside = offset - found.start
        return self.one.head[found.first + (inside >> self._shift)] if inside < found.nbytes else None

    def lane_of(self, offset: int) -> int | None:
        """The lane of the range that an offset lies in; None outside the ranges."""
        at = bisect_right(self.starts, offset) - 1
        if at < 0 or offset >= self.ranges[at].start + self.ranges[at].nbytes:
            return None
        return self.ranges[at].lane

    def first_in(self, pages: list[int], lane: int | None) -> int:
        """The position in `pages`, which are ascending and not empty, of the first in a lane; 0 if none is."""
        if lane is None:
            return 0
        for each in self.ranges:
            if each.lane == lane:
                at = bisect_left(pages, each.first)
                if at < len(pages) and pages[at] < each.first + each.units:
                    return at
        return 0

    def units_of(self, offsets: Int64s) -> Int64s:
        """The units that offsets lie in, [n].

        Raises:
            MemoryMisuseError: one of them is in no range.
        """
        if len(self.ranges) == 1 and len(offsets):
            only = self.ranges[0]
            if only.start <= offsets.min() and offsets.max() < only.start + only.nbytes:
                unit: Int64s = (offsets - only.start >> self._shift) + only.first
                return unit
            outside = (offsets < only.start) | (offsets >= only.start + only.nbytes)
        else:
            starts = np.array([each.start for each in self.ranges] or [0], np.int64)
            lengths = np.array([each.nbytes for each in self.ranges] or [0], np.int64)
            firsts = np.array([each.first for each in self.ranges] or [0], np.int64)
            at = np.maximum(np.searchsorted(starts, offsets, "right") - 1, 0)
            inside = offsets - starts[at]
            outside = (inside < 0) | (inside >= lengths[at])
            unit = firsts[at] + (inside >> self._shift)
            if not outside.any():
                return unit
        raise no_slot(int(offsets[np.argmax(outside)]))

    def units_between(self, offsets: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """The first and the last unit of slots, [n], ascending by offset.

        Raises:
            MemoryMisuseError: one of them is in no range, or reaches outside its range.
        """
        counts = np.diff(np.searchsorted(offsets, self.starts), append=len(offsets))
        before = len(offsets) - int(counts.sum())  # before the first range
        spread = [
            np.repeat(np.array(each, np.int64), counts)
            for each in zip(*((each.start, each.nbytes, each.first) for each in self.ranges), strict=True)
        ]
        if before or not spread:
            raise no_slot(int(offsets[0]))
        start, nbytes, first = spread
        inside = offsets - start
        if (outside := np.flatnonzero(inside >= nbytes)).size:
            raise no_slot(int(offsets[outside[0]]))
        if (outside := np.flatnonzero(inside + sizes > nbytes)).size:
            raise MemoryMisuseError(f"the slot at offset {offsets[outside[0]]} reaches outside its range")
        return (inside >> self._shift) + first, (inside + sizes - 1 >> self._shift) + first

    def taken_at(self, offset: int) -> tuple[int, int]:
        """The page of the taken slot at `offset`, and the slot's index in it: 0 in an irregular page.

        Raises:
            MemoryMisuseError: no slot begins there, or it is free.
        """
        page = self.find(offset)
        taken = None if page is None else self.taken[page]
        if page is None or taken is None:
            raise no_slot(offset)
        if isinstance(taken, dict):
            if offset not in taken:
                raise no_slot(offset)
            return page, 0
        index, inside = divmod(offset - self.one.address[page], self.one.slot[page])
        if inside or index >= len(taken):
            raise no_slot(offset)
        if not taken[index]:
            raise not_taken(offset)
        return page, index

    # -- state --------------------------------------------------------------------------------------------------

    def pages_of(self, offsets: Int64s) -> Int64s:
        """The pages that offsets lie in, [n]: positions in `pages()`.

        Raises:
            MemoryMisuseError: one of them is in no range.
        """
        return self._numbers()[1][self.units_of(offsets)]

    def pages(self) -> Pages:
        """All pages now, ascending by address. The time depends on the number of pages alone."""
        heads = self._numbers()[0]
        slots, used = self.slot[heads], self.used[heads]
        used_bytes = used * slots
        for number in np.flatnonzero(slots == IRREGULAR).tolist():
            used_bytes[number] = sum(self.irregular(heads.item(number)).values())
        return Pages(
            self.address[heads], self.length[heads], slots, used, used_bytes, self.open[heads], self.group[heads]
        )

    def group_bytes(self, groups: Int64s) -> Int64s:
        """Bytes [n] of the stretches that `Pages.groups` names: of the pages that they become when empty."""
        nbytes: Int64s = self.end[np.searchsorted(self.group, groups, "right") - 1] - self.address[groups]
        return nbytes

    def occupied(self, start: int | None = None) -> tuple[Int64s, Int64s]:
        """Offsets, ascending, and bytes of all taken slots, or of those in the range that begins at `start`.

        Raises:
            MemoryMisuseError: no range begins there.
        """
        first, stop = 0, len(self.head)
        if start is not None:
            only = self.ranges[self.range_at(start)]
            first, stop = only.first, only.first + only.units
        return self._occupied(first + np.flatnonzero(self.slot[first:stop]))

    def occupied_in(self, pages: Int64s) -> tuple[Int64s, Int64s]:
        """As `occupied`, of the slots in pages at these positions in `pages()`, ascending."""
        return self._occupied(self._numbers()[0][pages])

    def _occupied(self, heads: Int64s) -> tuple[Int64s, Int64s]:
        """As `occupied`, of the pages that begin at the units `heads`, ascending."""
        tables = [self.taken[unit] for unit in heads.tolist()]
        flags = np.frombuffer(b"".join(taken for taken in tables if isinstance(taken, bytearray)), np.uint8)
        pages = heads[self.slot[heads] > 0]
        counts = self.count[pages]
        index = np.arange(len(flags)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes = np.repeat(self.slot[pages], counts)
        taken = flags == 1
        offsets = (np.repeat(self.address[pages], counts) + index * sizes)[taken]
        sizes = sizes[taken]
        if odd := [taken for taken in tables if isinstance(taken, dict)]:
            count = sum(map(len, odd))
            more = np.fromiter(chain.from_iterable(odd), np.int64, count)
            their = np.fromiter(chain.from_iterable(taken.values() for taken in odd), np.int64, count)
            offsets, sizes = np.concatenate([offsets, more]), np.concatenate([sizes, their])
            order = np.argsort(offsets)
            offsets, sizes = offsets[order], sizes[order]
        return offsets, sizes

    def irregular(self, page: int) -> dict[int, int]:
        """The slots of an irregular page, bytes by offset; empty for another page."""
        taken = self.taken[page]
        return taken if isinstance(taken, dict) else {}

    # -- all of it ----------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Make every slot free; call `cut` after it."""
        for column in (self.slot, self.count, self.used):
            column[:] = 0
        self.taken = [None] * len(self.head)

    def copy(self) -> PageTable:
        """A copy with the same slots taken. Takes a microsecond a page."""
        other = shallow_copy(self)
        for name in _COLUMNS:
            setattr(other, name, getattr(self, name).copy())
        other.ranges = [replace(each) for each in self.ranges]
        other.starts = [*self.starts]
        other.taken = [None if taken is None else taken.copy() for taken in self.taken]
        other.one = other._entries()
        return other

    def check_integrity(self) -> None:
        """Check that pages cover every range once, and agree with their slots.

        Raises:
            IntegrityError: they do not.
        """
        units = np.arange(len(self.head))
        heads = np.flatnonzero(self.head == units)
        for each in self.ranges:
            mine = heads[(heads >= each.first) & (heads < each.first + each.units)]
            ends = self.address[mine] + self.length[mine]
            starts = np.append(self.address[mine], each.start + each.nbytes)
            if starts[0] != each.start or (starts[1:] != ends).any():
                raise IntegrityError(f"pages do not cover the range at {each.start} once")
        others = self.head != units
        for column in (self.length, self.slot, self.count, self.used):
            if column[others].any():
                raise IntegrityError(f"entry {np.flatnonzero(others & (column != 0))[0]} is no page and has figures")
        for page in heads.tolist():
            self._check_page(page)

    def _check_page(self, page: int) -> None:
        taken, slot, length = self.taken[page], self.one.slot[page], self.one.length[page]
        count = used = 0
        good = taken is None and slot == EMPTY
        if isinstance(taken, bytearray):
            count, used = len(taken), taken.count(1)
            good = used > 0 and slot > 0 and count == length // slot
        elif taken is not None:
            count = used = len(taken)
            slots = sorted(taken.items())
            ends = [self.one.address[page], *(offset + size for offset, size in slots)]
            starts = [*(offset for offset, _ in slots), ends[0] + length]
            good = used > 0 and slot == IRREGULAR and all(map(le, ends, starts))
        found = self.one.count[page], self.one.used[page]
        if not good or found != (count, used):
            raise IntegrityError(
                f"page {page} of {length} bytes with slots of {slot} has {count} slots, {used} of them taken; "
                f"{found[0]} and {found[1]} are counted"
            )

    def _numbers(self) -> tuple[Int64s, Int64s]:
        """The first unit of each page, and by unit the position of its page among them."""
        if self._numbered is None:
            is_head = self.head == np.arange(len(self.head))
            self._numbered = np.flatnonzero(is_head), np.cumsum(is_head) - 1
        return self._numbered

    def _by_group(self, unit: int, end: int) -> Iterator[tuple[int, int]]:
        while unit < end:
            stop = min(self.group_end(unit), end)
            yield unit, stop
            unit = stop

    def _entries(self) -> Entries:
        return Entries({name: getattr(self, name) for name in _COLUMNS})


def no_slot(offset: int) -> MemoryMisuseError:
    """The error for an offset where no slot begins."""
    return MemoryMisuseError(f"no slot begins at offset {offset}; free what `allocate` returned")


def not_taken(offset: int) -> MemoryMisuseError:
    """The error for a slot that is free already."""
    return MemoryMisuseError(f"the slot at offset {offset} is not taken; free a slot once")
