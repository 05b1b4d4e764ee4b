"""Audits a trie: compares every row with its parent and its own columns, and the counters with the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.steps import Steps
from prefixd.cache.audit.findings import Findings
from prefixd.cache.index.keys.key_index import Ordinals
from prefixd.cache.index.scan import memory_for_copies
from prefixd.cache.index.trie import NO_SLOT, NONE, TIERS, Rows, Trie
from prefixd.cache.index.trie_table import NOWHERE
from prefixd.cache.placement.retention import MOST_PRIORITY
from prefixd.cache.tiers import Tiers

_SLICE_ROWS = 1 << 12  # each row is checked in some 100 ways

Bools = npt.NDArray[np.bool_]


def audit_trie(found: Findings, trie: Trie, tiers: Tiers, known: Callable[[Ordinals], Bools]) -> Steps[None]:
    """Checks the rows in slices, and the counters in copies of the columns.

    `known`: which ordinals are of namespaces whose blocks belong to this trie.
    """
    for start in range(0, trie.rows, _SLICE_ROWS):
        rows = start + np.flatnonzero(trie.namespace[start : min(start + _SLICE_ROWS, trie.rows)] != NOWHERE)
        found.blocks += len(rows)
        found.demand_none(rows[~known(trie.namespace[rows])], f"{_where(trie)}rows of a namespace that is not known")
        _audit_places(found, trie, rows)
        _audit_copies(found, trie, rows, tiers)
        yield None
    yield from _audit_counts(found, trie)
    names = tiers.names
    for tier in range(TIERS):
        yield from _audit_counts_with_copies(found, trie, tier, names[tier])


def _where(trie: Trie) -> str:
    return f"trie {trie.ordinal}: "


def _audit_places(found: Findings, trie: Trie, rows: Rows) -> None:
    """Keys, parents and siblings of used rows."""
    where, n = _where(trie), trie.rows
    there = trie.find_all(trie.namespace[rows], trie.keys(rows))
    found.demand_none(rows[there != rows], f"{where}rows that are not found under their keys")
    parent = trie.parent[rows].astype(np.int64)
    first = parent < 0
    above = np.where(first, 0, np.clip(parent, 0, n - 1))
    lost = ~first & ((parent >= n) | (trie.namespace[above] == NOWHERE))
    found.demand_none(rows[lost], f"{where}rows that continue a block that does not exist")
    namespace = np.where(first, -1 - parent, trie.namespace[above])
    found.demand_none(
        rows[~lost & (namespace != trie.namespace[rows])], f"{where}rows that continue a block of another namespace"
    )
    depth = np.where(first, 0, trie.depth[above] + 1)
    found.demand_none(rows[~lost & (trie.depth[rows] != depth)], f"{where}rows with a wrong depth")

    before, behind = ~trie.previous_sibling[rows].astype(np.int64), ~trie.next_sibling[rows].astype(np.int64)
    linked = np.where(
        before < 0, trie.first_child[above] == rows, ~trie.next_sibling[np.clip(before, 0, n - 1)] == rows
    )
    linked |= first | lost
    linked &= (behind < 0) | (~trie.previous_sibling[np.clip(behind, 0, n - 1)] == rows)
    linked &= (behind < 0) | (trie.parent[np.clip(behind, 0, n - 1)] == parent)
    eldest = trie.first_child[rows].astype(np.int64)
    linked &= np.where(trie.children[rows] == 0, eldest < 0, trie.parent[np.clip(eldest, 0, n - 1)] == rows)
    found.demand_none(rows[~linked], f"{where}rows that are linked wrongly to their siblings or children")


def _audit_copies(found: Findings, trie: Trie, rows: Rows, tiers: Tiers) -> None:
    """The columns of used rows about their copies, and whether each row is needed."""
    where = _where(trie)
    whole, available = np.zeros(len(rows), np.uint8), np.zeros(len(rows), np.uint8)
    for tier in range(TIERS):
        bit, name = np.uint8(1 << tier), tiers.names[tier]
        has = trie.slots[rows, tier] != NO_SLOT
        some = has.any(axis=1)
        marked = (trie.any_part[rows] & bit) != 0
        if tiers.durable is not None and tier == tiers.durable.level:
            some |= marked  # a record without bytes: the block's descendants need it
        whole |= bit * has.all(axis=1)
        found.demand_none(rows[marked != some], f"{where}rows marked wrongly for the {name} tier")
        there = np.zeros(len(rows), np.uint8)
        for group in trie.groups:
            there |= np.uint8(group.mask) * has[:, list(group.parts)].all(axis=1)
        found.demand_none(
            rows[trie.there[rows, tier] != there], f"{where}rows with wrong KV groups for the {name} tier"
        )
        if trie.offered & (1 << tier):
            available |= there
        found.demand_none(
            rows[(trie.holds[rows, tier] < 0).any(axis=1)],
            f"{where}rows released more often than held in the {name} tier",
        )
    found.demand_none(
        rows[trie.available[rows] != available], f"{where}rows with KV groups that are not there as marked"
    )
    if len(trie.groups) == 1:
        nearest = np.full(len(rows), NONE, np.int8)
        for tier in reversed(range(TIERS)):
            nearest[(whole & trie.offered & (1 << tier)) != 0] = tier
        found.demand_none(rows[trie.nearest[rows] != nearest], f"{where}rows with a wrong nearest tier")
    needed = (trie.children[rows] != 0) | (trie.keep[rows] != 0) | trie.pinned[rows]
    found.demand_none(rows[(trie.any_part[rows] == 0) & ~needed], f"{where}rows without a copy that are not needed")
    priority = trie.priority[rows]
    retained = np.where(priority > 0, trie.groups_there(rows), np.uint8(0))
    found.demand_none(rows[trie.retained_groups[rows] != retained], f"{where}rows with wrong retained KV groups")
    found.demand_none(rows[np.abs(priority) > MOST_PRIORITY], f"{where}rows with a priority beyond {MOST_PRIORITY}")
    kept = trie.keep[rows] >= trie.holds[rows].max(axis=2).sum(axis=1)
    found.demand_none(rows[~kept], f"{where}rows that are held but not kept")


def _audit_counts(found: Findings, trie: Trie) -> Steps[None]:
    """Used and free rows, and the number of children of each."""
    columns = (*(trie.parent,) * 4, trie.priority, trie.retained_groups)
    copies = yield from memory_for_copies(*(column[: trie.rows] for column in columns))
    n, keys, where = trie.rows, len(trie), _where(trie)
    free_rows = copies.copy(np.frombuffer(trie.free, np.int32))
    by_namespace = trie.blocks_by_namespace()
    namespace, parent, children = (copies.copy(column[:n]) for column in (trie.namespace, trie.parent, trie.children))
    priority, retained_groups = copies.copy(trie.priority[:n]), copies.copy(trie.retained_groups[:n])
    prioritized, retained_bytes = trie.prioritized, dict(trie.retained_bytes)

    def count() -> None:
        used = namespace != NOWHERE
        blocks = int(np.count_nonzero(used))
        found.demand(keys == blocks, f"{where}{keys} keys lead to {blocks} rows")
        found.demand_none(free_rows[(free_rows < 0) | (free_rows >= n)], f"{where}free rows that do not exist")
        free = free_rows[(free_rows >= 0) & (free_rows < n)]
        found.demand_none(free[used[free]], f"{where}rows that are used and free at once")
        times = np.bincount(free, minlength=n)
        found.demand(
            blocks + len(free) == n and bool((times <= 1).all()),
            f"{where}{n} rows, but {blocks} used and {len(free)} free",
        )
        counted = _children(used, parent)
        found.demand_none(np.flatnonzero(used & (counted != children)), f"{where}rows that miscount their children")
        blocks = int(np.count_nonzero(priority))
        found.demand(
            prioritized == blocks, f"{where}{prioritized} blocks with a priority are counted, {blocks} are there"
        )
        retained = used & (retained_groups != 0)
        nbytes = np.bincount(namespace[retained], trie.group_bytes[retained_groups[retained]])
        there = {int(at): int(nbytes[at]) for at in np.flatnonzero(nbytes)}
        found.demand(there == retained_bytes, f"{where}{retained_bytes} bytes are retained by namespace, not {there}")
        homes = np.bincount(namespace[used], minlength=len(by_namespace))
        same = len(homes) == len(by_namespace) and bool((homes == by_namespace).all())
        found.demand(same, f"{where}blocks of namespaces that are miscounted")

    yield count


def _audit_counts_with_copies(found: Findings, trie: Trie, tier: int, name: str) -> Steps[None]:
    """The number of children of each row with a copy in a tier."""
    copies = yield from memory_for_copies(*(column[: trie.rows] for column in (trie.parent,) * 4))
    n = trie.rows
    namespace, parent, any_part, children = (
        copies.copy(column[:n]) for column in (trie.namespace, trie.parent, trie.any_part, trie.tier_children[:, tier])
    )

    def count() -> None:
        used = namespace != NOWHERE
        counted = _children(used & ((any_part & np.uint8(1 << tier)) != 0), parent)
        found.demand_none(
            np.flatnonzero(used & (counted != children)),
            f"{_where(trie)}rows that miscount their children in the {name} tier",
        )

    yield count


def _children(used: Bools, parent: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """[n]: the number of used rows with this parent."""
    n = len(used)
    return np.bincount(parent[used & (parent >= 0) & (parent < n)], minlength=n)
