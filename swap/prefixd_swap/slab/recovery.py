"""What of an index can be believed after a start: slots that exist, once, under parents that exist."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from prefixd_swap.slab.files import SlabFiles
from prefixd_swap.slab.records import FIRST_BLOCK, LOST_PARENT, Bools, IndexTable, Int64s, Records


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a start found, in blocks."""

    kept: int = 0
    lost_slots: int = 0
    """Dropped: a slot is gone, too small or another block's; or the record is unreadable."""
    lost_parents: int = 0
    """Dropped: the parent is not there, so no prompt can reach them (invariant: prefix-closed)."""
    index_damage: str = ""
    """Why the index was set aside, all its blocks with it; empty when it was good."""


def recover(table: IndexTable, slabs: SlabFiles, index_damage: str = "") -> tuple[Recovery, Records, list[bytes]]:
    """Claim the slots of the blocks that are whole; those blocks, and the index keys of the others."""
    parent = table.link()
    sound = table.readable & _have_slots(table, slabs)
    if len(twice := _named_twice(table, sound)):
        sound[twice] = False
    kept = prefix_closed(table.depth, parent, sound)
    lost_parents = int(np.count_nonzero(table.readable & ~kept & _parent_is_lost(parent, kept)))
    dropped = table.index_keys(~kept) + table.unreadable
    records = table.records(kept, parent)
    for group in records.groups:
        slabs.claim(group.slots[:, group.on_disk].ravel())
    return Recovery(len(records), len(dropped) - lost_parents, lost_parents, index_damage), records, dropped


def reconcile(table: IndexTable, known: Int64s) -> tuple[Int64s, list[bytes]]:
    """The slots of the blocks whose slots are all `known` and no other block's, and the index keys of all others."""
    wanted = np.zeros(table.rows, np.bool_)
    for group in table.groups:
        wanted[group.rows] = np.isin(group.slots[:, group.on_disk], known).all(axis=1)
    if len(twice := _named_twice(table, wanted)):
        wanted[twice] = False
    slots = [group.slots[wanted[group.rows]][:, group.on_disk].ravel() for group in table.groups]
    return np.concatenate([np.zeros(0, np.int64), *slots]), table.index_keys(~wanted) + table.unreadable


def prefix_closed(depth: Int64s, parent: Int64s, sound: Bools) -> Bools:
    """Those of `sound` whose ancestors are all in it. A parent is less deep than its child, so one pass does."""
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


def _have_slots(table: IndexTable, slabs: SlabFiles) -> Bools:
    sound = np.zeros(table.rows, np.bool_)
    for group in table.groups:
        there = np.full(len(group.rows), bool(group.on_disk))
        for part in group.on_disk:
            there &= slabs.exist(group.slots[:, part], group.part_bytes[part])
        sound[group.rows] = there
    return sound


def _named_twice(table: IndexTable, sound: Bools) -> Int64s:
    """Rows that name a slot which a less deep row names too."""
    slots = table.slots()
    slots.sort()
    if not (slots[1:] == slots[:-1]).any():
        return np.zeros(0, np.int64)
    pairs = [(group.rows, group.slots[:, part]) for group in table.groups for part in group.on_disk]
    rows, named = (np.concatenate(column) for column in zip(*pairs, strict=True))
    rows, named = rows[sound[rows]], named[sound[rows]]
    order = np.argsort(table.depth[rows], kind="stable")
    _, first = np.unique(named[order], return_index=True)
    again = np.ones(len(order), np.bool_)
    again[first] = False
    twice: Int64s = rows[order[again]]
    return twice
