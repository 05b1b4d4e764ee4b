"""Writes blocks to the durable tier in pieces, and syncs each while the store does not change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.health import DiskHealth
from prefixd.cache.disk.metadata import DiskMetadata
from prefixd.cache.disk.records import DiskRecords
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.movement import Movement, UrgentLock, to_the_end
from prefixd.cache.placement.paths import find_ancestry
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd.observability.measurements import Timings
from prefixd_swap import DiskFullError, StorageError, SwapError, TransferDroppedError
from prefixd_swap.tiers import MemoryTier, StoreTier
from prefixd_swap.transfers import PIECE_BYTES, piece_items

MakeRoom = Callable[..., Awaitable[bool]]
"""`Room.make`."""


@dataclass(frozen=True, slots=True)
class Write:
    """How to write blocks of one trie.

    Attributes:
        trie: the blocks' trie.
        source: where their bytes are.
        movement: the purpose and urgency.
        ahead: evict only blocks that no other tier has: a write ahead of need must not cost another block its copy.
        evict: false: use only free room.
        piece_bytes: the most bytes to write and sync together.
    """

    trie: Trie
    source: MemoryTier
    movement: Movement
    ahead: bool = False
    evict: bool = True
    piece_bytes: int = PIECE_BYTES


class DiskWrites:
    """Writes blocks to the durable tier.

    Args:
        placement: records where blocks are.
        records: names blocks on disk.
        checksums: computes checksums of blocks in memory.
        metadata: keeps namespaces and pins.
        health: handles failures.
        lock: serializes changes of the store.
    """

    make_room: MakeRoom
    """Makes room in the durable tier; set after construction."""
    timings: Timings
    """Measures the writes; set after construction."""

    def __init__(
        self,
        placement: Placement,
        records: DiskRecords,
        checksums: Checksums,
        metadata: DiskMetadata,
        health: DiskHealth,
        lock: UrgentLock,
    ) -> None:
        self._placement = placement
        self._store = cast("StoreTier", placement.tiers.durable)  # without one, nothing is written
        self._records = records
        self._checksums = checksums
        self._metadata = metadata
        self._health = health
        self._lock = lock
        self.written_bytes = 0
        """Bytes of blocks written since the start."""
        self.written_blocks = 0
        """Blocks with such bytes; one whose KV groups are written apart counts each time."""

    async def write(self, how: Write, rows: Rows) -> int:
        """Writes rows, held in their source, to disk; returns the number that became durable.

        Writes the KV groups of a block that the source has, the disk lacks, and a prefix needs. Parents come first, and
        no ancestor is evicted for a descendant, so that the disk is node-closed after a crash. A tenant without room
        does not stop the writes of others.
        """
        written = 0
        for tenant, its in self._placement.use.by_owner(how.trie, rows):
            written += await to_the_end(self._write(how, its, tenant))
        return written

    async def _write(self, how: Write, rows: Rows, tenant: Tenant) -> int:
        rows = rows[np.argsort(how.trie.depth[rows], kind="stable")]
        piece_bytes = max(how.piece_bytes, self._store.least_piece_bytes)
        written, step = 0, write_batch(how.trie, len(rows), piece_bytes)
        for start in range(0, len(rows), step):
            await give_way()
            async with self._lock.hold(how.movement):
                if not (start or how.ahead):  # a caller waits: try now, before the next probe
                    await self._health.revive_locked()
                if not self._store.writable or how.movement.dropped:
                    break
                batch, left = await self._write_piece(how, rows, rows[start : start + step], tenant)
            written += len(batch) - len(left)
            if len(left):
                break
        return written

    async def _write_piece(self, how: Write, rows: Rows, piece: Rows, tenant: Tenant) -> tuple[Rows, Rows]:
        """Writes the blocks of a piece of `rows` that the disk lacks. The caller has the lock.

        Returns these blocks, and those of them without room.
        """
        trie = how.trie
        batch = self._unwritten(how, piece)
        await self._checksums.wait(trie, batch)
        try:
            await self._metadata.save_namespaces(trie, batch)
            await self._record_parents(how, batch)
            left = await self._fit_batch(how, rows, batch, tenant)
            if len(left):  # a smaller block may have found room that its parent did not
                await self._record_parents(how, batch[~np.isin(batch, left)])
            await self._metadata.pin_locked(trie, batch[trie.pinned[batch]], True)
        except StorageError as error:
            self._health.write_failed(error)
            left = self._unwritten(how, batch)
        return batch, left

    async def _record_parents(self, how: Write, rows: Rows) -> None:
        """Stores records without bytes of the ancestors of `rows` that have none and are not among `rows`: no prefix
        needs their bytes, or they were evicted after `rows` were chosen.

        Includes ancestors beyond such a parent, even if among `rows`: there may be no room for them.
        """
        store, trie = self._store, how.trie
        parents = trie.parent[rows].astype(np.int64)
        parents = self._unrecorded(trie, parents[parents >= 0])
        parents = parents[~np.isin(parents, rows)]
        if not len(parents):
            return
        bare = self._unrecorded(trie, await find_ancestry(trie, parents))
        bare, step = bare[np.argsort(trie.depth[bare], kind="stable")], write_batch(trie, len(bare))
        for start in range(0, len(bare), step):
            batch = bare[start : start + step]
            blocks = self._records.new_blocks(trie, batch, how.source, np.zeros(len(batch), np.uint8))
            results = await how.movement.run(
                store.submit_write(blocks, how.movement.urgency, count=len(blocks), nbytes=0)
            )
            _raise_first(results)
            self._placement.put(trie, batch, store, np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64))

    def _unrecorded(self, trie: Trie, rows: Rows) -> Rows:
        """Those of `rows` that have no record."""
        bare: Rows = rows[(trie.any_part[rows] & np.uint8(1 << self._store.level)) == 0]
        return bare

    def _unwritten(self, how: Write, rows: Rows) -> Rows:
        """Those of `rows` with bytes that the source has, the disk lacks and a prefix needs."""
        lacking: Rows = rows[self._to_write(how, rows) != 0]
        return lacking

    def _to_write(self, how: Write, rows: Rows) -> GroupMask:
        return how.trie.unwritten(rows, how.source.level, self._store.level)

    async def _fit_batch(self, how: Write, rows: Rows, batch: Rows, tenant: Tenant) -> Rows:
        """Writes a batch, and evicts blocks if it may and must; returns the rows without room."""
        store, trie = self._store, how.trie
        if self._placement.use.never_fits(tenant, store, self._placement.use.footprint(store, trie.part_bytes)):
            return batch
        some, beyond = self._within_most(how, batch, tenant)
        try:
            left = await self._write_batch(how, some)
        except DiskFullError as error:
            if not await store.has_shrunk():
                raise
            await store.try_write()  # before evicting blocks in vain
            self._health.shrunk(error)
            left = some
        while how.evict and (len(left) or len(beyond)) and not how.movement.dropped:
            family = await find_ancestry(trie, rows)
            own = not len(left)
            with self._placement.holds.hold("eviction", trie, family, store):
                want = len(beyond if own else left)
                if not await self.make_room(
                    store, trie.part_bytes, want, how.movement, tenant, ahead=how.ahead, own=own
                ):
                    break
            await give_way()
            some, beyond = self._within_most(how, np.concatenate([left, beyond]), tenant)
            left = await self._write_batch(how, some)
        return np.concatenate([left, beyond])

    def _within_most(self, how: Write, batch: Rows, tenant: Tenant) -> tuple[Rows, Rows]:
        """Splits a batch: the first rows that fit in their tenant's remaining room on disk; the others."""
        use = self._placement.use
        room = use.room(tenant, self._store)
        if room is None:
            return batch, batch[:0]
        nbytes = np.cumsum(use.group_bytes(how.trie, self._store)[self._to_write(how, batch)])
        border = int(np.searchsorted(nbytes, room, "right"))
        return batch[:border], batch[border:]

    async def _write_batch(self, how: Write, batch: Rows) -> Rows:
        """Writes a batch; returns the rows without room."""
        if not len(batch):
            return batch
        trie, urgency = how.trie, how.movement.urgency
        groups = self._to_write(how, batch)
        blocks = self._records.new_blocks(trie, batch, how.source, groups)
        piece_bytes = max(how.piece_bytes, self._store.least_piece_bytes)
        write = self._store.submit_write(
            blocks, urgency, count=len(blocks), nbytes=sum(trie.part_bytes), piece_bytes=piece_bytes
        )
        begun_s = self._placement.clock()
        results = await how.movement.run(write)
        self.timings.save_s.observe(self._placement.clock() - begun_s, "write")
        where = [None if isinstance(result, SwapError) else result for result in results]
        stored = np.array([parts is not None for parts in where], np.bool_)
        slots = np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64)
        checksums = trie.checksums[batch]
        for at, parts in enumerate(where):
            for part, stored_part in enumerate(parts or ()):
                if stored_part is not None:
                    slots[at, part], checksums[at, part] = stored_part.slot, stored_part.checksum
        written = batch[stored]
        trie.set_checksums(written, checksums[stored])
        if how.source is self._placement.tiers.shared:
            trie.checksummed[written] |= (trie.part_mask & groups[stored][:, None]) != 0
        self._placement.put(trie, written, self._store, slots[stored])
        self.written_blocks += int(np.count_nonzero(groups[stored]))
        self.written_bytes += int(trie.group_bytes[groups[stored]].sum())
        _raise_first(results)
        return batch[~stored]


def _raise_first(results: list[Any]) -> None:
    """Raises the first error of a transfer, unless the transfer was dropped.

    Clears `results`: a kept error keeps its traceback, and with it all that its frames refer to.
    """
    error = next((each for each in results if isinstance(each, SwapError | StorageError)), None)
    if isinstance(error, TransferDroppedError):
        error = None
    results.clear()
    if error is not None:
        try:
            raise error
        finally:
            del error


def write_batch(trie: Trie, blocks: int, piece_bytes: int = PIECE_BYTES) -> int:
    """How many of `blocks` to write under one lock: those that fit in one piece."""
    return piece_items(sum(trie.part_bytes), blocks, most_bytes=piece_bytes)
