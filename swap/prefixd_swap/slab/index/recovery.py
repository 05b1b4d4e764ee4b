"""Keeps the records of an index that are valid at a start: their slots exist and do not overlap, and so do parents."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from prefixd_swap.slab.files.slab_file import INDEX_BITS
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.index.record_columns import (
    FIRST_BLOCK,
    LOST_PARENT,
    OF_ANY_SIZE,
    Bools,
    IndexTable,
    Int64s,
    Records,
)
from prefixd_swap.slots import PAGE_BYTES

ClaimedSlots = tuple[Int64s, Int64s, Bools]
"""Slots, their bytes, and whether they may lie in pages with slots of any sizes; [n] each."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Numbers of blocks that a start kept and dropped."""

    kept: int = 0
    lost_slots: int = 0
    """Dropped: a slot is gone or overlaps another block's, or the record is unreadable."""
    lost_parents: int = 0
    """Dropped: the parent is absent, so no prompt can reach them (invariant: prefix-closed)."""
    empty_nodes: int = 0
    """Dropped: neither the block nor a descendant has a part on disk."""
    index_damage: str = ""
    """The reason why the index was set aside; empty when it was good."""

    @property
    def lost(self) -> dict[str, int]:
        """Lost blocks by reason; empty if the index was set aside, since its note counts them."""
        if self.index_damage:
            return {}
        reasons = {
            "on disk, but the bytes are gone, another block's, or not known": self.lost_slots,
            "on disk, but the parent is gone": self.lost_parents,
        }
        return {reason: blocks for reason, blocks in reasons.items() if blocks}

    def losses(self) -> str:
        """Numbers of dropped blocks and the reasons, for the log."""
        reasons = {
            "whose bytes are gone, another block's, or not known": self.lost_slots,
            "whose parents are gone": self.lost_parents,
            "of which nothing is on disk": self.empty_nodes,
        }
        return "; ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)


def slabs_named(table: IndexTable) -> set[int]:
    """Numbers of the slabs that records name."""
    return set(np.unique(table.slots() >> INDEX_BITS).tolist())


def recover(table: IndexTable, slabs: SlabFiles, index_damage: str = "") -> tuple[Recovery, Records, list[bytes]]:
    """Claim the slots of the whole blocks; returns those blocks, and the index keys of the others.

    A record none of whose parts is on disk (a node) is kept for the blocks that continue it.
    """
    parent = table.link()
    named = _NamedSlots.of(table)
    sound = named.sound_rows(table, slabs)
    closed = prefix_closed(table.depth, parent, sound)
    kept = _with_bytes(table, parent, closed)
    lost_parents = int(np.count_nonzero(table.readable & ~closed & _parent_is_lost(parent, closed)))
    empty_nodes = int(np.count_nonzero(closed & ~kept))
    dropped = table.index_keys(~kept) + table.unreadable
    slabs.claim(*named.claimed(kept))
    del named
    records = table.records(kept, parent)
    lost_slots = len(dropped) - lost_parents - empty_nodes
    return Recovery(len(records), lost_slots, lost_parents, empty_nodes, index_damage), records, dropped


def reconcile(table: IndexTable, slabs: SlabFiles, known: Int64s) -> tuple[ClaimedSlots, list[bytes]]:
    """The slots of valid blocks with only `known` slots; and the index keys of all other blocks."""
    named = _NamedSlots.of(table)
    wanted = named.sound_rows(table, slabs, np.isin(named.slots, known))
    return named.claimed(wanted), table.index_keys(~wanted) + table.unreadable


def prefix_closed(depth: Int64s, parent: Int64s, sound: Bools) -> Bools:
    """The rows of `sound` with all ancestors in it. A parent is less deep than its child, so one pass is enough."""
    kept: Bools = sound & (parent != LOST_PARENT)
    if kept.all():
        return kept
    order = np.argsort(depth, kind="stable")
    levels = np.flatnonzero(np.diff(depth[order], prepend=-1)).tolist()
    for start, end in pairwise([*levels, len(order)]):
        rows = order[start:end]
        kept[rows] &= (parent[rows] == FIRST_BLOCK) | kept[parent[rows]]
    return kept


def _parent_is_lost(parent: Int64s, kept: Bools) -> Bools:
    lost: Bools = (parent == LOST_PARENT) | ((parent >= 0) & ~kept[parent])
    return lost


def _with_bytes(table: IndexTable, parent: Int64s, kept: Bools) -> Bools:
    """The rows of `kept` that have a part on disk, or a descendant with one."""
    nodes = [group.rows for group in table.groups if not group.on_disk]
    if not nodes:
        return kept
    useful = kept.copy()
    useful[np.concatenate(nodes)] = False
    order = np.argsort(-table.depth, kind="stable")
    levels = np.flatnonzero(np.diff(-table.depth[order], prepend=1)).tolist()
    for start, end in pairwise([*levels, len(order)]):
        above = parent[order[start:end][useful[order[start:end]]]]
        useful[above[above >= 0]] = True
    return useful


@dataclass(frozen=True, slots=True)
class _NamedSlots:
    """The slots of all parts on disk, ascending: n of them."""

    rows: Int64s
    """[n]: which rows of the table name them."""
    slots: Int64s
    sizes: Int64s
    """[n]: bytes; may be impossible ones."""
    mixed: Bools

    @classmethod
    def of(cls, table: IndexTable) -> _NamedSlots:
        rows, slots, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        mixed = [np.zeros(0, np.bool_)]
        for group in table.groups:
            for part in group.on_disk:
                rows.append(group.rows)
                slots.append(group.slots[:, part])
                sizes.append(group.slot_bytes(part))
                mixed.append(np.full(len(group.rows), group.part_bytes[part] == OF_ANY_SIZE))
        order = np.argsort(named := np.concatenate(slots))
        return cls(
            np.concatenate(rows)[order], named[order], np.concatenate(sizes)[order], np.concatenate(mixed)[order]
        )

    def sound_rows(self, table: IndexTable, slabs: SlabFiles, wanted: Bools | None = None) -> Bools:
        """The readable rows of the table whose slots exist, are `wanted` [n] and overlap no other such row's."""
        good = slabs.exist(self.slots, self.sizes)
        if wanted is not None:
            good &= wanted
        sound = table.readable.copy()
        sound[self.rows[~good]] = False
        if len(clashing := self._overlapping(table, sound)):
            sound[clashing] = False
        return sound

    def claimed(self, chosen: Bools) -> ClaimedSlots:
        """The slots of the rows in the mask `chosen`."""
        if (mine := chosen[self.rows]).all():
            return self.slots, self.sizes, self.mixed
        return self.slots[mine], self.sizes[mine], self.mixed[mine]

    def _overlapping(self, table: IndexTable, sound: Bools) -> Int64s:
        """Rows in `sound` that overlap a row of less depth, or an earlier row of the same depth."""
        mine = sound[self.rows]
        rows, slots, sizes = self.rows[mine], self.slots[mine], self.sizes[mine]
        ends = slots + sizes // PAGE_BYTES
        apart = np.ones(len(rows), np.bool_)
        apart[1:] = slots[1:] >= np.maximum.accumulate(ends)[:-1]
        if apart.all():
            return np.zeros(0, np.int64)
        cluster = np.cumsum(apart)
        shared = np.flatnonzero(np.bincount(cluster)[cluster] > 1)
        named: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, start, end in zip(rows[shared].tolist(), slots[shared].tolist(), ends[shared].tolist(), strict=True):
            named[row].append((start, end))
        believed: list[tuple[int, int]] = []
        lost: list[int] = []
        for row in sorted(named, key=lambda row: (table.depth.item(row), row)):
            mine_of = sorted(named[row])
            if any(end > start for (_, end), (start, _) in pairwise(mine_of)) or any(
                _meets(believed, one) for one in mine_of
            ):
                lost.append(row)
                continue
            for one in mine_of:
                insort(believed, one)
        return np.array(lost, np.int64)


def _meets(ranges: list[tuple[int, int]], one: tuple[int, int]) -> bool:
    """Whether a range overlaps one of `ranges`, which are sorted and disjoint."""
    at = bisect_left(ranges, one)
    return (at > 0 and ranges[at - 1][1] > one[0]) or (at < len(ranges) and ranges[at][0] < one[1])
