"""Large pages that are cut into slots of any size: the accounting that the CPU arena and the slab files share.

A tier is one or more ranges of addresses (the arena is one, each slab file is one), cut into large pages of one size. A
page has slots of one size until its last slot is free; then it serves any size (Jenga, section 4):

    range   |<------ page ------>|<------ page ------>|<------ page ------>|<- page ->|   the last one may be shorter
    slots   [4K][4K][  ][4K][  ]..[   96K   ][   96K   ].       empty       [4K][4K]..
    units   |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |  |

Pages begin and end at units (`page_size`); `page_table` has the pages. When a new slot size changes the page size,
nothing moves: free space is cut again along the new grid, and pages with slots stay as they are until they are empty. A
stretch of the grid that has old pages is mixed; its free runs of units are short pages, for sizes that fit into them:

    old grid   |4K |   |4K |   |   |   |   |   |
    new grid   |4K |run|4K |run|     page      |     when both 4K pages are empty, the first half is one page too

`allocate` takes, in this order (Jenga, section 5.4, has its steps 3 and 4 the other way round: `PageOrder`):

1. a free slot in the page of `near`, a slot of the same prefix, so that a prefix is stored together and freed together;
2. an empty page, while all free slots inside pages are less than 1/128 of the capacity;
3. any free slot of the size;
4. an empty page.

Slots of encoded parts, each of another size, are allocated by `allocate_mixed`, in pages of their own (`mixed_pages`).

Nothing is evicted here. When `allocate` returns None, the caller evicts the slots that `page_eviction.choose_victims`
chooses (whole pages, Jenga's step 3, or single slots of the same size, its step 5), or for mixed slots those that
`mixed_eviction.choose_mixed_victims` chooses, frees them, and allocates again.
Any free slot comes before an eviction: in Jenga's order, each prefix would evict a page for itself while pages of other
prefixes have free slots, and a full tier would hold less and less. **Making room for n bytes evicts at most n plus one
page**: an emptied page serves any size, and eviction of single slots evicts exactly n.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy as shallow_copy
from typing import Any

import numpy as np

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.pages.mixed_pages import MixedPages
from prefixd_swap.pages.page_claims import claim_slots
from prefixd_swap.pages.page_lists import PageLists
from prefixd_swap.pages.page_order import PageOrder
from prefixd_swap.pages.page_size import SHARE, choose_page_bytes, unit_bytes
from prefixd_swap.pages.page_table import (
    EMPTY,
    IRREGULAR,
    Bools,
    Int64s,
    Pages,
    PageTable,
    no_slot,
    not_taken,
)
from prefixd_swap.slots import round_to_slot

_SPREAD_SHARE = 128
_FEW = 16
"""Up to this number, freeing slots one by one is faster than freeing them as arrays."""
_MIXED_SLOTS, _FEW_MIXED_SLOTS = 16, 4
"""Slots that a mixed page should have: as many, or in a small tier a few, of which each is a large part."""
_SMALL_SHARE = 16
_MAX_SIZES = 64
"""At this number of sizes, sizes without a page are forgotten."""


class PageAllocator:
    """Slots of any size in large pages. Not thread-safe.

    Offsets are addresses in the ranges.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Without a range yet. `capacity_bytes`, the most bytes of all ranges, decides the page size."""
        self.capacity_bytes = capacity_bytes
        self.order = PageOrder.FEW_FREE
        self.used_bytes = 0
        """Bytes of all taken slots."""
        self._sizes: set[int] = set()  # the page size suits these slot sizes
        shift = unit_bytes(capacity_bytes).bit_length() - 1
        self._table = PageTable(shift, choose_page_bytes((), capacity_bytes))
        self._lists = PageLists()
        self._mixed = MixedPages()

    @property
    def page_bytes(self) -> int:
        """Bytes of a page at present."""
        return self._table.page_bytes

    # -- ranges -------------------------------------------------------------------------------------------------

    def add(self, start: int, nbytes: int, lane: int = 0) -> None:
        """As `PageTable.add`."""
        self.add_all([(start, nbytes, lane)])

    def add_all(self, ranges: Iterable[tuple[int, int, int]]) -> None:
        """As `add`, for start, bytes and lane of each, ascending: cuts them into pages once."""
        for start, nbytes, lane in ranges:
            self._table.add(start, nbytes, lane)
        self._cut_empty(self.page_bytes)

    def remove(self, start: int) -> None:
        """As `PageTable.remove`."""
        self._table.remove(start)
        self._cut(self.page_bytes)

    def close(self, start: int) -> None:
        """Allocate no more slots in the range that begins at `start`; its taken slots can still be freed.

        Raises:
            MemoryMisuseError: there is none.
        """
        self._table.ranges[self._table.range_at(start)].open = False
        self._cut(self.page_bytes)

    def reopen(self) -> None:
        """Allocate slots in closed ranges again."""
        for each in self._table.ranges:
            each.open = True
        self._cut(self.page_bytes)

    def lane_of(self, offset: int) -> int | None:
        """As `PageTable.lane_of`."""
        return self._table.lane_of(offset)

    def used_in(self, start: int) -> int:
        """As `PageTable.used_in`."""
        return self._table.used_in(start)

    def ranges(self) -> list[tuple[int, int, bool]]:
        """Start, bytes, and whether it is open, of every range."""
        return [(each.start, each.nbytes, each.open) for each in self._table.ranges]

    # -- allocation ---------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, near: int | None = None, lane: int | None = None) -> int | None:
        """Take a slot for `nbytes` bytes and return its offset; None when there is no room for this size.

        Args:
            nbytes: rounded up to 4096.
            near: offset of another slot of the same prefix; ignored if it is in no range any more.
            lane: of a page that is not the one of `near`; another lane if this one has no room, and any by default.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
        """
        slot = round_to_slot(nbytes)
        page = self._choose(slot, near, lane)
        if page is None:
            return None
        taken = self._table.taken[page]
        index = taken.find(0) if isinstance(taken, bytearray) else -1
        if index < 0 or not isinstance(taken, bytearray):
            raise IntegrityError(f"page {page} is listed as one with a free slot of {slot} bytes and has none")
        taken[index] = 1
        self._count_taken(page, slot, 1)
        return self._table.one.address[page] + index * slot

    def allocate_mixed(self, nbytes: int, near: int | None = None, lane: int | None = None) -> int | None:
        """Take a slot in a page with slots of any sizes and return its offset; None when there is no room.

        Args:
            nbytes: rounded up to 4096.
            near: offset of another slot of the same prefix; ignored if it is in no range any more.
            lane: as for `allocate`.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
        """
        slot, table = round_to_slot(nbytes), self._table
        page = self._mixed.choose(table, slot, None if near is None else table.find(near), lane)
        if page is None:
            page = self._open_mixed(slot, lane)
        if page is None and lane is not None:
            page = self._mixed.choose(table, slot, None, None)
        if page is None:
            return None
        offset, taken, one = self._mixed.take(table, page, slot), table.taken[page], table.one
        if not isinstance(taken, dict):
            raise IntegrityError(f"page {page} is listed as a mixed one and is none")
        taken[offset] = slot
        one.count[page] += 1
        one.used[page] += 1
        self.used_bytes += slot
        return offset

    def allocate_many(self, nbytes: int, count: int, near: int | None = None) -> Int64s | None:
        """Take `count` slots as `allocate` does, adjacent where possible, and return their offsets [count].

        None, and nothing is taken, when there is no room for all.

        Raises:
            MemoryMisuseError: as `allocate`.
        """
        slot = round_to_slot(nbytes)
        if self.room(slot, near) < count:
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
            taken = None if page is None else self._table.taken[page]
            if page is None or not isinstance(taken, bytearray):
                raise IntegrityError(f"{count} slots of {slot} bytes are counted as free and are not found")
            flags = np.frombuffer(taken, np.uint8)
            index = np.flatnonzero(flags == 0)[:count]
            if not len(index):
                raise IntegrityError(f"page {page} is listed as one with a free slot of {slot} bytes and has none")
            flags[index] = 1
            self._count_taken(page, slot, len(index))
            offsets.append(self._table.address[page] + index * slot)
            count -= len(index)
            near = offsets[-1].item(-1)
        return np.concatenate(offsets)

    def free(self, offset: int) -> None:
        """Make the slot at `offset` free.

        Raises:
            MemoryMisuseError: no slot begins there, or it is free already.
        """
        page, index = self._table.taken_at(offset)
        taken: Any = self._table.taken[page]
        if isinstance(taken, dict):
            self._mixed.give(page, offset, taken[offset])
            self._count_freed(page, taken.pop(offset))
        else:
            taken[index] = 0
            self._count_freed(page, self._table.one.slot[page])

    def free_many(self, offsets: Int64s) -> None:
        """Make the slots at `offsets` [n] free; none of them if this raises.

        Raises:
            MemoryMisuseError: no slot begins at one of them, or it is free already, or given twice.
        """
        if len(offsets) <= _FEW:
            few = offsets.tolist()
            for offset in few:
                self._table.taken_at(offset)
            if len(set(few)) < len(few):
                raise not_taken(max(few, key=few.count))
            for offset in few:
                self.free(offset)
            return
        pages = self._table.head[self._table.units_of(offsets)]
        slots = self._table.slot[pages]
        index, inside = np.divmod(offsets - self._table.address[pages], np.where(slots > 0, slots, 1))
        wrong = (slots == EMPTY) | ((slots > 0) & ((inside != 0) | (index >= self._table.count[pages])))
        if wrong.any():
            raise no_slot(int(offsets[np.argmax(wrong)]))
        order = np.sort(offsets)
        if (again := np.flatnonzero(order[1:] == order[:-1])).size:
            raise not_taken(int(order[again[0]]))
        odd = offsets[slots == IRREGULAR].tolist()
        for page, offset in zip(pages[slots == IRREGULAR].tolist(), odd, strict=True):
            if offset not in self._table.irregular(page):
                raise no_slot(offset)
        if odd:
            pages, index, offsets, slots = (each[slots != IRREGULAR] for each in (pages, index, offsets, slots))
        places = pages.tolist(), index.tolist()
        taken: list[Any] = self._table.taken
        for page, at in zip(*places, strict=True):
            if not taken[page][at]:
                raise not_taken(self._table.one.address[page] + at * self._table.one.slot[page])
        for page, at in zip(*places, strict=True):
            taken[page][at] = 0
        touched, freed = np.unique(pages, return_counts=True)
        self._count_all_freed(touched, freed)
        for offset in odd:
            self.free(offset)

    def clear(self) -> None:
        """Make every slot free."""
        self.used_bytes = 0
        self._table.clear()
        self._cut(self.page_bytes)

    def claim(self, offsets: Int64s, sizes: Int64s, mixed: Bools | None = None) -> None:
        """Take the slots that were taken before a restart. Nothing may be taken yet.

        Slots may lie across pages, and pages may have slots of several sizes. In such a page no slot is allocated until
        it is empty.

        Args:
            offsets: int64 [n], in any order.
            sizes: int64 [n], bytes, multiples of 4096.
            mixed: bool [n], which were allocated by `allocate_mixed`; none by default.

        Raises:
            MemoryMisuseError: slots are taken already; or the given slots overlap, or reach outside a range.
        """
        if self.slots_used:
            raise MemoryMisuseError(f"{self.slots_used} slots are taken already; claim all at once, or clear first")
        if not len(offsets):
            return
        if mixed is None:
            mixed = np.zeros(len(sizes), np.bool_)
        kinds = np.unique(sizes if not mixed.any() else sizes[~mixed])
        self._sizes = {size for size in kinds.tolist() if size <= self.capacity_bytes}
        self._cut(choose_page_bytes(self._sizes, self.capacity_bytes))
        claim_slots(self._table, offsets, sizes, mixed)
        self.used_bytes = int(sizes.sum())
        self._cut(self.page_bytes)

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def slots_used(self) -> int:
        """Slots that are taken."""
        return int(self._table.used.sum())

    def room(self, nbytes: int, near: int | None = None) -> int:
        """Number of slots for `nbytes` bytes each that can be allocated now, with this `near`.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
        """
        slot = round_to_slot(nbytes)
        if not self._admit(slot):
            return 0
        if self.order is PageOrder.OWN:
            page, one = self._near(slot, near), self._table.one
            own = 0 if page is None else one.count[page] - one.used[page]
            return self._lists.room(slot) - self._lists.free[slot] + own
        return self._lists.room(slot)

    def slots_per_page(self, nbytes: int) -> int:
        """Slots for `nbytes` bytes each in an empty page; 0 for a size above the capacity.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
        """
        slot = round_to_slot(nbytes)
        return self.page_bytes // slot if self._admit(slot) else 0

    def allocated(self) -> Int64s:
        """Offsets of all taken slots, ascending."""
        return self.occupied()[0]

    def occupied(self, start: int | None = None) -> tuple[Int64s, Int64s]:
        """As `PageTable.occupied`."""
        return self._table.occupied(start)

    def occupied_in(self, pages: Int64s) -> tuple[Int64s, Int64s]:
        """As `PageTable.occupied_in`."""
        return self._table.occupied_in(pages)

    def pages_of(self, offsets: Int64s) -> Int64s:
        """As `PageTable.pages_of`."""
        return self._table.pages_of(offsets)

    def pages(self) -> Pages:
        """As `PageTable.pages`."""
        return self._table.pages()

    def group_bytes(self, groups: Int64s) -> Int64s:
        """As `PageTable.group_bytes`."""
        return self._table.group_bytes(groups)

    # -- integrity ----------------------------------------------------------------------------------------------

    def copy(self) -> PageAllocator:
        """A copy with the same slots taken, which a thread can read. Takes a microsecond a page."""
        other = shallow_copy(self)
        other._sizes = {*self._sizes}
        other._table, other._lists = self._table.copy(), self._lists.copy()
        other._mixed = MixedPages()
        other._mixed.rebuild(other._table)
        return other

    def check_integrity(self) -> None:
        """Check that pages cover every range once, and that counters and lists agree with the slots.

        Raises:
            IntegrityError: they do not.
        """
        self._table.check_integrity()
        if (nbytes := int(self._table.pages().used_bytes.sum())) != self.used_bytes:
            raise IntegrityError(f"{nbytes} bytes are taken and {self.used_bytes} are counted")
        anew = self._table.copy()
        anew.cut(self.page_bytes)
        if (wrong := np.flatnonzero(anew.head != self._table.head)).size:
            raise IntegrityError(f"the free unit {wrong[0]} belongs to page {anew.head[wrong[0]]}")
        self._lists.check_integrity(anew)
        self._mixed.check_integrity(anew)

    # -- inside -------------------------------------------------------------------------------------------------

    def _choose(self, slot: int, near: int | None, lane: int | None = None) -> int | None:
        """A page with a free slot of this size, by the steps in the module's docstring; None when there is none."""
        page = self._choose_partial(slot, near, lane)
        if page is not None or not self._admit(slot):
            return page
        page = self._open_page(slot, lane)
        if page is None and slot in self._lists.partial and self.order is not PageOrder.OWN:
            return self._lowest_partial(slot, lane)
        return page

    def _lowest_partial(self, slot: int, lane: int | None) -> int:
        pages = self._lists.partial[slot]
        return pages[self._table.first_in(pages, lane)]

    def _choose_partial(self, slot: int, near: int | None, lane: int | None = None) -> int | None:
        """A page with taken and free slots of this size that comes before an empty one: steps 1 and 3."""
        page = self._near(slot, near)
        if page is not None or self.order is not PageOrder.FEW_FREE or slot not in self._lists.partial:
            return page
        return (
            self._lowest_partial(slot, lane) if self._lists.free_bytes >= self.capacity_bytes // _SPREAD_SHARE else None
        )

    def _near(self, slot: int, near: int | None) -> int | None:
        """The page of `near`, if it has a free slot of this size."""
        if near is None:
            return None
        page, one = self._table.find(near), self._table.one
        if page is not None and one.slot[page] == slot and one.used[page] < one.count[page] and one.open[page]:
            return page
        return None

    def _admit(self, slot: int) -> bool:
        """Choose the page size again if it does not suit this size yet; False for a size that can never fit."""
        if slot in self._sizes:
            return True
        if slot > self.capacity_bytes:
            return False
        if len(self._sizes) >= _MAX_SIZES:
            self._sizes = {size for size, pages in self._lists.pages_of_size.items() if pages}
        self._sizes.add(slot)
        self._choose_page_bytes()
        return True

    def _choose_page_bytes(self) -> None:
        now = self.page_bytes if self.used_bytes else 1
        page_bytes = choose_page_bytes(self._sizes, self.capacity_bytes, now)
        if page_bytes != self.page_bytes:
            self._cut_empty(page_bytes)

    def _cut(self, page_bytes: int) -> None:
        """Cut free space along the grid, and rebuild all lists."""
        self._cut_empty(page_bytes)
        self._mixed.rebuild(self._table)

    def _cut_empty(self, page_bytes: int) -> None:
        """As `_cut`, where pages with slots stay what they are: a tier may have a million slots in mixed pages."""
        self._table.cut(page_bytes)
        self._lists.rebuild(self._table)

    def _open_page(self, slot: int, lane: int | None) -> int | None:
        """Cut an empty page into slots of this size: of the best length, the lowest; None when there is none.

        The lowest of `lane` if that has one.
        """
        length = self._lists.best_length(slot)
        if length is None:
            return None
        table, lists = self._table, self._lists
        page = lists.take_empty_at(length, table.first_in(lists.empty[length], lane))
        count = length // slot
        table.one.slot[page] = slot
        table.one.count[page] = count
        table.taken[page] = bytearray(count)
        lists.pages_of_size[slot] += 1
        lists.add_free(slot, count)
        lists.add_partial(page, slot)
        return page

    def _open_mixed(self, slot: int, lane: int | None) -> int | None:
        """Make the lowest of the longest empty pages a mixed one; None when none has `slot` bytes.

        The lowest of `lane` if that has one.
        """
        if not self._admit(self._mixed_page_bytes(slot)):
            return None
        length = max((length for length in self._lists.empty if length >= slot), default=None)
        if length is None:
            return None
        page = self._lists.take_empty_at(length, self._table.first_in(self._lists.empty[length], lane))
        self._table.one.slot[page] = IRREGULAR
        self._table.taken[page] = {}
        self._mixed.add(self._table, page)
        return page

    def _mixed_page_bytes(self, slot: int) -> int:
        """Bytes of a page for slots of about this size: of many, since the end of the page is lost for half a slot."""
        least = 1 << (slot - 1).bit_length()
        many = min(_MIXED_SLOTS * least, _power_below(self.capacity_bytes // SHARE))
        few = min(_FEW_MIXED_SLOTS * least, _power_below(self.capacity_bytes // _SMALL_SHARE))  # in a small tier
        return min(max(least, many, few), max(slot, self.capacity_bytes))

    def _take_pages(self, slot: int, count: int) -> Int64s:
        """Take all slots of as many empty pages as `count` slots fill; returns their offsets."""
        length = self._lists.best_length(slot)
        if length is None or count < length // slot:
            return np.zeros(0, np.int64)
        table, each = self._table, length // slot
        pages = self._lists.take_empty(length, count // each)
        table.slot[pages] = slot
        table.count[pages] = table.used[pages] = each
        full = b"\1" * each
        for page in pages:
            table.taken[page] = bytearray(full)
        self._lists.pages_of_size[slot] += len(pages)
        self.used_bytes += len(pages) * each * slot
        offsets: Int64s = table.address[pages][:, np.newaxis] + np.arange(each) * slot
        return offsets.ravel()

    def _count_taken(self, page: int, slot: int, count: int) -> None:
        """Count slots that were taken in a page that is listed as one with free slots."""
        one = self._table.one
        used = one.used[page] + count
        one.used[page] = used
        self.used_bytes += count * slot
        self._lists.add_free(slot, -count)
        if used == one.count[page]:
            self._lists.remove_partial(page, slot)

    def _count_freed(self, page: int, nbytes: int) -> None:
        """Count a slot of `nbytes` that was freed in a page; an empty page can serve any size."""
        one, slot = self._table.one, self._table.one.slot[page]
        was_full = one.used[page] == one.count[page]
        one.used[page] -= 1
        self.used_bytes -= nbytes
        if slot == IRREGULAR:
            one.count[page] -= 1
        elif one.open[page]:
            self._lists.add_free(slot, 1)
            if was_full:
                self._lists.add_partial(page, slot)
        if not one.used[page]:
            self._vacate(page, slot)

    def _count_all_freed(self, pages: Int64s, freed: Int64s) -> None:
        """Count slots that were freed in pages, none of them irregular, `freed` of each."""
        table = self._table
        before, slots = table.used[pages], table.slot[pages]
        table.used[pages] = before - freed
        self.used_bytes -= int((freed * slots).sum())
        was_full = before == table.count[pages]
        is_empty = before == freed
        for slot in np.unique(slots).tolist():
            mine = table.open[pages] & (slots == slot)
            self._lists.add_free(slot, int(freed[mine].sum()))
            if len(fresh := pages[mine & was_full]):
                self._lists.add_all_partial(fresh, slot)
        for page, slot in zip(pages[is_empty].tolist(), slots[is_empty].tolist(), strict=True):
            self._vacate(page, slot)

    def _vacate(self, page: int, slot: int) -> None:
        """Make a page without taken slots an empty one, as a part of its group."""
        table, lists = self._table, self._lists
        is_open = table.one.open[page]
        if slot == IRREGULAR:
            self._mixed.remove(page)
        else:
            lists.pages_of_size[slot] -= 1
            if is_open:
                lists.add_free(slot, -table.one.count[page])
                lists.remove_partial(page, slot)
        table.slot[page] = EMPTY
        table.count[page] = 0
        table.taken[page] = None
        if not table.is_whole(page):
            gone, made = table.cut_around(page)
            if is_open:
                for other, length in gone:
                    lists.remove_empty(other, length)
                for other, length in made:
                    lists.add_empty(other, length)
        elif is_open:
            lists.add_empty(page, table.one.length[page])
        if slot > self.capacity_bytes // SHARE and not lists.pages_of_size[slot]:
            self._sizes.discard(slot)  # the large pages that it needed are bad for the other sizes
            self._choose_page_bytes()


def _power_below(nbytes: int) -> int:
    """The largest power of two up to `nbytes`, 1 at least."""
    return 1 << max(nbytes, 1).bit_length() - 1
