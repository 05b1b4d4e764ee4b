"""Lists of pages to allocate from: empty pages by their bytes, pages with free slots by the slots' bytes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

import numpy as np

from prefixd_swap.errors import IntegrityError
from prefixd_swap.pages.page_table import EMPTY, Int64s, PageTable


class PageLists:
    """The usable pages of open ranges, ascending, and their free slots.

    All of it follows from a table; a caller that changes the table calls the methods here too.
    """

    def __init__(self) -> None:
        self.empty: dict[int, list[int]] = {}
        """Bytes of the page -> pages."""
        self.partial: dict[int, list[int]] = {}
        """Bytes of a slot -> pages with taken and free slots."""
        self.free: Counter[int] = Counter()
        """Bytes of a slot -> free slots in `partial`."""
        self.free_bytes = 0
        """Bytes of the free slots in `partial`."""
        self.pages_of_size: Counter[int] = Counter()
        """Bytes of a slot -> number of pages, also of closed ranges."""

    def rebuild(self, table: PageTable) -> None:
        """List the pages of `table`."""
        usable = table.open & (table.length > 0)
        self.empty = _by_value(np.flatnonzero(usable & (table.slot == EMPTY)), table.length)
        self.partial = _by_value(np.flatnonzero(usable & (table.slot > 0) & (table.used < table.count)), table.slot)
        self.free = Counter(
            {slot: int((table.count[pages] - table.used[pages]).sum()) for slot, pages in self.partial.items()}
        )
        self.free_bytes = sum(slot * count for slot, count in self.free.items())
        kinds, counts = np.unique(table.slot[table.slot > 0], return_counts=True)
        self.pages_of_size = Counter(dict(zip(kinds.tolist(), counts.tolist(), strict=True)))

    def room(self, slot: int) -> int:
        """Number of slots of `slot` bytes that can be allocated."""
        return self.free[slot] + sum(len(pages) * (length // slot) for length, pages in self.empty.items())

    def best_length(self, slot: int) -> int | None:
        """The bytes of the empty pages that are best to cut into such slots: the smallest rest, then the shortest."""
        return min(
            (length for length in self.empty if length >= slot),
            key=lambda length: (length % slot / length, length),
            default=None,
        )

    def add_empty(self, page: int, length: int) -> None:
        """List an empty page of `length` bytes."""
        insort(self.empty.setdefault(length, []), page)

    def remove_empty(self, page: int, length: int) -> None:
        """Remove an empty page from the list, if it is there."""
        _remove(self.empty, length, page, missing_ok=True)

    def take_empty(self, length: int, count: int) -> list[int]:
        """Remove and return the lowest `count` empty pages of `length` bytes, or all if there are fewer."""
        pages = self.empty[length][:count]
        del self.empty[length][:count]
        if not self.empty[length]:
            del self.empty[length]
        return pages

    def take_empty_at(self, length: int, at: int) -> int:
        """Remove and return one empty page of `length` bytes, by its position."""
        page = self.empty[length].pop(at)
        if not self.empty[length]:
            del self.empty[length]
        return page

    def add_free(self, slot: int, count: int) -> None:
        """Count free slots of listed pages; a negative `count` removes them."""
        self.free[slot] += count
        self.free_bytes += count * slot

    def add_partial(self, page: int, slot: int) -> None:
        """List a page that has free slots of `slot` bytes."""
        insort(self.partial.setdefault(slot, []), page)

    def add_all_partial(self, pages: Int64s, slot: int) -> None:
        """As `add_partial`, for pages [n]."""
        listed = self.partial.setdefault(slot, [])
        listed += pages.tolist()
        listed.sort()

    def remove_partial(self, page: int, slot: int) -> None:
        """Remove a page from the list when it is full or empty.

        Raises:
            IntegrityError: it is not listed.
        """
        _remove(self.partial, slot, page)

    def copy(self) -> PageLists:
        other = PageLists()
        other.empty = {length: [*pages] for length, pages in self.empty.items()}
        other.partial = {slot: [*pages] for slot, pages in self.partial.items()}
        other.free, other.free_bytes = self.free.copy(), self.free_bytes
        other.pages_of_size = self.pages_of_size.copy()
        return other

    def check_integrity(self, table: PageTable) -> None:
        """Check that the lists agree with `table`.

        Raises:
            IntegrityError: they do not.
        """
        other = PageLists()
        other.rebuild(table)
        names = "empty pages", "pages with free slots", "free slots", "bytes of free slots", "pages by size"
        for name, have, want in zip(names, self._all(), other._all(), strict=True):
            if have != want:  # two Counters are equal where one has a zero and the other nothing
                raise IntegrityError(f"the {name} are {want} and listed as {have}")

    def _all(self) -> tuple[object, ...]:
        return self.empty, self.partial, self.free, self.free_bytes, self.pages_of_size


def _by_value(pages: Int64s, column: Int64s) -> dict[int, list[int]]:
    """`pages`, ascending, by their values in `column`."""
    return {value: pages[column[pages] == value].tolist() for value in np.unique(column[pages]).tolist()}


def _remove(lists: dict[int, list[int]], key: int, page: int, *, missing_ok: bool = False) -> None:
    """Remove `page` from a sorted list, and an empty list from `lists`."""
    pages = lists.get(key, [])
    at = bisect_left(pages, page)
    if at == len(pages) or pages[at] != page:
        if missing_ok:
            return
        raise IntegrityError(f"page {page} is not listed under {key}")
    del pages[at]
    if not pages:
        del lists[key]
