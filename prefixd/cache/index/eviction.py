"""Eviction: which copies may go, because no caller holds them and other copies or other prefixes suffice.

`keep` counts the reasons for a block to exist, and `holds` those for bytes of a KV group to stay in a tier. Bytes that
are still being copied can be held; then they are protected from the moment they arrive. Every hold also keeps. Both
columns are sums over the existing `Hold`s (`placement/holds.py`), since an eviction scan reads them for a million rows
at once. `check_integrity` compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.key_index import Rows
from prefixd.cache.index.residency import ALL_TIERS, LOCAL_TIERS, CopyColumns
from prefixd.cache.index.trie_table import DISK, TIERS
from prefixd.cache.rules import GroupMask, expired_groups


class EvictionColumns(CopyColumns):
    """Which blocks are held, used and wanted. Arguments as for `BlockTable`."""

    def hold(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> None:
        """Protects bytes in `tier`, present or being copied.

        Args:
            rows: [m] different blocks.
            tier: where.
            wanted: [m] groups of each that are held; all by default.
        """
        self._change_holds(rows, tier, wanted, 1)

    def unhold(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> None:
        """Ends one hold of each row."""
        self._change_holds(rows, tier, wanted, -1)

    def _change_holds(self, rows: Rows, tier: int, wanted: GroupMask | None, change: int) -> None:
        if wanted is None:
            self.holds[rows, tier] += change
        else:
            self._change_group_holds(rows, tier, wanted, change)
        self.keep[rows] += change

    def release(self, rows: Rows, tier: int, groups: GroupMask) -> None:
        """Ends one hold on `groups`, [m], of each row, but still keeps the blocks."""
        self._change_group_holds(rows, tier, groups, -1)

    def _change_group_holds(self, rows: Rows, tier: int, groups: GroupMask, change: int) -> None:
        for group in self.groups:
            self.holds[rows[(groups & np.uint8(group.mask)) != 0], tier, group.bit] += change

    def retain(self, rows: Rows) -> None:
        """Keeps the blocks in existence, wherever they are."""
        self.keep[rows] += 1

    def unretain(self, rows: Rows) -> None:
        """Ends one retention of each row."""
        self.keep[rows] -= 1

    def touch(self, rows: Rows, now_s: float) -> None:
        """Marks blocks as used. Callers touch whole prefixes, so a parent is at least as recent as its children."""
        self.last_used[rows] = now_s

    # -- expiry: bytes that only shorter prefixes need ------------------------------------------------------------

    def expire(self, path: Rows, groups: int | None = None, ends: Sequence[int] = ()) -> None:
        """Marks bytes as expired that only shorter prefixes than `path` need, after `groups` of it were stored (a mask;
        all by default). Expired bytes are evicted first.

        Bytes stay wanted, or become wanted again, if a likely prefix needs them. Likely prefixes are those of `ends`
        blocks (a prompt that ends inside `path`, before its answer, is likely to be sent again) and those that end at a
        branch of the trie (other prompts share that beginning). Pinned blocks do not change.

        Blocks of another namespace than the last one do not change either: this prompt's writer has not stored them.
        """
        if self.has_rules and len(path):
            stays = self.pinned[path] | (self.namespace[path] != self.namespace[path[-1]])
            stored = np.where(stays, np.uint8(0), np.uint8(self.all_groups if groups is None else groups))
            expired = expired_groups(self.groups, len(path), self.branches(path, ends))
            self.expired[path] = (self.expired[path] & ~stored) | (expired & stored)

    def branches(self, path: Rows, ends: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """The lengths of the likely prefixes of `path`: where it branches, and those in `ends`."""
        branches = 1 + np.flatnonzero(self.children[path[:-1]] > 1)
        return np.concatenate([branches, [end for end in ends if 0 < end < len(path)]]).astype(np.int64)

    def revive(self, path: Rows) -> None:
        """Marks the bytes that a prompt needs behind `path` as wanted again."""
        if self.has_rules and len(path):
            self.expired[path] &= ~self.needed(len(path))

    # -- eviction -----------------------------------------------------------------------------------------------

    def evictable(self, tier: int, *, demotable: bool, among: Rows | slice | None = None) -> Rows:
        """Rows whose copy in `tier` may be evicted now: not held, and no child has a copy there (leaves first).

        The last copy of a block may be evicted only if the block may be removed or written a tier down.

        Args:
            tier: where.
            demotable: whether blocks can be written a tier down.
            among: different rows, or a slice; all by default.
        """
        rows = slice(0, self.rows) if among is None else among
        leaves = (self.any_part[rows] & np.uint8(1 << tier)) != 0
        leaves &= self.tier_children[rows, tier] == 0
        chosen: Rows = rows.start + np.flatnonzero(leaves) if isinstance(rows, slice) else rows[leaves]
        chosen = chosen[~self.held(chosen, tier)]  # few are left of a large table
        may_leave = ~self.last_copies(chosen, tier)  # the block has another copy,
        may_leave |= (self.children[chosen] == 0) & (self.keep[chosen] == 0) & ~self.pinned[chosen]  # or may vanish,
        if demotable:
            may_leave |= self.wanted(chosen, tier) != 0  # or may go down
        return chosen[may_leave]

    def wanted(self, rows: Rows | slice, tier: int) -> GroupMask:
        """[len(rows)]: the groups of each block that `tier` has and that have not expired."""
        wanted: GroupMask = self.there[rows, tier] & ~self.expired[rows]
        return wanted

    def last_copies(self, rows: Rows | slice, tier: int) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which rows have no part in another tier, or lack a `wanted` group there.

        A record on disk without bytes is not a copy; it exists because the block has children on disk. For a pinned
        block, copies in a shared store do not count, since other hosts may delete them, and copies in memory do not
        replace one on disk, since the block must survive a restart.
        """
        others = (self.any_part[rows] & np.uint8(ALL_TIERS & ~(1 << tier))) != 0
        if (pinned := self.pinned[rows]).any():
            others &= ~pinned | ((self.any_part[rows] & np.uint8(lasting_copies(tier))) != 0)
        lacking = self.wanted(rows, tier)
        for other in range(TIERS):
            if other == tier:
                continue
            if not lasting_copies(tier) & (1 << other):
                lacking &= ~self.there[rows, other] | np.where(pinned, np.uint8(self.all_groups), np.uint8(0))
            else:
                lacking &= ~self.there[rows, other]
        return np.asarray(~others | (lacking != 0))

    def count_copies(self, rows: slice, tier: int) -> tuple[list[int], list[int], dict[int, int]]:
        """Counts the blocks of some rows: in each tier, held in each tier, and in `tier` by namespace."""
        blocks, held = [0] * TIERS, [0] * TIERS
        for each in range(TIERS):
            here = (self.any_part[rows] & np.uint8(1 << each)) != 0
            if each == DISK:
                here &= self.there[rows, DISK] != 0  # a record without parts is there for its children alone
            blocks[each] = int(np.count_nonzero(here))
            held[each] = int(np.count_nonzero(self.held(rows, each) & here))
        here = (self.any_part[rows] & np.uint8(1 << tier)) != 0
        namespaces, counts = np.unique(self.namespace[rows][here], return_counts=True)
        return blocks, held, dict(zip(namespaces.tolist(), counts.tolist(), strict=True))

    def held(self, rows: Rows | slice, tier: int) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which rows have a group that is held in `tier`."""
        holds = self.holds[rows, tier]
        if len(self.groups) == 1:
            return np.asarray(holds[..., 0] > 0)
        return np.asarray((holds > 0).any(axis=-1))


def lasting_copies(tier: int) -> int:
    """The tiers, a bit each, whose copy lets a pinned block lose the one in `tier`: the other tiers of this host. None
    for the disk tier, since only its copy survives a restart."""
    return 0 if tier == DISK else LOCAL_TIERS & ~(1 << tier)
