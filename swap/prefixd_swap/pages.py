"""Large pages that are cut into slots of any size: the accounting that the CPU arena and the slab files share.

A tier is one or more ranges of addresses (the arena is one, each slab file is one), cut into large pages of one size. A
page has slots of one size at a time, until its last slot is free; then any size can have it (Jenga, section 4):

    range   |<------ page ------>|<------ page ------>|<------ page ------>|<- page ->|   the last one may be shorter
    slots   [4K][4K][  ][4K][  ]..[   96K   ][   96K   ].       empty       [4K][4K]..
    units   |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |

Pages begin and end at units (`page_size`). When a size arrives for which the page size is changed, nothing moves: what
is free is cut anew along the new grid, and pages with slots stay as they are until they are empty. A stretch of the
grid that has such pages is mixed; its free runs of units are short pages, which sizes that fit may use:

    old grid   |4K |   |4K |   |   |   |   |   |
    new grid   |4K |run|4K |run|     page      |     when both 4K pages are empty, the first half is one page too

`allocate` takes, in this order (Jenga, section 5.4, has its steps 3 and 4 the other way round):

1. a free slot in the page of `near`, a slot of the same prefix, so that a prefix lies together and leaves together;
2. an empty page, while the free slots inside pages are less than 1/128 of the capacity in all;
3. any free slot of the size;
4. an empty page.

Nothing is evicted here. Where `allocate` gives None, the caller evicts what `page_eviction.choose_victims` names (whole
pages, Jenga's step 3, or single slots of the same size, its step 5), frees it, and allocates again. Any free slot comes
before an eviction: in Jenga's order, each prefix would evict a page for itself while slots in the pages of others are
free, and a full tier would hold less and less. **Making room for n bytes evicts at most n plus one page**: an emptied
page serves any size, and with single slots exactly what was asked for is evicted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import copy as shallow_copy
from dataclasses import dataclass, replace
from operator import le
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.page_size import SHARE, choose_page_bytes, unit_bytes
from prefixd_swap.slots import round_to_slot

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_SPREAD_SHARE = 128
_FEW = 16
"""So many slots are freed sooner one by one than as arrays."""
_MAX_SIZES = 64
"""When so many sizes were asked for, those without a page are forgotten."""
EMPTY = 0
IRREGULAR = -1
"""A page of slots of several sizes, or not side by side, as a restart may find them: no slot of it is given out."""


@dataclass(slots=True)
class _Range:
    start: int
    nbytes: int
    first: int  # its first unit
    units: int
    open: bool = True


@dataclass(frozen=True, slots=True)
class Pages:
    """The n pages of an allocator at one moment, ascending by address."""

    nbytes: Int64s
    """[n] bytes of each."""
    slot_bytes: Int64s
    """[n] bytes of its slots, EMPTY or IRREGULAR."""
    used_slots: Int64s
    """[n] slots that are taken."""
    used_bytes: Int64s
    """[n] bytes that are taken."""
    is_open: Bools
    """[n] whether its slots are given out once they are free."""
    groups: Int64s
    """[n] which page it becomes a part of when all in that page is free: a number to compare, see `group_bytes`."""

    def __len__(self) -> int:
        return len(self.nbytes)


class _Entries:
    """The columns of an allocator for access by entry, which takes a third of the time that numpy takes."""

    __slots__ = ("address", "count", "end", "group", "head", "length", "open", "slot", "used")

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


class PageAllocator:
    """Slots of any size in large pages. Not thread-safe.

    Offsets are addresses in the ranges. A page is named by the number of its first unit, which is good until a range is
    added or removed or the page changes hands.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Without a range yet. The page size depends on `capacity_bytes`, what the ranges may have together."""
        self.capacity_bytes = capacity_bytes
        self.page_bytes = choose_page_bytes((), capacity_bytes)
        """Bytes of a page as it is cut now."""
        self.used_bytes = 0
        """Bytes of all slots that are taken."""
        self._shift = unit_bytes(capacity_bytes).bit_length() - 1
        self._ranges: list[_Range] = []
        self._starts: list[int] = []  # of the ranges
        self._sizes: set[int] = set()  # that the page size was chosen for
        # By unit, ascending by address:
        self._address, self._end = np.zeros((2, 0), np.int64)  # of the unit
        self._group = np.zeros(0, np.int64)  # first unit of the page-sized stretch of the grid that it lies in
        self._open = np.zeros(0, np.bool_)
        self._head = np.zeros(0, np.int64)  # first unit of its page; what follows holds at such units only
        self._length = np.zeros(0, np.int64)  # bytes of the page
        self._slot = np.zeros(0, np.int64)  # bytes of its slots, EMPTY or IRREGULAR
        self._count = np.zeros(0, np.int64)  # slots that it has
        self._used = np.zeros(0, np.int64)  # slots that are taken
        self._taken: list[bytearray | dict[int, int] | None] = []  # slot -> 1; of an irregular page offset -> bytes
        self._one = self._entries()
        self._numbered: tuple[Int64s, Int64s] | None = None  # see `_numbers`
        # Pages of open ranges that can be used, ascending, and their free slots:
        self._empty: dict[int, list[int]] = {}  # bytes of the page -> pages
        self._partial: dict[int, list[int]] = {}  # bytes of a slot -> pages
        self._free: Counter[int] = Counter()  # bytes of a slot -> free slots
        self._free_bytes = 0  # of these
        self._pages_of_size: Counter[int] = Counter()  # bytes of a slot -> pages, those of closed ranges too

    # -- ranges -------------------------------------------------------------------------------------------------

    def add(self, start: int, nbytes: int) -> None:
        """Take in a range, behind all others.

        Raises:
            MemoryMisuseError: it is empty, or begins before the end of another.
        """
        end = self._ranges[-1].start + self._ranges[-1].nbytes if self._ranges else 0
        if nbytes <= 0 or start < end:
            raise MemoryMisuseError(f"a range of {nbytes} bytes at {start} cannot follow what ends at {end}")
        units = -(-nbytes >> self._shift)
        addresses = start + (np.arange(units, dtype=np.int64) << self._shift)
        ends = np.minimum(addresses + (1 << self._shift), start + nbytes)
        self._ranges.append(_Range(start, nbytes, len(self._head), units))
        self._starts.append(start)
        fresh = np.zeros(units, np.int64)
        self._address = np.concatenate([self._address, addresses])
        self._end = np.concatenate([self._end, ends])
        self._head = np.concatenate([self._head, np.arange(units, dtype=np.int64) + len(self._head)])
        self._length, self._slot, self._count, self._used = (
            np.concatenate([column, fresh]) for column in (self._length, self._slot, self._count, self._used)
        )
        self._taken += [None] * units
        self._rebuild()

    def remove(self, start: int) -> None:
        """Let go of the range that begins at `start`.

        Raises:
            MemoryMisuseError: there is none, or slots of it are taken.
        """
        at = self._range_at(start)
        gone = self._ranges[at]
        units = slice(gone.first, gone.first + gone.units)
        if self._used[units].any():
            raise MemoryMisuseError(f"{self.used_in(start)} bytes of the range at {start} are taken; free them first")
        del self._ranges[at], self._starts[at], self._taken[units]
        for later in self._ranges[at:]:
            later.first -= gone.units
        self._head = np.concatenate([self._head[: gone.first], self._head[units.stop :] - gone.units])
        self._address, self._end, self._length, self._slot, self._count, self._used = (
            np.concatenate([column[: gone.first], column[units.stop :]])
            for column in (self._address, self._end, self._length, self._slot, self._count, self._used)
        )
        self._rebuild()

    def close(self, start: int) -> None:
        """Give out no more slots of the range that begins at `start`; those that are taken can be freed.

        Raises:
            MemoryMisuseError: there is none.
        """
        self._ranges[self._range_at(start)].open = False
        self._rebuild()

    def reopen(self) -> None:
        """Give out slots of closed ranges again."""
        for each in self._ranges:
            each.open = True
        self._rebuild()

    def used_in(self, start: int) -> int:
        """Bytes taken in the range that begins at `start`.

        Raises:
            MemoryMisuseError: there is none.
        """
        found = self._ranges[self._range_at(start)]
        units = slice(found.first, found.first + found.units)
        regular = self._slot[units] > 0
        nbytes = int((self._used[units] * self._slot[units])[regular].sum())
        for page in np.flatnonzero(self._slot[units] == IRREGULAR).tolist():
            nbytes += sum(self._irregular(found.first + page).values())
        return nbytes

    def ranges(self) -> list[tuple[int, int, bool]]:
        """Start, bytes, and whether slots are given out, of every range."""
        return [(each.start, each.nbytes, each.open) for each in self._ranges]

    # -- allocation ---------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, near: int | None = None) -> int | None:
        """Offset of a free slot for `nbytes` bytes, now taken; None when there is no room for this size.

        Args:
            nbytes: rounded up to 4096.
            near: offset of another slot of the same prefix; one that is in no range any more does no harm.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
        """
        slot = round_to_slot(nbytes)
        page = self._choose(slot, near)
        if page is None:
            return None
        taken = self._taken[page]
        index = taken.find(0) if isinstance(taken, bytearray) else -1
        if index < 0 or not isinstance(taken, bytearray):
            raise IntegrityError(f"page {page} is listed as one with a free slot of {slot} bytes and has none")
        taken[index] = 1
        self._count_taken(page, slot, 1)
        return self._one.address[page] + index * slot

    def allocate_many(self, nbytes: int, count: int, near: int | None = None) -> Int64s | None:
        """Offsets [count] of slots as by `allocate`, side by side where possible; None, and no change, when there is no
        room for all.

        Raises:
            MemoryMisuseError: as `allocate`.
        """
        slot = round_to_slot(nbytes)
        if self.room(slot) < count:
            return None
        offsets = [np.zeros(0, np.int64)]
        while count > 0:
            page = self._choose_partial(slot, near)
            if page is None and len(whole := self._take_pages(slot, count)):
                offsets.append(whole)
                count -= len(whole)
                near = whole.item(-1)
                continue
            if page is None:
                page = self._choose(slot, None)
            taken = None if page is None else self._taken[page]
            if page is None or not isinstance(taken, bytearray):
                raise IntegrityError(f"{count} slots of {slot} bytes are counted as free and are not found")
            flags = np.frombuffer(taken, np.uint8)
            index = np.flatnonzero(flags == 0)[:count]
            if not len(index):
                raise IntegrityError(f"page {page} is listed as one with a free slot of {slot} bytes and has none")
            flags[index] = 1
            self._count_taken(page, slot, len(index))
            offsets.append(self._address[page] + index * slot)
            count -= len(index)
            near = offsets[-1].item(-1)
        return np.concatenate(offsets)

    def free(self, offset: int) -> None:
        """Make the slot at `offset` free.

        Raises:
            MemoryMisuseError: no slot begins there, or it is free already.
        """
        page, index = self._taken_at(offset)
        taken: Any = self._taken[page]
        if isinstance(taken, dict):
            self._count_freed(page, taken.pop(offset))
        else:
            taken[index] = 0
            self._count_freed(page, self._one.slot[page])

    def free_many(self, offsets: Int64s) -> None:
        """Make the slots at `offsets` [n] free, or none of them where an error is raised.

        Raises:
            MemoryMisuseError: no slot begins at one of them, or it is free already, or given twice.
        """
        if len(offsets) <= _FEW:
            few = offsets.tolist()
            for offset in few:
                self._taken_at(offset)
            if len(set(few)) < len(few):
                raise _not_taken(max(few, key=few.count))
            for offset in few:
                self.free(offset)
            return
        pages = self._head[self._units_of(offsets)]
        slots = self._slot[pages]
        index, inside = np.divmod(offsets - self._address[pages], np.where(slots > 0, slots, 1))
        wrong = (slots == EMPTY) | ((slots > 0) & ((inside != 0) | (index >= self._count[pages])))
        if wrong.any():
            raise _no_slot(int(offsets[np.argmax(wrong)]))
        order = np.sort(offsets)
        if (again := np.flatnonzero(order[1:] == order[:-1])).size:
            raise _not_taken(int(order[again[0]]))
        odd = offsets[slots == IRREGULAR].tolist()
        for page, offset in zip(pages[slots == IRREGULAR].tolist(), odd, strict=True):
            if offset not in self._irregular(page):
                raise _no_slot(offset)
        if odd:
            pages, index, offsets, slots = (each[slots != IRREGULAR] for each in (pages, index, offsets, slots))
        places = pages.tolist(), index.tolist()
        taken: list[Any] = self._taken
        for page, at in zip(*places, strict=True):
            if not taken[page][at]:
                raise _not_taken(self._one.address[page] + at * self._one.slot[page])
        for page, at in zip(*places, strict=True):
            taken[page][at] = 0
        touched, freed = np.unique(pages, return_counts=True)
        self._count_all_freed(touched, freed)
        for offset in odd:
            self.free(offset)

    def clear(self) -> None:
        """Make every slot free."""
        self.used_bytes = 0
        for column in (self._slot, self._count, self._used):
            column[:] = 0
        self._taken = [None] * len(self._head)
        self._rebuild()

    def claim(self, offsets: Int64s, sizes: Int64s) -> None:
        """Take these very slots, as they were before a restart. Nothing may be taken yet.

        They may lie across pages, and pages may have slots of several sizes. Such a page gives out no slot until it is
        empty.

        Args:
            offsets: int64 [n], in any order.
            sizes: int64 [n], bytes, multiples of 4096.

        Raises:
            MemoryMisuseError: slots are taken; or these overlap, or reach outside a range.
        """
        if self.slots_used:
            raise MemoryMisuseError(f"{self.slots_used} slots are taken already; claim all at once, or clear first")
        if not len(offsets):
            return
        order = np.argsort(offsets, kind="stable")
        offsets, sizes = offsets[order], sizes[order]
        self._sizes = {size for size in np.unique(sizes).tolist() if size <= self.capacity_bytes}
        self.page_bytes = choose_page_bytes(self._sizes, self.capacity_bytes)
        self._rebuild()
        first, last = self._units_of(offsets), self._units_of(offsets + sizes - 1)
        if (wrong := np.flatnonzero(offsets[1:] < offsets[:-1] + sizes[:-1])).size:
            raise MemoryMisuseError(f"two slots have the bytes at offset {offsets[wrong[0] + 1]}; claim each byte once")
        at = np.searchsorted(self._starts, offsets, "right")
        if (outside := np.flatnonzero(at != np.searchsorted(self._starts, offsets + sizes - 1, "right"))).size:
            raise MemoryMisuseError(f"the slot at offset {offsets[outside[0]]} reaches outside its range")
        head, tail = self._pages_around(offsets, sizes, first, last)
        begins = np.flatnonzero(np.diff(head, prepend=-1))
        page, end = head[begins], np.maximum.reduceat(tail, begins)
        counts = np.diff(begins, append=len(head))
        size = sizes[begins]
        inside = offsets - np.repeat(self._address[page], counts)
        fits = (sizes == np.repeat(size, counts)) & (inside % sizes == 0)
        regular = np.logical_and.reduceat(fits, begins)
        length = self._end[end] - self._address[page]
        self._slot[page] = np.where(regular, size, IRREGULAR)
        self._count[page] = np.where(regular, length // size, counts)
        self._used[page] = counts
        units = end - page + 1
        self._head[:] = np.arange(len(self._head))
        covered = np.repeat(page - np.cumsum(units) + units, units) + np.arange(units.sum())
        self._head[covered] = np.repeat(page, units)
        self.used_bytes = int(sizes.sum())
        held = np.where(regular, self._count[page], 0)
        base = np.cumsum(held) - held
        flags = np.zeros(int(held.sum()), np.uint8)
        mine = np.repeat(regular, counts)
        flags[(np.repeat(base, counts) + inside // sizes)[mine]] = 1
        data = flags.tobytes()
        for where, at, count in zip(
            page[regular].tolist(), base[regular].tolist(), held[regular].tolist(), strict=True
        ):
            self._taken[where] = bytearray(data[at : at + count])
        bounds = np.append(begins, len(offsets))
        for number in np.flatnonzero(~regular).tolist():
            own = slice(bounds[number], bounds[number + 1])
            self._taken[page.item(number)] = dict(zip(offsets[own].tolist(), sizes[own].tolist(), strict=True))
        self._rebuild()

    # -- what there is ------------------------------------------------------------------------------------------

    @property
    def slots_used(self) -> int:
        """Slots that are taken."""
        return int(self._used.sum())

    def room(self, nbytes: int) -> int:
        """How many more slots for `nbytes` bytes each can be allocated now.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
        """
        slot = round_to_slot(nbytes)
        if not self._admit(slot):
            return 0
        return self._free[slot] + sum(len(pages) * (length // slot) for length, pages in self._empty.items())

    def slots_per_page(self, nbytes: int) -> int:
        """How many slots for `nbytes` bytes each one page has once it is empty; 0 for a size above the capacity.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
        """
        slot = round_to_slot(nbytes)
        return self.page_bytes // slot if self._admit(slot) else 0

    def allocated(self) -> Int64s:
        """Offsets of all slots that are taken, ascending."""
        return self.occupied()[0]

    def occupied(self, start: int | None = None) -> tuple[Int64s, Int64s]:
        """Offsets, ascending, and bytes of all slots that are taken, or those of the range that begins at `start`.

        Raises:
            MemoryMisuseError: there is none.
        """
        first, stop = 0, len(self._head)
        if start is not None:
            only = self._ranges[self._range_at(start)]
            first, stop = only.first, only.first + only.units
        tables = self._taken[first:stop]
        flags = np.frombuffer(b"".join(taken for taken in tables if isinstance(taken, bytearray)), np.uint8)
        pages = first + np.flatnonzero(self._slot[first:stop] > 0)
        counts = self._count[pages]
        index = np.arange(len(flags)) - np.repeat(np.cumsum(counts) - counts, counts)
        sizes = np.repeat(self._slot[pages], counts)
        taken = flags == 1
        offsets = (np.repeat(self._address[pages], counts) + index * sizes)[taken]
        sizes = sizes[taken]
        if odd := [slot for taken in tables if isinstance(taken, dict) for slot in taken.items()]:
            more = np.array(odd, np.int64)
            offsets, sizes = np.concatenate([offsets, more[:, 0]]), np.concatenate([sizes, more[:, 1]])
            order = np.argsort(offsets)
            offsets, sizes = offsets[order], sizes[order]
        return offsets, sizes

    def pages_of(self, offsets: Int64s) -> Int64s:
        """The pages that offsets lie in, [n]: positions in `pages()`.

        Raises:
            MemoryMisuseError: one of them is in no range.
        """
        return self._numbers()[1][self._units_of(offsets)]

    def pages(self) -> Pages:
        """All pages as they are now, ascending by address. Takes a time that grows with their number alone."""
        heads = self._numbers()[0]
        slots, used = self._slot[heads], self._used[heads]
        used_bytes = used * slots
        for number in np.flatnonzero(slots == IRREGULAR).tolist():
            used_bytes[number] = sum(self._irregular(heads.item(number)).values())
        return Pages(self._length[heads], slots, used, used_bytes, self._open[heads], self._group[heads])

    def group_bytes(self, groups: Int64s) -> Int64s:
        """Bytes of the pages that `Pages.groups` names, [n], once all in them is free."""
        nbytes: Int64s = self._end[np.searchsorted(self._group, groups, "right") - 1] - self._address[groups]
        return nbytes

    # -- integrity ----------------------------------------------------------------------------------------------

    def copy(self) -> PageAllocator:
        """Another one with the same slots taken, which a thread can look at. Takes a microsecond a page."""
        other = shallow_copy(self)
        for name in ("address", "end", "group", "open", "head", "length", "slot", "count", "used"):
            setattr(other, f"_{name}", getattr(self, f"_{name}").copy())
        other._ranges = [replace(each) for each in self._ranges]
        other._starts, other._sizes = [*self._starts], {*self._sizes}
        other._taken = [None if taken is None else taken.copy() for taken in self._taken]
        other._empty = {length: [*pages] for length, pages in self._empty.items()}
        other._partial = {slot: [*pages] for slot, pages in self._partial.items()}
        other._free, other._pages_of_size = self._free.copy(), self._pages_of_size.copy()
        other._one = other._entries()
        return other

    def check_integrity(self) -> None:
        """Pages cover every range once; counters and lists agree with the slots.

        Raises:
            IntegrityError: they do not.
        """
        units = np.arange(len(self._head))
        heads = np.flatnonzero(self._head == units)
        for each in self._ranges:
            mine = heads[(heads >= each.first) & (heads < each.first + each.units)]
            ends = self._address[mine] + self._length[mine]
            starts = np.append(self._address[mine], each.start + each.nbytes)
            if starts[0] != each.start or (starts[1:] != ends).any():
                raise IntegrityError(f"pages do not cover the range at {each.start} once")
        others = self._head != units
        for column in (self._length, self._slot, self._count, self._used):
            if column[others].any():
                raise IntegrityError(f"entry {np.flatnonzero(others & (column != 0))[0]} is no page and has figures")
        for page in heads.tolist():
            self._check_page(page)
        if (nbytes := int(self.pages().used_bytes.sum())) != self.used_bytes:
            raise IntegrityError(f"{nbytes} bytes are taken and {self.used_bytes} are counted")
        self._check_lists()

    def _check_page(self, page: int) -> None:
        taken, slot, length = self._taken[page], self._one.slot[page], self._one.length[page]
        count = used = 0
        good = taken is None and slot == EMPTY
        if isinstance(taken, bytearray):
            count, used = len(taken), taken.count(1)
            good = used > 0 and slot > 0 and count == length // slot
        elif taken is not None:
            count = used = len(taken)
            slots = sorted(taken.items())
            ends = [self._one.address[page], *(offset + size for offset, size in slots)]
            starts = [*(offset for offset, _ in slots), ends[0] + length]
            good = used > 0 and slot == IRREGULAR and all(map(le, ends, starts))
        found = self._one.count[page], self._one.used[page]
        if not good or found != (count, used):
            raise IntegrityError(
                f"page {page} of {length} bytes with slots of {slot} has {count} slots, {used} of them taken; "
                f"{found[0]} and {found[1]} are counted"
            )

    def _check_lists(self) -> None:
        columns = self._head, self._length, self._group, self._open
        lists = self._empty, self._partial, self._free, self._free_bytes, self._pages_of_size
        self._head, self._length = self._head.copy(), self._length.copy()
        self._rebuild()
        cut = self._head
        found = self._empty, self._partial, self._free, self._free_bytes, self._pages_of_size
        self._head, self._length, self._group, self._open = columns
        self._empty, self._partial, self._free, self._free_bytes, self._pages_of_size = lists
        self._one = self._entries()
        if (wrong := np.flatnonzero(cut != self._head)).size:
            raise IntegrityError(f"what is free at entry {wrong[0]} belongs to page {cut[wrong[0]]}")
        names = "empty pages", "pages with free slots", "free slots", "bytes of free slots", "pages by size"
        for name, have, want in zip(names, lists, found, strict=True):
            if have != want:  # two Counters are equal where one has a zero and the other nothing
                raise IntegrityError(f"the {name} are {want} and listed as {have}")

    # -- inside -------------------------------------------------------------------------------------------------

    def _choose(self, slot: int, near: int | None) -> int | None:
        """A page with a free slot of this size, by the steps that the module describes; None when there is none."""
        page = self._choose_partial(slot, near)
        if page is not None or not self._admit(slot):
            return page
        page = self._cut(slot)
        if page is None and slot in self._partial:
            return self._partial[slot][0]
        return page

    def _choose_partial(self, slot: int, near: int | None) -> int | None:
        """A page with taken and free slots of this size that comes before an empty one: steps 1 and 3."""
        if near is not None:
            page, one = self._find(near), self._one
            if page is not None and one.slot[page] == slot and one.used[page] < one.count[page] and one.open[page]:
                return page
        if self._free_bytes >= self.capacity_bytes // _SPREAD_SHARE and slot in self._partial:
            return self._partial[slot][0]
        return None

    def _admit(self, slot: int) -> bool:
        """Choose the page size anew if it was not chosen for this size; False for a size that can never fit."""
        if slot in self._sizes:
            return True
        if slot > self.capacity_bytes:
            return False
        if len(self._sizes) >= _MAX_SIZES:
            self._sizes = {size for size, pages in self._pages_of_size.items() if pages}
        self._sizes.add(slot)
        self._choose_page_bytes()
        return True

    def _choose_page_bytes(self) -> None:
        now = self.page_bytes if self.used_bytes else 1
        page_bytes = choose_page_bytes(self._sizes, self.capacity_bytes, now)
        if page_bytes != self.page_bytes:
            self.page_bytes = page_bytes
            self._rebuild()

    def _best_length(self, slot: int) -> int | None:
        """Of which empty pages slots are best cut: those with the smallest rest, of these the shortest."""
        return min(
            (length for length in self._empty if length >= slot),
            key=lambda length: (length % slot / length, length),
            default=None,
        )

    def _cut(self, slot: int) -> int | None:
        """Cut an empty page into slots, the lowest of those that are best for it; None when there is none."""
        length = self._best_length(slot)
        if length is None:
            return None
        page = self._empty[length][0]
        _remove(self._empty, length, page)
        count = length // slot
        self._one.slot[page] = slot
        self._one.count[page] = count
        self._taken[page] = bytearray(count)
        self._pages_of_size[slot] += 1
        self._free[slot] += count
        self._free_bytes += count * slot
        insort(self._partial.setdefault(slot, []), page)
        return page

    def _take_pages(self, slot: int, count: int) -> Int64s:
        """Take all slots of as many empty pages as `count` slots fill; their offsets."""
        length = self._best_length(slot)
        if length is None or count < length // slot:
            return np.zeros(0, np.int64)
        each = length // slot
        pages = self._empty[length][: count // each]
        del self._empty[length][: count // each]
        if not self._empty[length]:
            del self._empty[length]
        self._slot[pages] = slot
        self._count[pages] = self._used[pages] = each
        full = b"\1" * each
        for page in pages:
            self._taken[page] = bytearray(full)
        self._pages_of_size[slot] += len(pages)
        self.used_bytes += len(pages) * each * slot
        offsets: Int64s = self._address[pages][:, np.newaxis] + np.arange(each) * slot
        return offsets.ravel()

    def _count_taken(self, page: int, slot: int, count: int) -> None:
        """Count slots that were taken in a page that is listed as one with free slots."""
        used = self._one.used[page] + count
        self._one.used[page] = used
        self.used_bytes += count * slot
        self._free[slot] -= count
        self._free_bytes -= count * slot
        if used == self._one.count[page]:
            _remove(self._partial, slot, page)

    def _count_freed(self, page: int, nbytes: int) -> None:
        """Count a slot of `nbytes` that was freed in a page; an empty page can serve any size."""
        one, slot = self._one, self._one.slot[page]
        was_full = one.used[page] == one.count[page]
        one.used[page] -= 1
        self.used_bytes -= nbytes
        if slot == IRREGULAR:
            one.count[page] -= 1
        elif one.open[page]:
            self._free[slot] += 1
            self._free_bytes += nbytes
            if was_full:
                insort(self._partial.setdefault(slot, []), page)
        if not one.used[page]:
            self._vacate(page, slot)

    def _count_all_freed(self, pages: Int64s, freed: Int64s) -> None:
        """Count slots that were freed in pages, none of them irregular, `freed` of each."""
        before, slots = self._used[pages], self._slot[pages]
        self._used[pages] = before - freed
        self.used_bytes -= int((freed * slots).sum())
        was_full = before == self._count[pages]
        is_empty = before == freed
        for slot in np.unique(slots).tolist():
            mine = self._open[pages] & (slots == slot)
            self._free[slot] += int(freed[mine].sum())
            self._free_bytes += int(freed[mine].sum()) * slot
            if len(fresh := pages[mine & was_full]):
                listed = self._partial.setdefault(slot, [])
                listed += fresh.tolist()
                listed.sort()
        for page, slot in zip(pages[is_empty].tolist(), slots[is_empty].tolist(), strict=True):
            self._vacate(page, slot)

    def _vacate(self, page: int, slot: int) -> None:
        """Make a page without taken slots an empty one, as a part of its group."""
        is_open = self._one.open[page]
        if slot != IRREGULAR:
            self._pages_of_size[slot] -= 1
            if is_open:
                count = self._one.count[page]
                self._free[slot] -= count
                self._free_bytes -= count * slot
                _remove(self._partial, slot, page)
        self._slot[page] = EMPTY
        self._count[page] = 0
        self._taken[page] = None
        end = self._units_end(page)
        begin, stop = self._one.group[page], self._group_end(end - 1)
        if (begin, stop) != (page, end) or self._one.group[end - 1] != page:
            self._cut_anew(begin, stop)
        elif is_open:
            insort(self._empty.setdefault(self._one.length[page], []), page)
        if slot > self.capacity_bytes // SHARE and not self._pages_of_size[slot]:
            self._sizes.discard(slot)  # pages as large as it needed are a burden to the other sizes
            self._choose_page_bytes()

    def _cut_anew(self, begin: int, stop: int) -> None:
        """Join and cut the free units from `begin` to `stop`, whole groups of one range, as `_rebuild` would."""
        self._numbered = None
        is_open = self._one.open[begin]
        unit = begin
        runs: list[tuple[int, int]] = []
        while unit < stop:
            page = self._one.head[unit]
            end = min(self._units_end(page), stop)
            if self._one.slot[page] == EMPTY:
                if is_open:
                    _remove(self._empty, self._one.length[page], page, missing_ok=True)
                self._length[page] = 0
                for first, last in self._by_group(unit, end):
                    if runs and runs[-1][1] == first and self._one.group[runs[-1][0]] == self._one.group[first]:
                        runs[-1] = runs[-1][0], last
                    else:
                        runs.append((first, last))
            unit = end
        for first, last in runs:
            self._head[first:last] = first
            length = self._one.end[last - 1] - self._one.address[first]
            self._length[first] = length
            if is_open:
                insort(self._empty.setdefault(length, []), first)

    def _by_group(self, unit: int, end: int) -> Iterator[tuple[int, int]]:
        while unit < end:
            stop = min(self._group_end(unit), end)
            yield unit, stop
            unit = stop

    def _entries(self) -> _Entries:
        return _Entries(
            {
                "address": self._address,
                "end": self._end,
                "group": self._group,
                "open": self._open,
                "head": self._head,
                "length": self._length,
                "slot": self._slot,
                "count": self._count,
                "used": self._used,
            }
        )

    def _numbers(self) -> tuple[Int64s, Int64s]:
        """The first unit of each page, and by unit the position of its page among them."""
        if self._numbered is None:
            is_head = self._head == np.arange(len(self._head))
            self._numbered = np.flatnonzero(is_head), np.cumsum(is_head) - 1
        return self._numbered

    def _irregular(self, page: int) -> dict[int, int]:
        taken = self._taken[page]
        return taken if isinstance(taken, dict) else {}

    def _units_end(self, page: int) -> int:
        return page + (-(-self._one.length[page] >> self._shift))

    def _group_end(self, unit: int) -> int:
        at = bisect_right(self._starts, self._one.address[unit]) - 1
        stop = self._ranges[at].first + self._ranges[at].units
        return min(self._one.group[unit] + (self.page_bytes >> self._shift), stop)

    def _rebuild(self) -> None:
        """Cut what is free along the grid, and make all lists anew."""
        self._numbered = None
        units = np.arange(len(self._head), dtype=np.int64)
        if not len(units):
            self._group, self._open = units, np.zeros(0, np.bool_)
        else:
            firsts, sizes = [each.first for each in self._ranges], [each.units for each in self._ranges]
            first = np.repeat(np.array(firsts, np.int64), sizes)
            self._open = np.repeat(np.array([each.open for each in self._ranges], np.bool_), sizes)
            step = self.page_bytes >> self._shift
            self._group = first + (units - first) // step * step
            taken = self._slot[self._head] != EMPTY
            begins = units == self._group
            begins[1:] |= taken[:-1]
            self._head = np.maximum.accumulate(np.where(taken, self._head, np.where(begins, units, 0)))
            heads = np.flatnonzero(self._head == units)
            self._length[:] = 0
            self._length[heads] = self._end[np.append(heads[1:], len(units)) - 1] - self._address[heads]
        usable = self._open & (self._length > 0)
        self._empty = _lists(np.flatnonzero(usable & (self._slot == EMPTY)), self._length)
        self._partial = _lists(np.flatnonzero(usable & (self._slot > 0) & (self._used < self._count)), self._slot)
        self._free = Counter(
            {slot: int((self._count[pages] - self._used[pages]).sum()) for slot, pages in self._partial.items()}
        )
        self._free_bytes = sum(slot * count for slot, count in self._free.items())
        kinds, counts = np.unique(self._slot[self._slot > 0], return_counts=True)
        self._pages_of_size = Counter(dict(zip(kinds.tolist(), counts.tolist(), strict=True)))
        self._one = self._entries()

    def _pages_around(self, offsets: Int64s, sizes: Int64s, first: Int64s, last: Int64s) -> tuple[Int64s, Int64s]:
        """First and last unit of the page that each claimed slot is to be in; all ascending by offset.

        A stretch of the grid with slots of one size, side by side from its beginning, is one page. Elsewhere units that
        share a slot are one page.
        """
        group = self._group[first]
        begins = np.flatnonzero(np.diff(group, prepend=-1))
        counts = np.diff(begins, append=len(group))
        size = np.repeat(sizes[begins], counts)
        inside = offsets - self._address[group]
        fits = (sizes == size) & (inside % size == 0)
        across = self._group[last] != group
        whole = np.logical_and.reduceat(fits & ~across, begins)
        # What comes into a group from the one before spoils it too.
        whole &= ~np.isin(group[begins], self._group[last[across]])
        whole = np.repeat(whole, counts)
        reach = np.maximum.accumulate(last)
        fresh = np.ones(len(first), np.bool_)
        fresh[1:] = first[1:] > reach[:-1]
        head = np.maximum.accumulate(np.where(fresh, first, 0))
        stops = np.array([self._group_end(unit) - 1 for unit in np.unique(group[whole]).tolist()], np.int64)
        tail = last.copy()
        tail[whole] = stops[np.searchsorted(np.unique(group[whole]), group[whole])]
        return np.where(whole, group, head), tail

    def _taken_at(self, offset: int) -> tuple[int, int]:
        """The page of the slot that is taken at `offset`, and its index there: 0 in an irregular page.

        Raises:
            MemoryMisuseError: no slot begins there, or it is free.
        """
        page = self._find(offset)
        taken = None if page is None else self._taken[page]
        if page is None or taken is None:
            raise _no_slot(offset)
        if isinstance(taken, dict):
            if offset not in taken:
                raise _no_slot(offset)
            return page, 0
        index, inside = divmod(offset - self._one.address[page], self._one.slot[page])
        if inside or index >= len(taken):
            raise _no_slot(offset)
        if not taken[index]:
            raise _not_taken(offset)
        return page, index

    def _find(self, offset: int) -> int | None:
        """The page at an offset; None outside the ranges."""
        at = bisect_right(self._starts, offset) - 1
        if at < 0:
            return None
        found = self._ranges[at]
        inside = offset - found.start
        return self._one.head[found.first + (inside >> self._shift)] if inside < found.nbytes else None

    def _units_of(self, offsets: Int64s) -> Int64s:
        if len(self._ranges) == 1 and len(offsets):
            only = self._ranges[0]
            if only.start <= offsets.min() and offsets.max() < only.start + only.nbytes:
                unit: Int64s = (offsets - only.start >> self._shift) + only.first
                return unit
            outside = (offsets < only.start) | (offsets >= only.start + only.nbytes)
        else:
            starts = np.array([each.start for each in self._ranges] or [0], np.int64)
            lengths = np.array([each.nbytes for each in self._ranges] or [0], np.int64)
            firsts = np.array([each.first for each in self._ranges] or [0], np.int64)
            at = np.maximum(np.searchsorted(starts, offsets, "right") - 1, 0)
            inside = offsets - starts[at]
            outside = (inside < 0) | (inside >= lengths[at])
            unit = firsts[at] + (inside >> self._shift)
            if not outside.any():
                return unit
        raise _no_slot(int(offsets[np.argmax(outside)]))

    def _range_at(self, start: int) -> int:
        at = bisect_left(self._starts, start)
        if at == len(self._starts) or self._starts[at] != start:
            raise MemoryMisuseError(f"no range begins at {start}; name one that was added")
        return at


def _lists(pages: Int64s, column: Int64s) -> dict[int, list[int]]:
    """`pages`, ascending, by their values in `column`."""
    return {value: pages[column[pages] == value].tolist() for value in np.unique(column[pages]).tolist()}


def _remove(lists: dict[int, list[int]], key: int, page: int, *, missing_ok: bool = False) -> None:
    """Take `page` out of a sorted list, and the list out of `lists` when it is then empty."""
    pages = lists.get(key, [])
    at = bisect_left(pages, page)
    if at == len(pages) or pages[at] != page:
        if missing_ok:
            return
        raise IntegrityError(f"page {page} is not listed under {key}")
    del pages[at]
    if not pages:
        del lists[key]


def _no_slot(offset: int) -> MemoryMisuseError:
    return MemoryMisuseError(f"no slot begins at offset {offset}; free what `allocate` returned")


def _not_taken(offset: int) -> MemoryMisuseError:
    return MemoryMisuseError(f"the slot at offset {offset} is not taken; free a slot once")
