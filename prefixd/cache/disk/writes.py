"""Blocks written to the durable tier, in pieces, each written and synced while nothing else changes the store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from prefixd.base.pacer import give_way
from prefixd.base.tenants import Tenant
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.health import DiskHealth
from prefixd.cache.disk.metadata import DiskMetadata
from prefixd.cache.disk.records import DiskRecords
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.movement import Movement, UrgentLock, to_the_end
from prefixd.cache.placement.paths import find_ancestry
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd_swap import DiskFullError, StorageError, SwapError, TransferDroppedError
from prefixd_swap.tiers import MemoryTier, StoreTier
from prefixd_swap.transfers import PIECE_BYTES, piece_items

MakeRoom = Callable[..., Awaitable[bool]]
"""As `Room.make`."""


@dataclass(frozen=True, slots=True)
class Write:
    """How blocks of one trie are written.

    Attributes:
        trie: the blocks' trie.
        source: where their bytes are.
        movement: what they are written for.
        ahead: room is made by evicting only blocks that live on disk alone: what is written ahead of need must not cost
            another block its copy.
        evict: else they get free room only.
        piece_bytes: the most that is written and synced together.
    """

    trie: Trie
    source: MemoryTier
    movement: Movement
    ahead: bool = False
    evict: bool = True
    piece_bytes: int = PIECE_BYTES


class DiskWrites:
    """Writes blocks.

    Args:
        placement: where copies are entered.
        records: the blocks' names on disk.
        checksums: of what is in memory.
        metadata: what the index knows beside the blocks.
        health: is told of failures.
        lock: orders whatever changes the store.
    """

    make_room: MakeRoom
    """Makes room in the durable tier; set once there is something that does."""

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
        """Bytes of blocks that were written since the start."""

    async def write(self, how: Write, rows: Rows) -> int:
        """Writes rows, held in their source, to disk; returns how many became durable.

        Of each block the KV groups are written that the source has, the disk lacks, and a prefix still needs. Parents
        come first, and no ancestor is evicted for a descendant, so that what survives a crash is node-closed. Where
        there is no room for more of one tenant's, others' are written all the same.
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
                if not (start or how.ahead):  # somebody waits for it: try now, whenever the next probe is due
                    await self._health.revive_locked()
                if not self._store.takes or how.movement.dropped:
                    break
                batch, left = await self._write_piece(how, rows, rows[start : start + step], tenant)
            written += len(batch) - len(left)
            if len(left):
                break
        return written

    async def _write_piece(self, how: Write, rows: Rows, piece: Rows, tenant: Tenant) -> tuple[Rows, Rows]:
        """Writes what the disk lacks of a piece of `rows`, for who has the lock; returns these, and those of them for
        which there was no room."""
        trie = how.trie
        batch = self._unwritten(how, piece)
        await self._checksums.wait(trie, batch)
        try:
            await self._metadata.save_namespaces(trie, batch)
            await self._record_parents(how, batch)
            left = await self._fit_batch(how, rows, batch, tenant)
            if len(left):  # there may have been room for a smaller block, and not for its parent
                await self._record_parents(how, batch[~np.isin(batch, left)])
            await self._metadata.pin_locked(trie, batch[trie.pinned[batch]], True)
        except StorageError as error:
            self._health.write_failed(error)
            left = self._unwritten(how, batch)
        return batch, left

    async def _record_parents(self, how: Write, rows: Rows) -> None:
        """Stores records without bytes of the blocks that `rows` continue, as far as these have none and are not among
        them: they have no bytes that are wanted, or were evicted after `rows` were chosen to be written.

        So it does of all blocks before those, which may be among `rows`: for these there may be no room.
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
        """Those of `rows` of which the disk lacks something that the source has and a prefix needs."""
        lacking: Rows = rows[self._to_write(how, rows) != 0]
        return lacking

    def _to_write(self, how: Write, rows: Rows) -> GroupMask:
        return how.trie.unwritten(rows, how.source.level, self._store.level)

    async def _fit_batch(self, how: Write, rows: Rows, batch: Rows, tenant: Tenant) -> Rows:
        """Writes a batch, at others' cost if need be and may be; returns the rows for which there was no room."""
        store, trie = self._store, how.trie
        if self._placement.use.never_fits(tenant, store, self._placement.use.footprint(store, trie.part_bytes)):
            return batch
        some, beyond = self._within_most(how, batch, tenant)
        try:
            left = await self._write_batch(how, some)
        except DiskFullError as error:
            if not await store.has_shrunk():
                raise
            await store.try_write()  # else others would be evicted for nothing
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
        """The first rows of a batch, as many as their tenant may have on disk beside what it has; the others."""
        use = self._placement.use
        room = use.room(tenant, self._store)
        if room is None:
            return batch, batch[:0]
        nbytes = np.cumsum(use.group_bytes(how.trie, self._store)[self._to_write(how, batch)])
        border = int(np.searchsorted(nbytes, room, "right"))
        return batch[:border], batch[border:]

    async def _write_batch(self, how: Write, batch: Rows) -> Rows:
        """Writes a batch; returns the rows for which there was no room."""
        if not len(batch):
            return batch
        trie, urgency = how.trie, how.movement.urgency
        groups = self._to_write(how, batch)
        blocks = self._records.new_blocks(trie, batch, how.source, groups)
        piece_bytes = max(how.piece_bytes, self._store.least_piece_bytes)
        write = self._store.submit_write(
            blocks, urgency, count=len(blocks), nbytes=sum(trie.part_bytes), piece_bytes=piece_bytes
        )
        results = await how.movement.run(write)
        where = [None if isinstance(result, SwapError) else result for result in results]
        stored = np.array([parts is not None for parts in where], np.bool_)
        slots = np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64)
        checksums = trie.checksums[batch]
        for at, parts in enumerate(where):
            for part, place in enumerate(parts or ()):
                if place is not None:
                    slots[at, part], checksums[at, part] = place.slot, place.checksum
        written = batch[stored]
        trie.set_checksums(written, checksums[stored])
        if how.source is self._placement.tiers.shared:
            trie.checksummed[written] |= (trie.part_mask & groups[stored][:, None]) != 0
        self._placement.put(trie, written, self._store, slots[stored])
        self.written_bytes += int(trie.group_bytes[groups[stored]].sum())
        _raise_first(results)
        return batch[~stored]


def _raise_first(results: list[Any]) -> None:
    """Raises the first error of a transfer; what was dropped is none.

    The error alone is left then: who keeps it keeps its traceback, and with that what the frames refer to.
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
    """How many of `blocks` are written at a time, while nobody else changes the store: as many as one piece takes."""
    return piece_items(sum(trie.part_bytes), blocks, most_bytes=piece_bytes)
