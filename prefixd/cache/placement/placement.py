"""Records where blocks are: enters every copy into its trie or drops it, together with its slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.holds import Holds
from prefixd.cache.placement.tenant_use import TenantUse
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots, Tiers
from prefixd.observability.eviction_journal import EvictionJournal
from prefixd_swap import UseHistory
from prefixd_swap.tiers import MemoryTier, RemoteTier, Tier


class Placement:
    """Keeps tries and tiers in step.

    Args:
        tiers: the memory.
        clock: seconds; passed in so that tests own the time.
        uses: gets every block that is entered, dropped or used.
        use: counts the tenants' bytes.
        admit_uses: a block is written to disk after this many uses, or if a caller wants it durable.
    """

    def __init__(
        self, tiers: Tiers, clock: Callable[[], float], uses: UseHistory, use: TenantUse, admit_uses: int = 0
    ) -> None:
        self.tiers = tiers
        self.use = use
        self.uses = uses
        self.admit_uses = admit_uses
        self.clock = clock
        self.holds = Holds(self.sweep, use.held)
        self.lost: Counter[str] = Counter()  # blocks lost that could have been kept, by reason
        self.evictions = EvictionJournal()
        self.epoch = 0  # grows with every change of a copy
        self.changed = asyncio.Event()  # set when write-back may have work
        self.without_room: set[Tenant] = set()
        """Tenants without room on disk: write-back could not write any of their blocks when it last tried."""
        self.queued_blocks = 0  # in the CPU tier and not on disk
        self.queued_bytes_of: Counter[Tenant] = Counter()  # bytes of these, by their tenant
        self.on_shorter_queue: Callable[[], None] = lambda: None
        """Called when fewer blocks wait to be written to disk than before."""

    # -- copies -------------------------------------------------------------------------------------------------

    def put(self, trie: Trie, rows: Rows, tier: Tier, slots: Slots) -> None:
        """Enters parts of m blocks into the trie, which owns their slots, [m, parts], from now on."""
        before, now_s = self.to_write(trie, rows), self.clock()
        lacked = trie.slots[rows, tier.level] == NO_SLOT  # a store returns the slots of parts that it had before, too
        new = trie.put_copies(rows, tier.level, slots, now_s)
        self.use.count_cached(trie, rows, tier, np.where(lacked, slots, NO_SLOT), 1)
        if len(new) and tier is not self.tiers.remote:
            self.uses.admitted(trie, new, tier.level, now_s)
        self._count_queue(trie, rows, before)
        if isinstance(tier, MemoryTier):
            tier.entered(slots)
        self.epoch += 1

    def put_lacking(self, trie: Trie, rows: Rows, tier: MemoryTier, slots: Slots) -> npt.NDArray[np.bool_]:
        """Enters the parts that m blocks lack in `tier` and releases the other slots.

        Args:
            trie: the blocks' trie.
            rows: [m] different blocks.
            tier: where.
            slots: [m, parts], NO_SLOT for parts that did not arrive.

        Returns:
            [m]: which blocks lacked any of these parts.
        """
        have = trie.slots[rows, tier.level] != NO_SLOT
        spare = slots[have & (slots != NO_SLOT)]
        fresh = np.where(have, NO_SLOT, slots)
        lacked: npt.NDArray[np.bool_] = (fresh != NO_SLOT).any(axis=1)
        if lacked.any():
            self.put(trie, rows[lacked], tier, fresh[lacked])
        tier.free(spare)
        return lacked

    def drop(
        self,
        trie: Trie,
        rows: Sequence[int] | Rows,
        tier: Tier,
        groups: GroupMask | None = None,
        *,
        with_page: bool = False,
        expendable: bool = False,
    ) -> int:
        """Drops bytes in `tier` that are not held; returns the number of blocks that lost some.

        Without `groups` whole copies are dropped, children before parents, and a block without another copy is removed
        from the trie. If it cannot be removed, it keeps its last copy; `with_page`, it loses the copy and keeps
        its row, unless it is kept. With `groups`, [m] masks, the bytes of these groups are dropped and the blocks stay.
        `expendable`: blocks do not count as lost.
        """
        chosen: Rows = np.array(rows, np.int64)
        if groups is None:
            return self._drop_copies(trie, chosen, tier, with_page, expendable)
        free = groups & trie.there[chosen, tier.level]
        for group in trie.groups:
            free &= ~np.where(trie.holds[chosen, tier.level, group.bit] > 0, np.uint8(group.mask), np.uint8(0))
        chosen, free = chosen[free != 0], free[free != 0]
        if len(chosen):
            self._discard(trie, chosen, tier, free, evicted=not expendable)
            self.tiers.counters[tier.level].evicted += len(chosen)
        return len(chosen)

    def _drop_copies(self, trie: Trie, rows: Rows, tier: Tier, with_page: bool, expendable: bool) -> int:
        bit = np.uint8(1 << tier.level)
        may = ((trie.any_part[rows] & bit) != 0) & ~trie.held(rows, tier.level)
        rows = rows[may]
        last = trie.last_copies(rows, tier.level)
        others = rows[~last]
        if len(others):
            self._discard(trie, others, tier, evicted=not expendable)
        dropped = len(others)
        # Another tier has a part of these, or a record, but not all wanted bytes: they stay in the trie.
        stays = last & (trie.any_part[rows] != bit)
        left, vanished, wanted = rows[last & ~stays], 0, Counter[Tenant]()
        # Repeat: ancestors without copies may have been removed too, so that other blocks are leaves now.
        while len(going := trie.all_removable(left.tolist())):
            wanted += self._admitted(trie, going)
            self._discard(trie, going, tier, evicted=not expendable)
            trie.remove_all(going)
            vanished += len(going)
            left = left[trie.any_part[left] == bit]
        some = rows[stays]
        left = np.concatenate([left, some]) if with_page else some[trie.children[some] == 0]
        left = left[(trie.keep[left] == 0) & ~trie.pinned[left]]
        if len(left):
            wanted += self._admitted(trie, left)
            self._discard(trie, left, tier, evicted=not expendable)
            vanished += len(left)
        dropped += vanished
        if not expendable and tier is not self.tiers.durable and self.tiers.durable is not None:
            for tenant, blocks in wanted.items():
                self.lost[f"evicted before it was written: {self.why_unwritten(tenant, trie)}"] += blocks
        self.tiers.counters[tier.level].evicted += dropped
        self.epoch += 1
        return dropped

    def discard(self, trie: Trie, rows: Rows) -> None:
        """Drops m blocks, children before parents, from all tiers; each is removable after those before it."""
        for tier in self.tiers:
            there = rows[(trie.any_part[rows] & np.uint8(1 << tier.level)) != 0]
            if len(there):
                self.discard_copies(trie, there, tier)
        trie.remove_all(rows)
        self.epoch += 1

    def discard_copies(self, trie: Trie, rows: Rows, tier: Tier) -> None:
        """Drops the copies of m blocks in `tier`, even if they are held."""
        self._discard(trie, rows, tier, evicted=False)

    def _discard(self, trie: Trie, rows: Rows, tier: Tier, groups: GroupMask | None = None, *, evicted: bool) -> None:
        before = self.to_write(trie, rows)
        here = rows[trie.any_part[rows] & np.uint8(1 << tier.level) != 0]
        self.use.count_cached(trie, rows, tier, trie.leaving_slots(rows, tier.level, groups), -1)
        slots = trie.drop_copies(rows, tier.level, groups)
        left = here[trie.any_part[here] & np.uint8(1 << tier.level) == 0]
        if len(left) and tier is not self.tiers.remote:
            self.uses.removed(trie, left, tier.level, evicted=evicted)
        gone = left[trie.any_part[left] == 0]
        if len(gone):
            self.evictions.enter(trie.keys(gone), tier.level, self.clock())
        self._count_queue(trie, rows, before)
        if isinstance(tier, MemoryTier | RemoteTier):
            tier.free(slots)
        self.retry_without_room()
        self.epoch += 1

    def retry_without_room(self) -> None:
        """Has write-back try the tenants without room again, since there may be room on disk now."""
        if self.without_room:
            self.changed.set()

    def _admitted(self, trie: Trie, rows: Rows) -> Counter[Tenant]:
        """The number of these blocks that were used often enough to be written to disk, by tenant."""
        admitted = rows[self.admits(trie, rows)]
        return Counter({tenant: len(its) for tenant, its in self.use.by_owner(trie, admitted)})

    def why_unwritten(self, tenant: Tenant, trie: Trie) -> str:
        """Why a block of a tenant cannot be written to disk now, as a reason in `lost`."""
        if self.tiers.durable is None or not self.tiers.writes:
            return "disk out of service"
        room = self.use.room(tenant, self.tiers.durable)
        if room is not None and room < self.use.part_bytes(trie, self.tiers.durable).sum():
            return "its tenant is at its most of the disk tier"
        return "no room on disk"

    def sweep(self, trie: Trie, rows: Rows, tier: Tier | None = None) -> None:
        """Forgets blocks that have no copy and are not kept any more, after the end of a hold.

        `tier`: where they were held. A hold on disk belongs to write-back or another writer; its end frees no room.
        """
        if self.without_room and self.tiers.durable is not None and tier is not self.tiers.durable:
            here_alone = trie.any_part[rows] == np.uint8(1 << self.tiers.durable.level)
            if (here_alone & (trie.keep[rows] == 0) & ~trie.pinned[rows]).any():
                self.retry_without_room()
        leaves = rows[(trie.any_part[rows] == 0) & (trie.children[rows] == 0)]  # their ancestors without copies go too
        if len(leaves) and trie.remove_bare(leaves.tolist()):
            self.epoch += 1

    # -- wanted bytes -------------------------------------------------------------------------------------------

    def touch(self, trie: Trie, path: Rows, counted: int = 0) -> None:
        """Marks the blocks of `path` as used, and the bytes that a prompt needs behind it as wanted again.

        The first `counted` blocks were counted for the same request before.
        """
        now_s, queued = self.clock(), self.queued_blocks
        before = self.to_write(trie, path) if trie.has_rules or self.admit_uses else None
        self.uses.accessed(trie, path[counted:], now_s)
        trie.last_used[path] = now_s
        if trie.has_rules:
            trie.revive(path)
        if before is not None:
            self._count_queue(trie, path, before)
            if self.queued_blocks > queued:
                self.changed.set()

    def extend(self, trie: Trie, path: Rows, groups: int | None = None, ends: Sequence[int] = ()) -> None:
        """Notes that `groups` of a prompt (a mask; all by default) are stored up to the end of `path`.

        Bytes of these groups that only shorter prefixes need are evicted first, except those that prefixes of `ends`
        blocks need.
        """
        if trie.has_rules:
            before = self.to_write(trie, path)
            trie.expire(path, groups, ends)
            self._count_queue(trie, path, before)

    # -- the queue to the disk ----------------------------------------------------------------------------------

    def to_write(self, trie: Trie, rows: Rows) -> GroupMask:
        """[len(rows)]: the groups of each block that are in the shared tier, not in the durable one, and wanted."""
        if self.tiers.durable is None:
            return np.zeros(len(rows), np.uint8)
        return trie.unwritten(rows, self.tiers.shared.level, self.tiers.durable.level, self.admit_uses)

    def admits(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which blocks were used often enough for write-back to write them."""
        admitted: npt.NDArray[np.bool_] = trie.uses[rows] >= self.admit_uses
        return admitted

    def _count_queue(self, trie: Trie, rows: Rows, before: GroupMask) -> None:
        after = self.to_write(trie, rows)
        more_blocks = int(np.count_nonzero(after)) - int(np.count_nonzero(before))
        self.queued_blocks += more_blocks
        more = trie.group_bytes[after] - trie.group_bytes[before]
        for tenant, its in self.use.places_by_owner(trie, rows):
            self.queued_bytes_of[tenant] += int(more[its].sum())
        if more_blocks < 0:
            self.on_shorter_queue()
