"""Takes slots again that were taken before a restart; only their offsets and sizes are known."""

from __future__ import annotations

import numpy as np

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.pages.page_table import IRREGULAR, Bools, Int64s, PageTable


def claim_slots(table: PageTable, offsets: Int64s, sizes: Int64s, mixed: Bools) -> None:
    """Take slots in a table without taken slots. The caller calls `cut` for their sizes before, and again after.

    Slots may lie across pages, and pages may have slots of several sizes. Such a page becomes irregular.

    Args:
        table: the pages.
        offsets: int64 [n], in any order, n > 0.
        sizes: int64 [n], bytes, multiples of 4096.
        mixed: bool [n], which lie in pages with slots of any sizes, whatever their own.

    Raises:
        MemoryMisuseError: slots overlap, or reach outside a range; nothing has changed.
    """
    order = np.argsort(offsets, kind="stable")
    offsets, sizes, mixed = offsets[order], sizes[order], mixed[order]
    first, last = table.units_of(offsets), table.units_of(offsets + sizes - 1)
    if (wrong := np.flatnonzero(offsets[1:] < offsets[:-1] + sizes[:-1])).size:
        raise MemoryMisuseError(f"two slots have the bytes at offset {offsets[wrong[0] + 1]}; claim each byte once")
    at = np.searchsorted(table.starts, offsets, "right")
    if (outside := np.flatnonzero(at != np.searchsorted(table.starts, offsets + sizes - 1, "right"))).size:
        raise MemoryMisuseError(f"the slot at offset {offsets[outside[0]]} reaches outside its range")
    head, tail = _pages_around(table, offsets, sizes, mixed, first, last)
    begins = np.flatnonzero(np.diff(head, prepend=-1))
    page, end = head[begins], np.maximum.reduceat(tail, begins)
    counts = np.diff(begins, append=len(head))
    size = sizes[begins]
    inside = offsets - np.repeat(table.address[page], counts)
    fits = (sizes == np.repeat(size, counts)) & (inside % sizes == 0) & ~mixed
    regular = np.logical_and.reduceat(fits, begins)
    length = table.end[end] - table.address[page]
    table.slot[page] = np.where(regular, size, IRREGULAR)
    table.count[page] = np.where(regular, length // size, counts)
    table.used[page] = counts
    units = end - page + 1
    table.head[:] = np.arange(len(table.head))
    covered = np.repeat(page - np.cumsum(units) + units, units) + np.arange(units.sum())
    table.head[covered] = np.repeat(page, units)
    held = np.where(regular, table.count[page], 0)
    base = np.cumsum(held) - held
    flags = np.zeros(int(held.sum()), np.uint8)
    mine = np.repeat(regular, counts)
    flags[(np.repeat(base, counts) + inside // sizes)[mine]] = 1
    data = flags.tobytes()
    for where, at, count in zip(page[regular].tolist(), base[regular].tolist(), held[regular].tolist(), strict=True):
        table.taken[where] = bytearray(data[at : at + count])
    bounds = np.append(begins, len(offsets))
    for number in np.flatnonzero(~regular).tolist():
        own = slice(bounds[number], bounds[number + 1])
        table.taken[page.item(number)] = dict(zip(offsets[own].tolist(), sizes[own].tolist(), strict=True))


def _pages_around(
    table: PageTable, offsets: Int64s, sizes: Int64s, mixed: Bools, first: Int64s, last: Int64s
) -> tuple[Int64s, Int64s]:
    """First and last unit of the page of each claimed slot; all ascending by offset.

    A stretch of the grid is one page if all its slots have one size and lie at multiples of it. Elsewhere units that
    share a slot are one page.
    """
    group = table.group[first]
    begins = np.flatnonzero(np.diff(group, prepend=-1))
    counts = np.diff(begins, append=len(group))
    size = np.repeat(sizes[begins], counts)
    inside = offsets - table.address[group]
    fits = (sizes == size) & (inside % size == 0) & ~mixed
    across = table.group[last] != group
    whole = np.logical_and.reduceat(fits & ~across, begins)
    # A slot that reaches into the next group makes that one irregular too.
    whole &= ~np.isin(group[begins], table.group[last[across]])
    whole = np.repeat(whole, counts)
    reach = np.maximum.accumulate(last)
    fresh = np.ones(len(first), np.bool_)
    fresh[1:] = first[1:] > reach[:-1]
    head = np.maximum.accumulate(np.where(fresh, first, 0))
    stops = np.array([table.group_end(unit) - 1 for unit in np.unique(group[whole]).tolist()], np.int64)
    tail = last.copy()
    tail[whole] = stops[np.searchsorted(np.unique(group[whole]), group[whole])]
    return np.where(whole, group, head), tail
