"""Blocks of several parts in pages: all parts of a block, or none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd_swap.pages.page_table import Int64s
from prefixd_swap.pages.pages import PageAllocator


def allocate_blocks(slots: PageAllocator, sizes: Sequence[int], count: int, near: Sequence[int | None]) -> Int64s:
    """Slots for up to `count` blocks; fewer blocks when there is no room for more.

    Args:
        slots: where.
        sizes: bytes of each of the p parts of a block.
        count: blocks.
        near: [p] of each part the offset of a slot of the same prefix; None for none.

    Returns:
        [m, p] offsets, m <= count.
    """
    count = min([count, *(slots.room(size) for size in set(sizes))])
    while count:  # what one size takes another may lack, so the smaller number is tried where a larger one fails
        columns: list[Int64s] = []
        for size, hint in zip(sizes, near, strict=True):
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
