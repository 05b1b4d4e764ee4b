"""Chooses slots to evict for mixed slots: stretches of adjacent slots and holes, just as long as what is missing.

mixed page   | 21K | 19K |....| 24K | 17K |......|    20K are missing: `19K` goes, with the hole behind it
                   |<- 27K -->|
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prefixd_swap.pages.page_eviction import Allow, Victims, Worths, choose_victims
from prefixd_swap.pages.page_table import IRREGULAR, Bools, Int64s
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import round_to_slot

_FIRST, _MORE = 256, 16
"""Stretches are looked for among so many slots of least worth, then among so many times more, and so on."""


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
        may = self._now.is_open[self._page]
        self._worth = np.where(may if evictable is None else may & evictable, worth, np.inf)
        self._worths = self._worth[np.isfinite(self._worth)]
        self.goes = np.zeros(len(offsets), np.bool_)
        self.longest = int(self._now.nbytes[self._page[np.isfinite(self._worth)]].max(initial=0))

    def as_long_as(self, nbytes: int) -> Iterator[tuple[Int64s, int]]:
        """The shortest stretches that have `nbytes` without slots that stay, or that go already when it is called, by
        worth: positions of the slots, and bytes. They may overlap."""
        least, some = -np.inf, _FIRST
        while least < np.inf:
            most = np.partition(self._worths, some)[some] if some < len(self._worths) else np.inf
            yield from self._between(nbytes, least, most)
            least, some = most, _MORE * some

    def _between(self, nbytes: int, least: float, most: float) -> Iterator[tuple[Int64s, int]]:
        """As `as_long_as`, those that are worth more than `least` and at most `most`."""
        numbers = np.unique(self._page[(self._worth <= most) & np.isfinite(self._worth) & ~self.goes])
        taken, sizes = self._pages.occupied_in(numbers)
        given = np.flatnonzero(np.isin(self._page, numbers))
        position, worth = np.full(len(taken), -1), np.full(len(taken), np.inf)
        position[np.searchsorted(taken, self._offsets[given])] = given
        mine = position >= 0
        worth[mine] = np.where(self.goes[position[mine]], np.inf, self._worth[position[mine]])
        now, page = self._now, self._pages.pages_of(taken)
        is_first = np.diff(page, prepend=-1) != 0
        is_last = np.roll(is_first, -1)
        starts, ends = np.roll(taken + sizes, 1), np.roll(taken, -1)  # with the holes around each slot
        starts[is_first] = now.address[page[is_first]]
        ends[is_last] = (now.address + now.nbytes)[page[is_last]]
        is_mixed = now.slot_bytes[page] == IRREGULAR
        length = np.where(is_mixed, nbytes, np.maximum(nbytes, now.nbytes[page]))
        first = np.flatnonzero(is_mixed | is_first)
        last = np.maximum(np.searchsorted(ends, starts[first] + length[first]), first)  # the hole may be enough
        first, last = (each[last < len(taken)] for each in (first, last))
        first, last = (each[page[first] == page[last]] for each in (first, last))
        if not len(first):
            return
        # The last one of `worth` is never in a stretch: reduceat wants a position behind each.
        worths = np.maximum.reduceat(np.append(worth, 0.0), np.stack([first, last + 1], 1).ravel())[::2]
        good = np.flatnonzero((worths > least) & (worths <= most) & np.isfinite(worths))
        used = np.append(0, np.cumsum(sizes))
        order = good[np.lexsort(((used[last + 1] - used[first])[good], worths[good]))]
        for at, end in zip(first[order].tolist(), last[order].tolist(), strict=True):
            yield position[at : end + 1], int(ends[end] - starts[at])
