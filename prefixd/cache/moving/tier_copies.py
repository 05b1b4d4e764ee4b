"""Copies blocks from one tier to another: between memories, from a store, or through the shared tier."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.copies import DiskCopies
from prefixd.cache.disk.writes import Write
from prefixd.cache.index.coded_columns import LossyCopies
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.moving.allocation import Allocation, Claim
from prefixd.cache.placement.layer_watch import LayerWatch
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots
from prefixd_swap import CopyEngine, TransferDroppedError
from prefixd_swap.tiers import MemoryCopies, MemoryTier, StoreTier, Tier, can_move
from prefixd_swap.transfers import piece_items

Bools = npt.NDArray[np.bool_]

Read = Callable[[Trie, Rows, Sequence[int], Slots, MemoryTier, Movement], Awaitable[Bools]]
"""(trie, rows, parts, slots, target, movement): see `DiskReads.read`."""

COPIED_AT_ONCE = 512
_STAGES = 3  # of a read to memory that a file cannot be read into: some are read while others are copied on


@dataclass(frozen=True, slots=True)
class _Way:
    """The source, target and purpose of a copy of blocks of one trie."""

    trie: Trie
    source: Tier
    target: MemoryTier
    claim: Claim


class Copying:
    """Copies blocks that the caller holds in their source.

    Args:
        placement: records the copies.
        allocation: allocates slots for them.
        engine: copies between memory spans.
        disk: reads and writes the durable tier.
        checksums: computes checksums of blocks that are copied from the compute to the shared tier.
    """

    def __init__(
        self,
        placement: Placement,
        allocation: Allocation,
        engine: CopyEngine,
        disk: DiskCopies,
        checksums: Checksums,
    ) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._allocation = allocation
        self._memory = MemoryCopies(engine, placement.tiers.transfers)
        self._disk = disk
        self._checksums = checksums
        self.read_remote: Read | None = None
        """Reads from the remote tier, where there is one."""

    async def copy(
        self,
        trie: Trie,
        rows: Rows,
        source: Tier,
        target: Tier,
        movement: Movement,
        groups: GroupMask | None = None,
        *,
        ahead: bool = False,
    ) -> int:
        """Copies rows, held in `source`, to `target`; returns how many arrived. If room is short, these are the first
        rows of each tenant.

        Args:
            trie: the blocks' trie.
            rows: [m] different blocks.
            source: a tier that has the `groups` of each.
            target: where to.
            movement: the movement that it is a part of.
            groups: [m] KV groups to copy; by default those that `source` has, `target` lacks and a prefix needs.
            ahead: see `Claim` and `Write`.
        """
        if isinstance(target, StoreTier):
            return await self._disk.writes.write(Write(trie, _memory(source), movement, ahead), rows)
        if not self._tiers.readable(source):
            return 0
        if groups is None:
            groups = trie.wanted(rows, source.level) & ~trie.there[rows, target.level]
            rows, groups = rows[groups != 0], groups[groups != 0]
        way = _Way(trie, source, _memory(target), Claim(movement, ahead=ahead))
        arrived = 0
        for tenant, mine in self._placement.use.places_by_owner(trie, rows):
            of_tenant = replace(way, claim=replace(way.claim, tenant=tenant))
            arrived += await self._copy_of_tenant(of_tenant, rows[mine], groups[mine])
        return arrived

    async def _copy_of_tenant(self, way: _Way, rows: Rows, groups: GroupMask) -> int:
        arrived = 0
        borders = 1 + np.flatnonzero(np.diff(groups))  # between blocks with different groups to copy
        at_once = COPIED_AT_ONCE if self._watch(way, rows) is None else len(rows)
        for start, end in pairwise([0, *borders.tolist(), len(rows)]):
            for first in range(start, end, at_once):
                some = rows[first : min(first + at_once, end)]
                came = await self._copy_alike(way, some, int(groups[start]))
                arrived += came
                if way.claim.movement.dropped or (came < len(some) and isinstance(way.source, MemoryTier)):
                    return arrived  # the movement was dropped, or there is no more room
        return arrived

    async def _copy_alike(self, way: _Way, rows: Rows, groups: int) -> int:
        """Copies the same groups of blocks of one tenant; returns how many arrived."""
        trie, source, target = way.trie, way.source, way.target
        parts = np.flatnonzero(trie.part_mask & np.uint8(groups)).tolist()
        near = self._slots_before(way, rows, parts)
        watch = self._watch(way, rows)
        taken = await self._allocation.allocate(target, _sizes(trie, parts), len(rows), way.claim, near)
        if len(taken) < len(rows):
            watch = None
        rows = rows[: len(taken)]
        arrived = np.zeros(len(rows), np.bool_)
        try:
            if isinstance(source, MemoryTier):
                old = trie.slots[rows, source.level][:, parts]
                arrived = await self._copy_memory(trie, parts, source, old, target, taken, way.claim.movement, watch)
            elif can_move(source, target):
                arrived = await self._read_from(source)(trie, rows, parts, taken, target, way.claim.movement)
            else:
                await self._read_staged(way, rows, parts, taken, arrived)
        finally:
            slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
            slots[:, parts] = taken
            if watch is None:
                target.free(slots[~arrived])
            else:
                come = bool(arrived.all())
                arrived = arrived & (trie.slots[rows, target.level, 0] == NO_SLOT)  # a run may have computed some
                if not watch.over(come, spare := slots[~arrived]):
                    target.free(spare)
            self._enter(way, rows[arrived], slots[arrived])
            if source is self._tiers.compute and target is self._tiers.shared:
                self._checksums.begin(trie, rows[arrived])
        return int(arrived.sum())

    async def _copy_memory(
        self,
        trie: Trie,
        parts: Sequence[int],
        source: MemoryTier,
        old: Slots,
        target: MemoryTier,
        taken: Slots,
        movement: Movement,
        watch: LayerWatch | None = None,
    ) -> Bools:
        """Copies `parts` of blocks in slots, [m, parts], to other slots, layer by layer if `watch` follows that.

        Returns which blocks were copied.

        Raises:
            SwapError: a copy failed.
        """
        rows = [trie.part_rows[part] for part in parts]
        if watch is None:
            copies = self._memory.submit(
                *(source, old, target, taken, _sizes(trie, parts), movement.urgency),
                deadline_s=movement.due_s,
                padded=rows,
            )
        else:
            watch.begun(taken)
            copies = self._memory.submit_layers(
                *(source, old[:, 0], target, taken[:, 0], watch.layers, watch.slabs, watch.arrived, movement.urgency),
                padded=rows[0] is not None,
            )
        results = await movement.run(copies)
        failed = [result for result in results if result is not None and not isinstance(result, TransferDroppedError)]
        if failed:
            raise failed[0]
        return np.array([result is None for result in results], np.bool_)

    def _watch(self, way: _Way, rows: Rows) -> LayerWatch | None:
        """What follows the copy of `rows`; None unless these are all blocks of a movement layer by layer."""
        watch, tiers = way.claim.movement.by_layers, self._tiers
        up = way.source is tiers.shared and way.target is tiers.compute  # it also runs the evictions for its room
        whole = watch is not None and len(rows) == watch.blocks and len(way.trie.part_bytes) == 1
        return watch if up and whole else None

    def _read_from(self, source: Tier) -> Read:
        """The function that reads blocks from a store."""
        return (
            self.read_remote if self.read_remote is not None and source is self._tiers.remote else self._disk.reads.read
        )

    def _slots_before(self, way: _Way, rows: Rows, parts: Sequence[int]) -> list[int]:
        """The slots in the target of the block before the first of `rows`, so that a prefix lies together."""
        parent = int(way.trie.parent[rows[0]]) if len(rows) else -1
        if parent < 0:
            return []
        near: list[int] = way.trie.slots[parent, way.target.level][list(parts)].tolist()
        return near

    def _enter(self, way: _Way, rows: Rows, slots: Slots) -> None:
        """Enters parts of m blocks that arrived, and marks parts as checksummed that the read has verified."""
        if not len(rows):
            return
        trie, target, durable = way.trie, way.target, self._tiers.durable
        lacked = (trie.slots[rows, target.level] == NO_SLOT) & (slots != NO_SLOT)
        self._placement.put_lacking(trie, rows, target, slots)
        if not isinstance(way.source, MemoryTier) and target is self._tiers.shared:
            if way.source is self._tiers.remote and durable is not None:  # parts on disk have the trie's checksums
                lacked &= trie.slots[rows, durable.level] == NO_SLOT
            trie.checksummed[rows] |= lacked

    async def _read_staged(self, way: _Way, rows: Rows, parts: Sequence[int], taken: Slots, arrived: Bools) -> None:
        """Reads blocks through the shared tier into memory that a file cannot be read into; sets `arrived` [m].

        A pipeline: some blocks are read while others are copied from the shared tier.
        """
        sizes, shared, movement = _sizes(way.trie, parts), self._tiers.shared, way.claim.movement
        lossy = LossyCopies.none(len(rows))
        claim, read_from = Claim(movement, way.claim.tenant), self._read_from(way.source)
        step = piece_items(sum(sizes), len(rows), at_least=_STAGES)
        starts = iter(range(0, len(rows), step))  # shared by the stages

        async def stage() -> None:
            for start in starts:
                end = min(start + step, len(rows))
                while start < end and not movement.dropped:
                    staged = await self._allocation.allocate(shared, sizes, end - start, claim)
                    try:
                        if not len(staged):
                            self._placement.lost["no room in the CPU tier to stage a read"] += end - start
                            return
                        here = np.arange(start, start + len(staged))
                        read = await read_from(way.trie, rows[here], parts, staged, shared, movement)
                        came = here[read]
                        lossy.note(way.trie, rows, came)
                        copied = await self._copy_memory(
                            way.trie, parts, shared, staged[read], way.target, taken[came], movement
                        )
                        arrived[came[copied]] = True
                    finally:
                        shared.free(staged)
                    start += len(staged)

        try:
            async with asyncio.TaskGroup() as group:  # when one fails, the others end before this raises
                for _ in range(_STAGES):
                    group.create_task(stage())
        finally:  # what else memory had of a block may have left meanwhile, and with it the block's marks
            lossy.restore(way.trie, rows, arrived)


def _sizes(trie: Trie, parts: Sequence[int]) -> list[int]:
    return [trie.part_bytes[part] for part in parts]


def _memory(tier: Tier) -> MemoryTier:
    """The tier as a memory tier; TypeError for a store."""
    if not isinstance(tier, MemoryTier):
        raise TypeError(f"the {tier.name} tier has no addresses")
    return tier
