"""Copies: which tier has which parts of each block, and columns derived from that.

`there`, `available`, `nearest` and `tier_children` are derived from `slots`, `any_part` and `parent`. They are stored
because a match and an eviction read them for up to a million rows at once; `check_integrity` compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.coded_columns import CodedColumns
from prefixd.cache.index.keys.key_index import Rows
from prefixd.cache.index.trie_table import CPU, DISK, GPU, NO_SLOT, NONE, REMOTE, TIERS, add_each
from prefixd.cache.rules import GroupMask, GroupRule

ALL_TIERS = (1 << TIERS) - 1
LOCAL_TIERS = ALL_TIERS & ~(1 << REMOTE)
"""The tiers of this host, a bit each: no other host can delete copies there."""


class CopyColumns(CodedColumns):
    """Where the bytes of blocks are. Arguments as for `BlockTable`."""

    def __init__(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule] | None = None) -> None:
        super().__init__(block_tokens, part_bytes, rules)
        self.offered = ALL_TIERS  # tiers whose copies count as available
        self.observer: Callable[[Any, Rows], None] | None = None
        """Called with the trie and rows whose tiers may have changed."""

    def put_copies(self, rows: Rows, tier: int, slots: npt.NDArray[np.int64], now_s: float) -> Rows:
        """Records the slots, [m, parts], of m different blocks in `tier`; NO_SLOT leaves a part unchanged.

        Returns the blocks that had no part there before.
        """
        place = self.slots[rows, tier]
        place = np.where(slots != NO_SLOT, slots, place)
        self.slots[rows, tier] = place
        new: Rows = rows[(self.any_part[rows] & np.uint8(1 << tier)) == 0]
        if len(new):
            self.any_part[new] |= np.uint8(1 << tier)
            self.entered[new, tier] = now_s
            self._count_children(new, tier, 1)
        self._note(rows, tier, place)
        return new

    def leaving_slots(self, rows: Rows, tier: int, groups: int | GroupMask | None = None) -> npt.NDArray[np.int64]:
        """The slots that `drop_copies` would free, with the same arguments."""
        place: npt.NDArray[np.int64] = self.slots[rows, tier]
        if groups is None:
            return place
        wanted = np.broadcast_to(np.asarray(groups, np.uint8), (len(rows),))
        return np.where((wanted[:, None] & self.part_mask) != 0, place, NO_SLOT)

    def drop_copies(self, rows: Rows, tier: int, groups: int | GroupMask | None = None) -> npt.NDArray[np.int64]:
        """Forgets the bytes of `groups` of m different blocks in `tier`.

        Args:
            rows: [m] blocks.
            tier: where.
            groups: [m] masks, or one for all blocks; all groups by default.

        Returns:
            [m, parts]: the slots that are free now, NO_SLOT for parts that had none or stay.
        """
        freed = self.leaving_slots(rows, tier, groups)
        gone = freed != NO_SLOT
        place = np.where(gone, NO_SLOT, self.slots[rows, tier])
        self.slots[rows, tier] = place
        if tier == CPU:
            self.checksummed[rows] &= ~gone
        if tier == DISK:
            self._forget_coded(rows, gone)
        elif tier != REMOTE:
            self._forget_decoded(rows, (GPU, CPU))
        bit = np.uint8(1 << tier)
        left = rows[((self.any_part[rows] & bit) != 0) & (place == NO_SLOT).all(axis=1)]
        if len(left) and (groups is None or tier != DISK):  # on disk the block's record stays: its children need it
            self.any_part[left] &= ~bit
            self._count_children(left, tier, -1)
        self._note(rows, tier, place)
        return freed

    def _count_children(self, rows: Rows, tier: int, change: int) -> None:
        parents = self.parent[rows]
        inner = parents[parents >= 0]
        if len(inner) == 1:
            self.tier_children[inner[0], tier] += change
        elif len(inner):
            add_each(self.tier_children[:, tier], inner, change)

    def _note(self, rows: Rows, tier: int, place: npt.NDArray[np.int64]) -> None:
        """Updates the columns derived from the slots, [m, parts], of `rows` in `tier`."""
        has = place != NO_SLOT
        there = np.zeros(len(rows), np.uint8)
        for group in self.groups:
            there |= np.uint8(group.mask) * has[:, list(group.parts)].all(axis=1)
        changed = rows[there != self.there[rows, tier]]
        self.there[rows, tier] = there
        self._offer(rows)
        if self.prioritized:
            self._count_retained(rows)
        if self.observer is not None and len(changed):
            self.observer(self, changed)

    def _offer(self, rows: Rows) -> None:
        """Updates `available` and `nearest` of `rows`."""
        available = np.zeros(len(rows), np.uint8)
        nearest = np.full(len(rows), NONE, np.int8)
        for tier in reversed(range(TIERS)):
            if self.offered & (1 << tier):
                there = self.there[rows, tier]
                available |= there
                nearest[there != 0] = tier
        if len(self.groups) > 1:
            nearest = np.where(available == 0, NONE, self._nearest(rows, available))
        self.available[rows], self.nearest[rows] = available, nearest

    def _nearest(self, rows: Rows, wanted: GroupMask) -> npt.NDArray[np.int8]:
        """The nearest tier that has, together with those above it, all `wanted` groups; 0 if none is wanted."""
        nearest = np.zeros(len(rows), np.int8)
        lacking = wanted.copy()
        for tier in range(TIERS):
            if self.offered & (1 << tier):
                nearest[(lacking & self.there[rows, tier]) != 0] = tier
                lacking &= ~self.there[rows, tier]
        nearest[lacking != 0] = NONE
        return nearest

    def offer(self, tier: int, offered: bool) -> None:
        """Sets whether copies in `tier` count as available; blocks without another copy match only then."""
        self.offered = self.offered | 1 << tier if offered else self.offered & ~(1 << tier)
        self._offer(np.arange(self.rows))
        if self.observer is not None:
            self.observer(self, self.copies(tier))

    def set_checksums(self, rows: Rows, checksums: npt.NDArray[np.uint64]) -> None:
        """Records the checksums, [m, parts], of the copies on disk of m blocks.

        CPU copies with other checksums do not count as checksummed any more.
        """
        self.checksummed[rows] &= self.checksums[rows] == checksums
        self.checksums[rows] = checksums

    def set_part_checksums(self, rows: Rows, parts: Rows, checksums: npt.NDArray[np.uint64]) -> None:
        """Records the checksums of m parts in the CPU tier, except of parts that are on disk with another one."""
        alone = (self.slots[rows, DISK, parts] == NO_SLOT) | (self.coded_bytes[rows, parts] > 0)
        self.checksums[rows[alone], parts[alone]] = checksums[alone]
        self.checksummed[rows, parts] = self.checksums[rows, parts] == checksums

    def available_here(self, rows: Rows) -> GroupMask:
        """[len(rows)]: the groups that are available in a tier of this host."""
        here = np.zeros(len(rows), np.uint8)
        for tier in range(TIERS):
            if self.offered & LOCAL_TIERS & (1 << tier):
                here |= self.there[rows, tier]
        return here

    def unwritten(self, rows: Rows | slice, source: int, target: int, admit_uses: int = 0) -> GroupMask:
        """[len(rows)]: the KV groups of each block that the level `source` has, `target` lacks, and a prefix needs.

        0 for blocks with fewer than `admit_uses` uses. A shared store never lacks bytes that came from a lossy copy:
        the disk or the store has that copy, and no host may get them as exact ones, or altered once more.
        """
        groups: GroupMask = self.there[rows, source] & ~self.there[rows, target] & ~self.expired[rows]
        if target == REMOTE and self.has_coded:
            groups &= ~self.decoded[rows]
        if admit_uses:
            groups[self.uses[rows] < admit_uses] = 0
        return groups

    def has(self, row: int, tier: int) -> bool:
        """Whether `tier` has every part of the block."""
        return bool(self.there[row, tier] == self.all_groups)

    def copies(self, tier: int) -> Rows:
        """Rows with every part in `tier`."""
        return np.flatnonzero(self.there[: self.rows, tier] == self.all_groups)
