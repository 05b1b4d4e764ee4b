"""What of an index can be believed after a start: slots that exist, once, under parents that exist."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prefixd_swap.block_record import parent_key, record_depth, record_slots
from prefixd_swap.slab_files import SlabFiles

Row = tuple[bytes, bytes]
"""A block's key and value in the index."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start found, in blocks."""

    kept: int = 0
    lost_slots: int = 0
    """Dropped: a slot is gone, too small or another block's; or the record is unreadable."""
    lost_parents: int = 0
    """Dropped: the parent is not there, so no prompt can reach them (invariant: prefix-closed)."""


def parents_first(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows by depth, so that parents, which are less deep, come before children. Unreadable ones last."""
    by_depth: defaultdict[int, list[Row]] = defaultdict(list)
    unreadable: list[Row] = []
    for row in rows:
        try:
            by_depth[record_depth(row[1])].append(row)
        except struct.error:
            unreadable.append(row)
    for depth in sorted(by_depth):
        yield from by_depth[depth]
    yield from unreadable


def recover(rows: Iterable[Row], slabs: SlabFiles) -> tuple[Recovery, list[bytes]]:
    """Claim the slots of the blocks that are whole; keys of the others, to be removed from the index."""
    kept: set[bytes] = set()
    dropped: list[bytes] = []
    lost_parents = 0
    for key, value in parents_first(rows):
        try:
            parent = parent_key(key, value)
            slots = record_slots(value)
        except struct.error:
            dropped.append(key)
            continue
        if parent is not None and parent not in kept:
            dropped.append(key)
            lost_parents += 1
        elif _claim_all(slots, slabs):
            kept.add(key)
        else:
            dropped.append(key)
    return Recovery(len(kept), len(dropped) - lost_parents, lost_parents), dropped


def _claim_all(slots: list[tuple[int, int]], slabs: SlabFiles) -> bool:
    for position, (slot, nbytes) in enumerate(slots):
        if not slabs.claim(slot, nbytes):
            for taken, _ in slots[:position]:
                slabs.free(taken)
            return False
    return bool(slots)
