"""Who has to go: the eviction policy's choice over all tries, leaves first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd.cache.groups import GroupMask
from prefixd.cache.index.trie import Rows, Trie
from prefixd_swap import EvictionPolicy, choose_victims

# A row of any trie as one number: the trie's ordinal above the row.
_ROW_BITS = 40
_ROW_MASK = (1 << _ROW_BITS) - 1


def find_expired(tries: Sequence[Trie], tier: int, want: int) -> list[tuple[Trie, Rows, GroupMask]]:
    """Up to `want` blocks that have bytes in `tier` which only shorter prefixes need and nobody holds, the least
    recently used first; with each the groups that may go."""
    found = []
    for trie in tries:
        if not trie.has_rules:
            continue
        n = trie.rows
        groups = trie.expired[:n] & trie.there[:n, tier]
        rows = np.flatnonzero(groups)
        groups = groups[rows]
        for group in trie.groups:
            groups &= ~np.where(trie.holds[rows, tier, group.bit] > 0, np.uint8(group.mask), np.uint8(0))
        rows, groups = rows[groups != 0], groups[groups != 0]
        if len(rows) > want:
            chosen = np.argpartition(trie.last_used[rows], want - 1)[:want]
            rows, groups = rows[chosen], groups[chosen]
        if len(rows):
            found.append((trie, rows, groups))
    return found


def find_victims(
    tries: Sequence[Trie],
    tier: int,
    want: int,
    policy: EvictionPolicy,
    *,
    demotable: bool,
    spare_copies: bool = False,
    among: Sequence[Trie] | None = None,
) -> list[tuple[Trie, Rows]]:
    """The `want` blocks that the policy sends out of `tier` first, by trie, each trie's leaves before their parents.

    Args:
        tries: all tries, by ordinal.
        tier: the tier that needs room.
        want: how many; fewer are returned when no more may go.
        policy: gives every block a score, lowest goes first.
        demotable: a block's last copy may go too, because it will be written a tier down before.
        spare_copies: spare blocks that are in a tier above as well.
        among: choose in these tries alone.
    """
    bit = 1 << tier
    above = bit - 1 if spare_copies else 0
    ids: list[Rows] = [np.empty(0, np.int64)]
    scores = [np.empty(0, np.float64)]
    for trie in tries if among is None else among:
        rows = trie.evictable(tier, demotable=demotable)
        rows = rows[(trie.any_part[rows] & np.uint8(above)) == 0]
        ids.append(rows | (trie.ordinal << _ROW_BITS))
        scores.append(policy.scores(trie.last_used[rows], trie.entered[rows, tier]))
    gone: dict[int, int] = {}  # children that leave this tier as victims, by parent
    vanished: dict[int, int] = {}  # those of them that had no other copy and go nowhere

    def reveal(identity: int) -> tuple[int, float] | None:
        trie, row = tries[identity >> _ROW_BITS], identity & _ROW_MASK
        leaves, vanishes = 1, bool(trie.any_part[row] == bit and not (demotable and trie.has(row, tier)))
        while True:
            parent = int(trie.parent[row])
            if parent < 0:
                return None
            up = parent | (trie.ordinal << _ROW_BITS)
            gone[up] = gone.get(up, 0) + leaves
            vanished[up] = vanished.get(up, 0) + vanishes
            protected = trie.keep[parent] or trie.pinned[parent] or trie.children[parent] > vanished[up]
            some = int(trie.any_part[parent])
            if some or protected:
                break
            row, leaves = parent, 0  # it has no copy, and goes with the last of its children
        if gone[up] < trie.tier_children[parent, tier] or trie.holds[parent, tier].any() or not some & bit:
            return None
        if some & above:
            return None
        may_stay = some != bit or (demotable and trie.has(parent, tier))
        if protected if not may_stay else not leaves:  # what may stay was revealed by the last that left the tier
            return None
        here = slice(parent, parent + 1)
        return up, float(policy.scores(trie.last_used[here], trie.entered[here, tier])[0])

    chosen = np.array(choose_victims(want, np.concatenate(ids), np.concatenate(scores), reveal), np.int64)
    return [(trie, chosen[mine] & _ROW_MASK) for trie in tries if (mine := chosen >> _ROW_BITS == trie.ordinal).any()]
