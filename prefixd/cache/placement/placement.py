"""What is where: every copy entered into or dropped from a trie passes here, and its slots with it."""

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
from prefixd_swap import UseHistory
from prefixd_swap.tiers import MemoryTier, RemoteTier, Tier


class Placement:
    """Keeps tries and tiers in step.

    Args:
        tiers: the memory.
        clock: seconds; passed in so that tests own the time.
        uses: is told of what comes, goes and is asked for.
        use: counts the tenants' bytes.
        admit_uses: a block is written to disk when it was asked for again so often, or somebody wants it durable.
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
        self.lost: Counter[str] = Counter()  # blocks that could have been kept, by reason
        self.epoch = 0  # grows with every change of what is where
        self.changed = asyncio.Event()  # set when write-back may have work
        self.without_room: set[Tenant] = set()
        """Tenants of whose blocks write-back could write none when it last tried: there was no room on disk."""
        self.queued_blocks = 0  # in the CPU tier and not on disk
        self.queued_bytes_of: Counter[Tenant] = Counter()  # of these, by whom they belong to
        self.on_shorter_queue: Callable[[], None] = lambda: None
        """Called when fewer blocks wait to be written to disk than before."""

    @property
    def queued_bytes(self) -> int:
        """Bytes of the blocks that are in the CPU tier and wait to be written to disk."""
        return self.queued_bytes_of.total()

    # -- copies -------------------------------------------------------------------------------------------------

    def put(self, trie: Trie, rows: Rows, tier: Tier, slots: Slots) -> None:
        """Enters parts of m blocks into the trie; their slots, [m, parts], belong to the trie from here on."""
        before, now_s = self.to_write(trie, rows), self.clock()
        lacked = trie.slots[rows, tier.level] == NO_SLOT  # a store names the places of parts that it had, too
        new = trie.put_copies(rows, tier.level, slots, now_s)
        self.use.entered(trie, rows, tier, np.where(lacked, slots, NO_SLOT))
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
            slots: [m, parts], NO_SLOT for parts that did not come.

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
        """Drops bytes that nobody holds; returns how many blocks have lost some.

        Without `groups` the copies go as a whole, children before parents, and a block whose last copy this was goes
        with it. One that has to stay keeps its last copy; `with_page`, it keeps its place in the trie only, unless
        somebody keeps it. With `groups`, [m] masks, the bytes of these groups go and the blocks stay. `expendable`:
        they are to be computed again, so none of them counts as lost.
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
        # Of these another tier has something, as a record on disk, but not what is wanted: they stay in the trie.
        stays = last & (trie.any_part[rows] != bit)
        left, vanished, wanted = rows[last & ~stays], 0, Counter[Tenant]()
        # Again, because ancestors without copies may have gone with them, and then others are leaves.
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
        """Drops m blocks, children before parents, from every tier: each is removable once those before it are gone."""
        for tier in self.tiers:
            there = rows[(trie.any_part[rows] & np.uint8(1 << tier.level)) != 0]
            if len(there):
                self.discard_copies(trie, there, tier)
        trie.remove_all(rows)
        self.epoch += 1

    def discard_copies(self, trie: Trie, rows: Rows, tier: Tier) -> None:
        """Drops the copies of m blocks in `tier`, whoever holds them."""
        self._discard(trie, rows, tier, evicted=False)

    def _discard(self, trie: Trie, rows: Rows, tier: Tier, groups: GroupMask | None = None, *, evicted: bool) -> None:
        before = self.to_write(trie, rows)
        here = rows[trie.any_part[rows] & np.uint8(1 << tier.level) != 0]
        slots = trie.drop_copies(rows, tier.level, groups)
        self.use.left(trie, rows, tier, slots)
        left = here[trie.any_part[here] & np.uint8(1 << tier.level) == 0]
        if len(left) and tier is not self.tiers.remote:
            self.uses.removed(trie, left, tier.level, evicted=evicted)
        self._count_queue(trie, rows, before)
        if isinstance(tier, MemoryTier | RemoteTier):
            tier.free(slots)
        self.room_may_be_had()
        self.epoch += 1

    def room_may_be_had(self) -> None:
        """Something has changed by which there may be room on disk: who waits for that is looked at again."""
        if self.without_room:
            self.changed.set()

    def _admitted(self, trie: Trie, rows: Rows) -> Counter[Tenant]:
        """How many of these blocks were asked for often enough to be written to disk, by tenant."""
        admitted = rows[self.admits(trie, rows)]
        return Counter({tenant: len(its) for tenant, its in self.use.by_owner(trie, admitted)})

    def why_unwritten(self, tenant: Tenant, trie: Trie) -> str:
        """Why a block of a tenant could not be written to disk now, for `lost`."""
        if self.tiers.durable is None or not self.tiers.writes:
            return "disk out of service"
        room = self.use.room(tenant, self.tiers.durable)
        if room is not None and room < self.use.part_bytes(trie, self.tiers.durable).sum():
            return "its tenant is at its most of the disk tier"
        return "no room on disk"

    def sweep(self, trie: Trie, rows: Rows, tier: Tier | None = None) -> None:
        """Forgets blocks that lost their last copy while somebody kept them, once nobody does.

        `tier`: where they were held. A hold on disk is write-back's own, or another writer's: its end gives no room.
        """
        if self.without_room and self.tiers.durable is not None and tier is not self.tiers.durable:
            here_alone = trie.any_part[rows] == np.uint8(1 << self.tiers.durable.level)
            if (here_alone & (trie.keep[rows] == 0) & ~trie.pinned[rows]).any():
                self.room_may_be_had()
        leaves = rows[(trie.any_part[rows] == 0) & (trie.children[rows] == 0)]  # what these continue goes with them
        if len(leaves) and trie.remove_bare(leaves.tolist()):
            self.epoch += 1

    # -- which bytes are wanted ---------------------------------------------------------------------------------

    def touch(self, trie: Trie, path: Rows, counted: int = 0) -> None:
        """A prompt was found to continue after `path`: it counts as used, and what it needs is wanted. The first
        `counted` blocks were counted for the same request before."""
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
        """Some groups of a prompt (a mask; all by default) have been stored up to the end of `path`: what only shorter
        prefixes need of them may go first, but for prefixes of `ends` blocks."""
        if trie.has_rules:
            before = self.to_write(trie, path)
            trie.expire(path, groups, ends)
            self._count_queue(trie, path, before)

    # -- what waits to be written to disk -----------------------------------------------------------------------

    def to_write(self, trie: Trie, rows: Rows) -> GroupMask:
        """[len(rows)]: the groups of each block that are in the shared tier, not in the durable one, and wanted."""
        if self.tiers.durable is None:
            return np.zeros(len(rows), np.uint8)
        return trie.unwritten(rows, self.tiers.shared.level, self.tiers.durable.level, self.admit_uses)

    def admits(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which blocks were asked for often enough to be written to disk unasked."""
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
