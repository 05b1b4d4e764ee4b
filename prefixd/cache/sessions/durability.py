"""Makes cached prefixes durable: the whole prefix is on disk when the call returns."""

from __future__ import annotations

import numpy as np

from prefixd.base.errors import ExhaustedError, PreconditionError
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.mover import Mover
from prefixd.cache.rules import GroupMask
from prefixd_swap.tiers import StoreTier


class Durability:
    """Writes prefixes to disk for callers that wait.

    Args:
        mover: writes blocks.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._tiers = mover.tiers
        self._holds = mover.placement.holds

    async def persist(self, trie: Trie, path: Rows) -> int:
        """Writes the blocks of `path`, from the start of a prompt on, to disk; returns their number.

        Raises:
            PreconditionError: there is no disk tier.
            ExhaustedError: the disk tier has no room, for this tenant or for all, or is out of service.
        """
        if self._tiers.durable is None:
            raise PreconditionError("persist without a disk tier; set disk.bytes")
        with self._holds.hold("persist", trie, path):
            await self.write(trie, path)
        return len(path)

    async def write(self, trie: Trie, path: Rows) -> None:
        """As `persist`, for blocks that the caller holds; does nothing without a disk tier."""
        durable = self._tiers.durable
        if durable is None:
            return
        needed = trie.needed(len(path))
        for source in reversed(self._tiers.memories):  # memory that a file can be written from first
            if self._tiers.exists(source):
                todo = path[(trie.lacking(path, durable.level, needed) & trie.there[path, source.level]) != 0]
                if len(todo):
                    with self._holds.hold("durable commit", trie, todo, source):
                        await self._mover.write(trie, todo, source)
        torn = int(np.count_nonzero(needed & ~trie.available[path]))
        if torn:
            raise PreconditionError(
                f"{torn} of the blocks lack parts that others have yet to commit, so they cannot be durable; what was "
                "committed is kept - ask for durable in the commit that completes them"
            )
        if (lacking := trie.lacking(path, durable.level, needed)).any():
            self._refuse_durable(trie, path, lacking, durable)

    def _refuse_durable(self, trie: Trie, path: Rows, lacking: GroupMask, durable: StoreTier) -> None:
        """Raises the ExhaustedError that says why a cached prefix is not on disk. `lacking`: [len(path)] KV groups."""
        use, missing = self._mover.use, path[lacking != 0]
        what = f"{len(path)} blocks of the prompt are cached, but {len(missing)} of them are not on disk"
        tier = f"the disk tier ({durable.capacity_bytes} bytes) has no room for them"
        if trouble := self._tiers.troubles.of_tier(durable):
            raise ExhaustedError(f"{what}: {tier}: {trouble}")
        owner, mine = use.places_by_owner(trie, missing)[0]
        block_bytes = use.footprint(durable, trie.part_bytes)
        room = use.room(owner, durable)
        if room is not None and room < use.group_bytes(trie, durable)[lacking[lacking != 0][mine]].sum():
            used = use.used_bytes(owner, durable)
            raise owner.refusal(
                "disk_most",
                f"{what}: it has {used} of {used + room} bytes of the disk tier, and none of its other blocks there "
                "may be evicted",
                "make a shorter prefix durable, or have others of its prefixes unpinned",
            )
        kept = use.kept_from(owner, durable)
        if kept and len(path) * block_bytes <= durable.capacity_bytes:
            owner.refused["disk_guaranteed"] += 1
            raise ExhaustedError(
                f"tenant {owner.name}: {what}: {tier}, and {kept} bytes of it are pinned by, or guaranteed to, others "
                f"({use.guaranteed(owner, durable)} guaranteed to {owner.name}, limit "
                f"tenants.{owner.name}.disk_guaranteed); make a shorter prefix durable, or have the operator unpin "
                "prefixes of others, lower their guarantees (`prefixd tenants set`) or raise disk.bytes"
            )
        pinned_here = int(np.count_nonzero(trie.pinned[path])) * block_bytes
        pinned = "unpin other prefixes or " if use.held_bytes(owner, durable) > pinned_here else ""
        raise ExhaustedError(f"{what}: {tier}; {pinned}raise disk.bytes")
