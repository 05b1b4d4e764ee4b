"""Takes slots again that were taken before a restart; only their offsets and sizes are known."""

from __future__ import annotations

from itertools import islice

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
    if (offsets[1:] < offsets[:-1]).any():
        order = np.argsort(offsets)
        offsets, sizes, mixed = offsets[order], sizes[order], mixed[order]
    if (wrong := np.flatnonzero(offsets[1:] < offsets[:-1] + sizes[:-1])).size:
        raise MemoryMisuseError(f"two slots have the bytes at offset {offsets[wrong[0] + 1]}; claim each byte once")
    first, last = table.units_between(offsets, sizes)
    head, tail = _pages_around(table, offsets, sizes, mixed, first, last)
    begins, counts = _runs(head)
    page, end = head[begins], np.maximum.reduceat(tail, begins)
    size = sizes[begins]
    index = _index_of(offsets - np.repeat(table.address[page], counts), sizes)
    fits = (sizes == np.repeat(size, counts)) & (index >= 0) & ~mixed
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
    flags[(np.repeat(base, counts) + index)[mine]] = 1
    data = flags.tobytes()
    for where, at, count in zip(page[regular].tolist(), base[regular].tolist(), held[regular].tolist(), strict=True):
        table.taken[where] = bytearray(data[at : at + count])
    odd = np.repeat(~regular, counts)
    one = {nbytes: nbytes for nbytes in np.unique(sizes[odd]).tolist()}  # one object for all slots of a size
    slots = zip(offsets[odd].tolist(), map(one.__getitem__, sizes[odd].tolist()), strict=True)
    for where, count in zip(page[~regular].tolist(), counts[~regular].tolist(), strict=True):
        table.taken[where] = dict(islice(slots, count))


def _pages_around(
    table: PageTable, offsets: Int64s, sizes: Int64s, mixed: Bools, first: Int64s, last: Int64s
) -> tuple[Int64s, Int64s]:
    """First and last unit of the page of each claimed slot; all ascending by offset.

    A stretch of the grid is one page if all its slots have one size and lie at multiples of it. Elsewhere units that
    share a slot are one page.
    """
    group = table.group[first]
    begins, counts = _runs(group)
    index = _index_of(offsets - np.repeat(table.address[group[begins]], counts), sizes)
    fits = (sizes == np.repeat(sizes[begins], counts)) & (index >= 0) & ~mixed
    beyond = table.group[last]
    across = beyond != group
    whole = np.logical_and.reduceat(fits & ~across, begins)
    # A slot that reaches into the next group makes that one irregular too.
    whole &= ~np.isin(group[begins], beyond[across])
    ends = np.searchsorted(table.group, group[begins], "right") - 1
    if whole.all():
        return group, np.repeat(ends, counts)
    reach = np.maximum.accumulate(last)
    fresh = np.ones(len(first), np.bool_)
    fresh[1:] = first[1:] > reach[:-1]
    head = np.maximum.accumulate(np.where(fresh, first, 0))
    is_whole = np.repeat(whole, counts)
    return np.where(is_whole, group, head), np.where(is_whole, np.repeat(ends, counts), last)


def _runs(values: Int64s) -> tuple[Int64s, Int64s]:
    """Where runs of equal values begin, and their lengths; there is at least one value."""
    begins = np.flatnonzero(np.diff(values, prepend=-1))
    return begins, np.diff(begins, append=len(values))


def _index_of(inside: Int64s, sizes: Int64s) -> Int64s:
    """Which slot of the page each one is, from its offset in the page; -1 if none of its size begins there."""
    divisor = sizes[0] if (sizes == sizes[0]).all() else sizes  # division by one number is several times faster
    index: Int64s = inside // divisor
    index[index * divisor != inside] = -1
    return index
