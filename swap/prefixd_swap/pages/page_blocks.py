"""Blocks of several parts in pages: all parts of a block, or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd_swap.pages.page_table import Int64s
from prefixd_swap.pages.pages import PageAllocator


def allocate_blocks(slots: PageAllocator, sizes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
    """Slots for up to `count` blocks; fewer blocks when there is no room for more.

    Args:
        slots: the allocator.
        sizes: bytes of each of the p parts of a block.
        count: blocks.
        near: [p] the offset of a slot of the same prefix for each part; below 0 for none. None: no part has one.

    Returns:
        [m, p] offsets, m <= count.
    """
    hints = [None] * len(sizes) if near is None else [slot if slot >= 0 else None for slot in near.tolist()]
    count = min([count, *(slots.room(size, hint) for size, hint in set(zip(sizes, hints, strict=True)))])
    while count:  # one size may take the room of another, so after a failure half as many blocks are tried
        columns: list[Int64s] = []
        for size, hint in zip(sizes, hints, strict=True):
            column = slots.allocate_many(size, count, hint)
            if column is None:
                break
            columns.append(column)
        if len(columns) == len(sizes):
            return np.stack(columns, axis=1)
        for column in columns:
            slots.free_many(column)
        count //= 2
    return np.empty((0, len(sizes)), np.int64)
