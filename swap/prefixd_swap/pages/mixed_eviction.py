"""Chooses slots to evict for mixed slots: stretches of adjacent slots and holes, just as long as what is missing.

mixed page   | 21K | 19K |....| 24K | 17K |......|    20K are missing: `19K` goes, with the hole behind it
                   |<- 27K -->|
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from prefixd_swap.pages.page_eviction import Allow, Victims, Worths, choose_victims
from prefixd_swap.pages.page_table import IRREGULAR, Bools, Int64s
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import round_to_slot

_FIRST = 256
"""Stretches are looked for among so many slots of least worth first, then among all."""


def choose_mixed_victims(
    pages: PageAllocator,
    nbytes: int,
    count: int,
    offsets: Int64s,
    worth: Worths,
    evictable: Bools | None = None,
    allow: Allow | None = None,
) -> Victims:
    """Choose among the slots at `offsets`, so that `count` mixed slots of `nbytes` bytes on average have room.

    What is missing, `nbytes * count`, is chosen as whole pages, and what is less than a page as one stretch, those of
    least worth: a stretch is worth its most valuable slot. So less than one slot goes beyond what is missing. Where
    longer stretches have slots that stay, shorter ones are chosen. A page with slots of one size can only go whole.

    Args:
        offsets, worth, evictable, allow: as of `choose_victims`. A slot that is not given stays.

    Raises:
        MemoryMisuseError: `nbytes` is not positive, or an offset is in no range.
    """
    slot = round_to_slot(nbytes)
    stretches = _Stretches(pages, offsets, worth, evictable)
    missing = slot * count
    length = min(missing, stretches.longest)
    while slot <= length:
        for inside, freed in stretches.as_long_as(length):
            if not stretches.goes[inside].any() and (allow is None or allow(inside)):
                stretches.goes[inside] = True
                missing -= freed
            if missing < length:
                break
        else:
            length = length // 2 // slot * slot
        length = min(length, missing)
    if not stretches.goes.any():  # pages may be too short: then adjacent ones go
        return choose_victims(pages, slot, count, offsets, worth, evictable, allow, pages_alone=True)
    return Victims(np.flatnonzero(stretches.goes), count - max(missing, 0) // slot)


class _Stretches:
    """Stretches of slots in a tier.

    Attributes:
        goes: bool [n], the slots that are chosen.
        longest: bytes of the longest page with a slot that may go.
    """

    def __init__(self, pages: PageAllocator, offsets: Int64s, worth: Worths, evictable: Bools | None) -> None:
        self._pages, self._now, self._offsets = pages, pages.pages(), offsets
        self._page = pages.pages_of(offsets)
        self._may = self._now.is_open[self._page]
        if evictable is not None:
            self._may &= evictable
        self._worth = worth
        self._all: _Table | None = None
        self.goes = np.zeros(len(offsets), np.bool_)
        self.longest = int(self._now.nbytes[self._page[self._may]].max(initial=0))

    def as_long_as(self, nbytes: int) -> Iterator[tuple[Int64s, int]]:
        """The shortest stretches that have `nbytes` without slots that stay, or that go already when it is called, by
        worth: positions of the slots, and bytes. They may overlap."""
        least = -np.inf
        worths = self._worth[self._may]
        if self._all is None and len(worths) > _FIRST:
            least = float(np.partition(worths, _FIRST)[_FIRST])
            yield from self._between(self._table(self._may & (self._worth <= least)), nbytes, -np.inf, least)
        if self._all is None:
            self._all = self._table(self._may)
        yield from self._between(self._all, nbytes, least, np.inf)

    def _table(self, among: Bools) -> _Table:
        """The slots in the pages of some of the given ones, bool [n]."""
        numbers = np.flatnonzero(np.bincount(self._page[among], minlength=len(self._now)))
        taken, sizes = self._pages.occupied_in(numbers)
        is_there = np.zeros(len(self._now), np.bool_)
        is_there[numbers] = True
        given = np.flatnonzero(is_there[self._page])
        position = np.full(len(taken), len(self._offsets))
        position[np.searchsorted(taken, self._offsets[given])] = given
        now, page = self._now, self._pages.pages_of(taken)
        is_first = np.diff(page, prepend=-1) != 0
        is_last = np.roll(is_first, -1)
        starts, ends = np.roll(taken + sizes, 1), np.roll(taken, -1)
        starts[is_first] = now.address[page[is_first]]
        ends[is_last] = (now.address + now.nbytes)[page[is_last]]
        whole = np.where(now.slot_bytes == IRREGULAR, 0, now.nbytes)[page]
        return _Table(position, page, starts, ends, whole, is_first, np.append(0, np.cumsum(sizes)))

    def _between(self, table: _Table, nbytes: int, least: float, most: float) -> Iterator[tuple[Int64s, int]]:
        """As `as_long_as`, those that are worth more than `least` and at most `most`."""
        first = np.flatnonzero((table.whole == 0) | table.is_first)
        needed = table.starts[first] + np.maximum(table.whole[first], nbytes)
        last = np.maximum(np.searchsorted(table.ends, needed), first)  # the hole may be enough
        there = last < len(table.page)
        there[there] = table.page[first[there]] == table.page[last[there]]
        first, last = first[there], last[there]
        if not len(first):
            return
        worth = np.append(np.where(self._may & ~self.goes, self._worth, np.inf), np.inf)[table.position]
        # The last one of `worth` is never in a stretch: reduceat wants a position behind each.
        worths = np.maximum.reduceat(np.append(worth, 0.0), np.stack([first, last + 1], 1).ravel())[::2]
        good = np.flatnonzero((worths > least) & (worths <= most) & (worths < np.inf))
        used = table.used
        order = good[np.lexsort(((used[last + 1] - used[first])[good], worths[good]))]
        for at, end in zip(first[order].tolist(), last[order].tolist(), strict=True):
            yield table.position[at : end + 1], int(table.ends[end] - table.starts[at])


@dataclass(frozen=True, slots=True)
class _Table:
    """The m slots in some pages, ascending by offset."""

    position: Int64s
    """[m] positions in the given offsets; their number for a slot that is not given."""
    page: Int64s
    """[m]"""
    starts: Int64s
    """[m] where the slot begins with the hole before it."""
    ends: Int64s
    """[m] where it ends with the hole behind it."""
    whole: Int64s
    """[m] bytes of its page if that can only go whole, else 0."""
    is_first: Bools
    """[m] whether it is the first in its page."""
    used: Int64s
    """[m + 1] bytes of the slots before each, and of all."""
