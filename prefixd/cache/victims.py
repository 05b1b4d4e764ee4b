"""Who has to go: the eviction policy's choice over all tries, leaves first.

The tables are scanned in slices, and others use the tries between two slices. Only what may go anyway is looked at
closely: what was found is checked, scored and chosen again at the end, in one turn, so that it is true at the moment
when it is returned. A caller that awaits nothing before it acts can rely on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from prefixd.cache.groups import GroupMask
from prefixd.cache.index.trie import LOCAL_TIERS, NO_SLOT, REMOTE, TIERS, Rows, Trie, lasting_copies
from prefixd.cache.lowest_rows import LowestRows, Scores
from prefixd.cache.scan import SCANNED_AT_ONCE, slices
from prefixd.pacer import Pacer, give_way
from prefixd_swap import EvictionPolicy, choose_victims

# A row of any trie as one number: the trie's ordinal above the row.
_ROW_BITS = 40
_ROW_MASK = (1 << _ROW_BITS) - 1

_SPARE = 64  # candidates beyond twice the number wanted, for those that may not go any more at the end


async def find_expired(
    tries: Sequence[Trie], tier: int, want: int, *, likely: bool = False
) -> list[tuple[Trie, Rows, GroupMask]]:
    """Up to `want` blocks of each trie that have bytes in `tier` which only shorter prefixes need and nobody holds, the
    least recently used first; with each the groups that may go.

    `likely`: those of prefixes that are likely to be asked for, too, as far as a longer prefix does without them.
    """
    groups_that_go = _unheld if likely else _expired
    pacer = Pacer(SCANNED_AT_ONCE)
    lowest: list[tuple[Trie, LowestRows]] = []
    for trie in tries:
        if not trie.has_rules:
            continue
        lowest.append((trie, LowestRows(2 * want + _SPARE)))
        for part in slices(trie.rows):
            bytes_here = trie.there[part, tier]
            rows = part.start + np.flatnonzero(bytes_here if likely else trie.expired[part] & bytes_here)
            rows = rows[groups_that_go(trie, rows, tier) != 0]
            lowest[-1][1].offer(rows, trie.last_used[rows], rows)
            await pacer.worked(part.stop - part.start)
    found = []
    for trie, candidates in lowest:
        rows = candidates.ascending()
        groups = groups_that_go(trie, rows, tier)
        rows, groups = rows[groups != 0][:want], groups[groups != 0][:want]
        if len(rows):
            found.append((trie, rows, groups))
    return found


def _expired(trie: Trie, rows: Rows, tier: int) -> GroupMask:
    """[len(rows)]: the groups of each block whose bytes in `tier` only shorter prefixes need and nobody holds."""
    return _without_held(trie, rows, tier, trie.expired[rows] & trie.there[rows, tier])


def _unheld(trie: Trie, rows: Rows, tier: int) -> GroupMask:
    """[len(rows)]: the groups of each block with bytes in `tier` that longer prefixes do without, and nobody holds."""
    groups = np.where(trie.pinned[rows], np.uint8(0), trie.there[rows, tier] & np.uint8(trie.partial_groups))
    return _without_held(trie, rows, tier, groups)


def _without_held(trie: Trie, rows: Rows, tier: int, groups: GroupMask) -> GroupMask:
    for group in trie.groups:
        groups &= ~np.where(trie.holds[rows, tier, group.bit] > 0, np.uint8(group.mask), np.uint8(0))
    return groups


async def can_free(
    tries: Sequence[Trie], tier: int, slots: int, *, demotable: bool, weigh: Callable[[int], int] = lambda nbytes: 1
) -> bool:
    """Whether evictions, one after the other, can free so many slots in `tier`, where a part of so many bytes counts
    as `weigh` says.

    A scan in slices, which ends where there are enough. Others use the tries between two slices, so it is an estimate.
    """
    bit, pacer = np.uint8(1 << tier), Pacer(SCANNED_AT_ONCE)
    for trie in list(tries):
        weights = np.array([weigh(nbytes) for nbytes in trie.part_bytes], np.int64)
        for part in slices(trie.rows):
            if slots <= 0:
                return True
            rows = part.start + np.flatnonzero(trie.any_part[part] & bit)
            goes = ~trie.held(rows, tier)
            if not demotable:
                goes &= (trie.any_part[rows] != bit) | ((trie.keep[rows] == 0) & ~trie.pinned[rows])
            slots -= int(((trie.slots[rows[goes], tier] != NO_SLOT) @ weights).sum())
            if trie.has_rules:
                groups = _unheld(trie, rows[~goes], tier)
                slots -= int((((groups[:, None] & trie.part_mask) != 0) @ weights).sum())
            await pacer.worked(part.stop - part.start)
    return slots <= 0


async def find_victims(
    tries: Sequence[Trie],
    tier: int,
    want: int,
    policy: EvictionPolicy,
    *,
    demotable: bool,
    spare_copies: bool = False,
) -> list[tuple[Trie, Rows]]:
    """The `want` blocks that the policy sends out of `tier` first, by trie, each trie's leaves before their parents.

    Args:
        tries: all tries, by ordinal.
        tier: the tier that needs room.
        want: how many, at most some thousand; fewer are returned when no more may go.
        policy: gives every block a score, lowest goes first.
        demotable: a block's last copy may go too, because it will be written a tier down before.
        spare_copies: spare blocks that are in a tier above as well.
    """
    if want <= 0:
        return []
    bit = 1 << tier
    above = bit - 1 if spare_copies else 0

    def may_go(trie: Trie, among: Rows | slice) -> tuple[Rows, Scores]:
        rows = trie.evictable(tier, demotable=demotable, among=among)
        rows = rows[(trie.any_part[rows] & np.uint8(above)) == 0]
        return rows, policy.scores(trie, rows, tier)

    pacer = Pacer(SCANNED_AT_ONCE)
    while True:
        lowest = LowestRows(2 * want + _SPARE)
        for trie in list(tries):
            for part in slices(trie.rows):
                rows, scores = may_go(trie, part)
                ids = rows | (trie.ordinal << _ROW_BITS)
                lowest.offer(ids, scores, ids)
                await pacer.worked(part.stop - part.start)
        candidates = lowest.ascending()
        await give_way()
        chosen = _choose(tries, tier, want, candidates, may_go, policy, above=above, demotable=demotable)
        if len(chosen) or not len(candidates):  # else all candidates were taken meanwhile; there may be others
            return [
                (trie, chosen[mine] & _ROW_MASK)
                for trie in tries
                if (mine := chosen >> _ROW_BITS == trie.ordinal).any()
            ]


def _choose(
    tries: Sequence[Trie],
    tier: int,
    want: int,
    candidates: Rows,
    may_go: Callable[[Trie, Rows | slice], tuple[Rows, Scores]],
    policy: EvictionPolicy,
    *,
    above: int,
    demotable: bool,
) -> Rows:
    """Chooses among `candidates`, and the parents that become leaves with them, in one turn."""
    bit = 1 << tier
    ids: list[Rows] = [np.empty(0, np.int64)]
    scores: list[Scores] = [np.empty(0, np.float64)]
    for trie in tries:
        rows, its_scores = may_go(trie, np.sort(candidates[candidates >> _ROW_BITS == trie.ordinal] & _ROW_MASK))
        ids.append(rows | (trie.ordinal << _ROW_BITS))
        scores.append(its_scores)
    views = [_Columns(trie, tier) for trie in tries]
    gone: dict[int, int] = {}  # children that leave this tier as victims, by parent
    vanished: dict[int, int] = {}  # those of them that had no other copy and go nowhere

    def reveal(identity: int) -> tuple[int, float] | None:
        ordinal, row = identity >> _ROW_BITS, identity & _ROW_MASK
        trie, columns = tries[ordinal], views[ordinal]
        leaves = 1
        vanishes = columns.any_part[row] == bit and not (demotable and columns.wanted(row))
        while True:
            parent = columns.parent[row]
            if parent < 0:
                return None
            up = parent | (ordinal << _ROW_BITS)
            gone[up] = gone.get(up, 0) + leaves
            vanished[up] = vanished.get(up, 0) + vanishes
            protected = columns.keep[parent] or columns.pinned[parent] or columns.children[parent] > vanished[up]
            some = columns.any_part[parent]
            if some or protected:
                break
            row, leaves = parent, 0  # it has no copy, and goes with the last of its children
        if gone[up] < columns.tier_children[parent] or not some & bit or columns.is_held(parent):
            return None
        if some & above:
            return None
        may_stay = not columns.is_last(parent) or (demotable and columns.wanted(parent))
        if protected if not may_stay else not leaves:  # what may stay was revealed by the last that left the tier
            return None
        return up, policy.score(trie, parent, tier)

    return np.array(choose_victims(want, np.concatenate(ids), np.concatenate(scores), reveal), np.int64)


class _Columns:
    """A trie's columns for access by row, which takes a third of the time that numpy takes. Good for one turn of the
    event loop: columns grow."""

    __slots__ = (
        *("any_part", "children", "keep", "parent", "pinned", "tier_children"),
        *("_elsewhere", "_expired", "_holds", "_lasting", "_other_tiers", "_remote", "_there"),
    )

    def __init__(self, trie: Trie, tier: int) -> None:
        self.any_part = trie.any_part.data
        self.children = trie.children.data
        self.keep = trie.keep.data
        self.parent = trie.parent.data
        self.pinned = trie.pinned.data
        self.tier_children = trie.tier_children[:, tier].data
        self._there = trie.there[:, tier].data
        self._expired = trie.expired.data
        self._lasting = lasting_copies(tier)
        self._elsewhere = [trie.there[:, other].data for other in range(TIERS) if other not in (tier, REMOTE)]
        self._remote = trie.there[:, REMOTE].data
        self._holds = [trie.holds[:, tier, group].data for group in range(trie.holds.shape[2])]
        self._other_tiers = LOCAL_TIERS & ~(1 << tier)

    def is_held(self, row: int) -> bool:
        """Whether somebody holds the copy of a KV group in the tier."""
        return any(holds[row] for holds in self._holds)

    def wanted(self, row: int) -> int:
        """See `Trie.wanted`."""
        return self._there[row] & ~self._expired[row]

    def is_last(self, row: int) -> bool:
        """See `Trie.last_copies`."""
        if self.pinned[row] and not self._lasting:
            return True
        lacking = self.wanted(row)
        for there in self._elsewhere:
            lacking &= ~there[row]
        others = self._other_tiers
        if not self.pinned[row]:
            lacking &= ~self._remote[row]
            others |= 1 << REMOTE
        return bool(lacking) or not self.any_part[row] & others
