"""Eviction: which copies may go, because no caller holds them and other copies or other prefixes suffice.

A row is *kept* while anything needs the block to exist (`keep`), and a group of it is *held* in a tier while somebody
relies on its bytes there (`holds`); holding bytes that are still on their way is allowed and protects them from the
moment they arrive. Every hold also keeps. Both columns are sums over the `Hold`s that exist (`placement/holds.py`): an
eviction scan reads them of a million rows at once. `check_integrity` compares them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.key_index import Rows
from prefixd.cache.index.residency import ALL_TIERS, DISK, LOCAL_TIERS, CopyColumns
from prefixd.cache.index.trie_table import TIERS
from prefixd.cache.rules import GroupMask, expired_groups


class EvictionColumns(CopyColumns):
    """Which blocks are held, used and wanted. Arguments as for `BlockTable`."""

    def hold(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> None:
        """Protects bytes in `tier`, present or on their way. Rows are distinct.

        Args:
            rows: [m] blocks.
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
        """Ends one hold on `groups` [m] of each row; who held them keeps the blocks."""
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
        """Marks blocks as used. Touching whole prefixes keeps a parent at least as recent as its children."""
        self.last_used[rows] = now_s

    # -- expiry: bytes that only shorter prefixes need ------------------------------------------------------------

    def expire(self, path: Rows, groups: int | None = None, ends: Sequence[int] = ()) -> None:
        """Of a prompt whose blocks are `path` some groups have been stored (a mask; all by default): what only shorter
        prefixes need of them may go first, but for prefixes of `ends` blocks: a prompt that ends inside `path`, which
        its answer continues, is likely to be asked again. Blocks that are pinned keep what was wanted of them.

        Prompts that share a beginning continue differently where they branch, so the end of the shared part is a prefix
        that is likely to be asked for again: what it needs is wanted, and wanted again if it had expired.

        Blocks of `path` that are of another namespace than its last one stay as they are: who stored this prompt has
        not stored them.
        """
        if self.has_rules and len(path):
            stays = self.pinned[path] | (self.namespace[path] != self.namespace[path[-1]])
            stored = np.where(stays, np.uint8(0), np.uint8(self.all_groups if groups is None else groups))
            expired = expired_groups(self.groups, len(path), self.branches(path, ends))
            self.expired[path] = (self.expired[path] & ~stored) | (expired & stored)

    def branches(self, path: Rows, ends: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """The lengths of prefixes of `path` that are likely to be asked for: where it branches, and those of `ends`."""
        branches = 1 + np.flatnonzero(self.children[path[:-1]] > 1)
        return np.concatenate([branches, [end for end in ends if 0 < end < len(path)]]).astype(np.int64)

    def revive(self, path: Rows) -> None:
        """A prompt continues after `path`: the bytes that it needs are wanted again."""
        if self.has_rules and len(path):
            self.expired[path] &= ~self.needed(len(path))

    # -- eviction -----------------------------------------------------------------------------------------------

    def evictable(self, tier: int, *, demotable: bool, among: Rows | slice | None = None) -> Rows:
        """Rows whose copy in `tier` may go now: not held, and no child has a copy there (leaves first).

        A copy that is the block's last may only go when the block itself may, or when some of it can be written a tier
        down.

        Args:
            tier: where.
            demotable: whether it can be written a tier down.
            among: different rows, or some from one row on; all by default.
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
        """[len(rows)]: the groups of each block that `tier` has and that not only shorter prefixes need."""
        wanted: GroupMask = self.there[rows, tier] & ~self.expired[rows]
        return wanted

    def last_copies(self, rows: Rows | slice, tier: int) -> npt.NDArray[np.bool_]:
        """[len(rows)]: of which rows no other tier has anything, or none has one of the `wanted` groups.

        A record on disk without bytes is no copy: a block has one when others continue it there. Of a block that is
        pinned, no copies are what a store has that others may delete from, and what memory has in place of the disk,
        since the block is to be there after a restart.
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
        """Counts some rows' blocks: those in each tier, those held there, and those in `tier` by namespace."""
        blocks, held = [0] * TIERS, [0] * TIERS
        for each in range(TIERS):
            here = (self.any_part[rows] & np.uint8(1 << each)) != 0
            blocks[each] = int(np.count_nonzero(here))
            held[each] = int(np.count_nonzero(self.held(rows, each) & here))
        here = (self.any_part[rows] & np.uint8(1 << tier)) != 0
        namespaces, counts = np.unique(self.namespace[rows][here], return_counts=True)
        return blocks, held, dict(zip(namespaces.tolist(), counts.tolist(), strict=True))

    def held(self, rows: Rows | slice, tier: int) -> npt.NDArray[np.bool_]:
        """[len(rows)]: of which rows any group is held in `tier`."""
        holds = self.holds[rows, tier]
        if len(self.groups) == 1:
            return np.asarray(holds[..., 0] > 0)
        return np.asarray((holds > 0).any(axis=-1))


def lasting_copies(tier: int) -> int:
    """The tiers, a bit each, whose copies of a pinned block count beside the one in `tier`: this host's own, and none
    beside the disk's, without which the block would not outlast a restart."""
    return 0 if tier == DISK else LOCAL_TIERS & ~(1 << tier)
