"""The free space of mixed pages: pages with slots of any sizes, such as parts that a codec has encoded.

    mixed page   |  21K  |   19K   |....|   24K   | 17K |..........|    holes are used again, the best fitting one first

A slot of a size of its own would need a page of its own, half of which is free on average; with a hundred sizes a tier
would be full of such halves. So encoded parts lie one behind the other. A mixed page is an irregular page of the table
(`page_table`), as is a page with slots of several sizes after a restart. `mixed_eviction` chooses what leaves it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import chain, pairwise

import numpy as np

from prefixd_swap.errors import IntegrityError
from prefixd_swap.pages.page_table import IRREGULAR, PageTable

_TRIED = 16  # pages of other lanes, before any lane will do
Hole = tuple[int, int]
"""Offset and end."""


class MixedPages:
    """Holes of the irregular pages of open ranges.

    All of it follows from a table; a caller that changes the table calls the methods here too.
    """

    def __init__(self) -> None:
        self._holes: dict[int, list[Hole]] = {}  # by page, ascending; two holes never touch
        self._largest: dict[int, int] = {}  # bytes of the largest hole, of pages that have one
        self._by_largest: list[tuple[int, int]] = []  # the same as (bytes, page), ascending
        self._recent: dict[int, int] = {}  # by lane, the page of its last slot

    def rebuild(self, table: PageTable) -> None:
        """Find the holes of `table`."""
        self._holes.clear()
        self._largest.clear()
        self._by_largest.clear()
        self._recent.clear()
        pages = np.flatnonzero(table.open & (table.length > 0) & (table.slot == IRREGULAR))
        if not len(pages):
            return
        taken = [table.irregular(page) for page in pages.tolist()]
        counts = np.fromiter(map(len, taken), np.int64, len(taken))
        offsets = np.fromiter(chain.from_iterable(taken), np.int64, int(counts.sum()))
        sizes = np.fromiter(chain.from_iterable(each.values() for each in taken), np.int64, len(offsets))
        order = np.argsort(offsets)
        # Of each page, a gap before each slot and one behind the last.
        at = np.arange(len(offsets)) + np.repeat(np.arange(len(pages)), counts)
        behind = np.cumsum(counts + 1) - 1
        starts, ends = np.empty((2, len(offsets) + len(pages)), np.int64)
        starts[at + 1], ends[at] = (offsets + sizes)[order], offsets[order]
        starts[behind - counts], ends[behind] = table.address[pages], table.address[pages] + table.length[pages]
        largest = np.maximum.reduceat(ends - starts, behind - counts)
        is_hole = ends > starts
        holes = list(zip(starts[is_hole].tolist(), ends[is_hole].tolist(), strict=True))
        bounds = [0, *np.cumsum(is_hole)[behind].tolist()]
        for page, (first, end) in zip(pages.tolist(), pairwise(bounds), strict=True):
            self._holes[page] = holes[first:end]
        some = largest > 0
        self._largest = dict(zip(pages[some].tolist(), largest[some].tolist(), strict=True))
        self._by_largest = sorted((nbytes, page) for page, nbytes in self._largest.items())

    def add(self, table: PageTable, page: int) -> None:
        """List an irregular page."""
        start = table.one.address[page]
        holes: list[Hole] = []
        for offset, nbytes in sorted(table.irregular(page).items()):
            if offset > start:
                holes.append((start, offset))
            start = offset + nbytes
        if (end := table.one.address[page] + table.one.length[page]) > start:
            holes.append((start, end))
        self._holes[page] = holes
        self._rank(page)

    def remove(self, page: int) -> None:
        """Forget a page that is empty now."""
        if self._holes.pop(page, None) is not None:
            self._rank(page)

    def choose(self, table: PageTable, nbytes: int, near: int | None, lane: int | None) -> int | None:
        """A page with a hole of `nbytes`: `near`, or that of the last slot, or one of those whose largest holes fit
        best; the last two in a lane, None: in any."""
        for page in (near, self._recent.get(lane or 0)):
            if page is not None and self._largest.get(page, 0) >= nbytes:
                return page
        at = bisect_left(self._by_largest, (nbytes, -1))
        for _, page in self._by_largest[at : at + _TRIED]:
            if lane is None or table.lane_of(table.one.address[page]) == lane:
                return page
        return None

    def take(self, table: PageTable, page: int, nbytes: int) -> int:
        """Take `nbytes` of the smallest hole of a chosen page that has so many; returns the offset."""
        holes = self._holes[page]
        at = min(
            (at for at, (start, end) in enumerate(holes) if end - start >= nbytes),
            key=lambda at: holes[at][1] - holes[at][0],
        )
        start, end = holes[at]
        holes[at : at + 1] = [(start + nbytes, end)] if start + nbytes < end else []
        self._recent[table.lane_of(start) or 0] = page
        self._rank(page)
        return start

    def give(self, page: int, offset: int, nbytes: int) -> None:
        """Make a slot of a listed page a hole, or a part of the holes beside it."""
        holes = self._holes.get(page)
        if holes is None:  # of a closed range
            return
        start, end = offset, offset + nbytes
        at = bisect_left(holes, (start, end))
        if at < len(holes) and holes[at][0] == end:
            end = holes.pop(at)[1]
        if at and holes[at - 1][1] == start:
            at -= 1
            start = holes.pop(at)[0]
        holes.insert(at, (start, end))
        self._rank(page)

    def check_integrity(self, table: PageTable) -> None:
        """Check that the holes agree with `table`.

        Raises:
            IntegrityError: they do not.
        """
        other = MixedPages()
        other.rebuild(table)
        have, want = (self._holes, self._largest, self._by_largest), (other._holes, other._largest, other._by_largest)
        if have != want:
            raise IntegrityError(f"the free space of mixed pages is {want[0]} and listed as {have[0]}")

    def _rank(self, page: int) -> None:
        """Updates the largest hole of a page."""
        before = self._largest.pop(page, 0)
        if before:
            del self._by_largest[bisect_left(self._by_largest, (before, page))]
        if largest := max((end - start for start, end in self._holes.get(page, ())), default=0):
            self._largest[page] = largest
            insort(self._by_largest, (largest, page))
