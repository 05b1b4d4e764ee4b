"""Writes blocks to the durable tier in pieces, and syncs each while the store does not change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.health import DiskHealth
from prefixd.cache.disk.metadata import DiskMetadata
from prefixd.cache.disk.part_coder import NOTHING_CODED, CodedBlocks, PartCoder
from prefixd.cache.disk.records import DiskRecords
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.movement import Movement, UrgentLock, to_the_end
from prefixd.cache.placement.paths import by_chain, find_ancestry
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd.observability.measurements import Timings
from prefixd_swap import DiskFullError, StorageError, SwapError, TransferDroppedError
from prefixd_swap.slab.index.block_record import Errors
from prefixd_swap.slots import round_to_slot
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
        coder: makes fewer bytes of blocks.
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
        coder: PartCoder,
        lock: UrgentLock,
    ) -> None:
        self._placement = placement
        self._store = cast("StoreTier", placement.tiers.durable)  # without one, nothing is written
        self._records = records
        self._checksums = checksums
        self._metadata = metadata
        self._health = health
        self._coder = coder
        self._lock = lock
        self.written_bytes = 0
        """Stored bytes of blocks written since the start."""
        self.saved_bytes = 0
        """Bytes by which codecs have made these fewer."""
        self.written_blocks = 0
        """Blocks with such bytes; one whose KV groups are written apart counts each time."""

    async def write(self, how: Write, rows: Rows) -> int:
        """Writes rows, held in their source, to disk; returns the number that became durable.

        Writes the KV groups of a block that the source has, the disk lacks, and a prefix needs. Parents come first, and
        no ancestor is evicted for a descendant, so that the disk is node-closed after a crash. Blocks that continue
        each other are written one behind the other (`by_chain`). A tenant without room does not stop others' writes.
        """
        written = 0
        for tenant, its in self._placement.use.by_owner(how.trie, rows):
            written += await to_the_end(self._write(how, its, tenant))
        return written

    async def _write(self, how: Write, rows: Rows, tenant: Tenant) -> int:
        rows = await by_chain(how.trie, rows)
        piece_bytes = max(how.piece_bytes, self._store.least_piece_bytes)
        written, step = 0, write_batch(how.trie, len(rows), piece_bytes)
        pieces = [rows[start : start + step] for start in range(0, len(rows), step)]
        async with self._coding_ahead(how, pieces) as coded:
            for number, piece in enumerate(pieces):
                await give_way()
                ready = await coded()
                async with self._lock.hold(how.movement):
                    if not (number or how.ahead):  # a caller waits: try now, before the next probe
                        await self._health.revive_locked()
                    if not self._store.writable or how.movement.dropped:
                        break
                    batch, left = await self._write_piece(how, rows, piece, ready, tenant)
                written += len(batch) - len(left)
                if len(left):
                    break
        return written

    @asynccontextmanager
    async def _coding_ahead(self, how: Write, pieces: Sequence[Rows]) -> AsyncGenerator[Callable[[], Any]]:
        """A context with a function that returns the coded parts of the next of `pieces`, while those of the one behind
        it are made."""
        waiting = iter(pieces)

        async def code(piece: Rows) -> CodedBlocks:
            await self._checksums.wait(how.trie, piece)
            return await self._coder.code(how.trie, piece, how.source, self._to_write(how, piece))

        def begin() -> asyncio.Task[CodedBlocks] | None:
            piece = next(waiting, None)
            if piece is None or not self._coder.has_work(how.trie, piece):
                return None
            return asyncio.ensure_future(code(piece))

        ahead = begin()

        async def following() -> CodedBlocks:
            nonlocal ahead
            ready = NOTHING_CODED if ahead is None else await ahead
            ahead = begin()
            return ready

        try:
            yield following
        finally:
            if ahead is not None:
                await asyncio.gather(ahead, return_exceptions=True)  # it reads memory that the caller holds

    async def _write_piece(
        self, how: Write, rows: Rows, piece: Rows, coded: CodedBlocks, tenant: Tenant
    ) -> tuple[Rows, Rows]:
        """Writes the blocks of a piece of `rows` that the disk lacks. The caller has the lock.

        Returns these blocks, and those of them without room.
        """
        trie = how.trie
        batch = self._unwritten(how, piece)
        await self._checksums.wait(trie, batch)
        try:
            await self._metadata.save_namespaces(trie, batch)
            await self._record_parents(how, batch)
            left = await self._fit_batch(how, rows, batch, coded, tenant)
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

    async def _fit_batch(self, how: Write, rows: Rows, batch: Rows, coded: CodedBlocks, tenant: Tenant) -> Rows:
        """Writes a batch, and evicts blocks if it may and must; returns the rows without room."""
        store, trie = self._store, how.trie
        least = self._placement.use.footprint(store, trie.part_bytes)
        if coded and len(batch):
            least = int(self._slots_bytes(how, batch, coded).sum(axis=1).min())
        if self._placement.use.never_fits(tenant, store, least):
            return batch
        some, beyond = self._within_most(how, batch, coded, tenant)
        try:
            left = await self._write_batch(how, some, coded)
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
                sizes, want = self._room_for(how, beyond if own else left, coded)
                if not await self.make_room(
                    store, sizes, want, how.movement, tenant, ahead=how.ahead, own=own, mixed=bool(coded)
                ):
                    break
            await give_way()
            some, beyond = self._within_most(how, np.concatenate([left, beyond]), coded, tenant)
            left = await self._write_batch(how, some, coded)
        return np.concatenate([left, beyond])

    def _room_for(self, how: Write, rows: Rows, coded: CodedBlocks) -> tuple[Sequence[int], int]:
        """The sizes of parts, and how many blocks with them, for which room is to be made: where some are coded, the
        average of all parts, and their number."""
        if not coded:
            return how.trie.part_bytes, len(rows)
        sizes = self._slots_bytes(how, rows, coded)
        parts = int(np.count_nonzero(sizes))
        return [round_to_slot(-(-int(sizes.sum()) // parts))], parts

    def _slots_bytes(self, how: Write, rows: Rows, coded: CodedBlocks) -> npt.NDArray[np.int64]:
        """[len(rows), parts]: bytes of the slots that parts to be written take; 0 for others."""
        trie = how.trie
        raw = self._placement.use.part_bytes(trie, self._store)
        sizes: npt.NDArray[np.int64] = np.where((self._to_write(how, rows)[:, None] & trie.part_mask) != 0, raw, 0)
        for at, row in enumerate(rows.tolist()) if coded else ():
            for part in np.flatnonzero(sizes[at]).tolist():
                if (made := coded.get((row, part))) is not None:
                    sizes[at, part] = round_to_slot(made.stored.nbytes)
        return sizes

    def _within_most(self, how: Write, batch: Rows, coded: CodedBlocks, tenant: Tenant) -> tuple[Rows, Rows]:
        """Splits a batch: the first rows that fit in their tenant's remaining room on disk; the others."""
        use = self._placement.use
        room = use.room(tenant, self._store)
        if room is None:
            return batch, batch[:0]
        nbytes = np.cumsum(self._slots_bytes(how, batch, coded).sum(axis=1))
        border = int(np.searchsorted(nbytes, room, "right"))
        return batch[:border], batch[border:]

    async def _write_batch(self, how: Write, batch: Rows, coded: CodedBlocks) -> Rows:
        """Writes a batch; returns the rows without room."""
        if not len(batch):
            return batch
        trie, urgency = how.trie, how.movement.urgency
        groups = self._to_write(how, batch)
        coded = await self._coder.complete(trie, batch, how.source, groups, coded)
        blocks = self._records.new_blocks(trie, batch, how.source, groups, coded)
        piece_bytes = max(how.piece_bytes, self._store.least_piece_bytes)
        nbytes = sum(trie.part_bytes)
        if coded:
            nbytes = int(self._slots_bytes(how, batch, coded).sum(axis=1).max())
        write = self._store.submit_write(blocks, urgency, count=len(blocks), nbytes=nbytes, piece_bytes=piece_bytes)
        begun_s = self._placement.clock()
        results = await how.movement.run(write)
        self.timings.save_s.observe(self._placement.clock() - begun_s, "write")
        where = [None if isinstance(result, SwapError) else result for result in results]
        stored = np.array([parts is not None for parts in where], np.bool_)
        slots = np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64)
        checksums, coded_checksums = trie.checksums[batch], np.zeros_like(slots, np.uint64)
        coded_bytes = np.zeros_like(slots, np.uint32)
        for at, parts in enumerate(where):
            for part, there in enumerate(parts or ()):
                if there is not None and there.coded:
                    slots[at, part], coded_bytes[at, part] = there.slot, there.nbytes
                    coded_checksums[at, part] = there.checksum
                    if (made := coded.get((int(batch[at]), part))) is not None:
                        checksums[at, part] = made.checksum
                elif there is not None:
                    slots[at, part], checksums[at, part] = there.slot, there.checksum
        written = batch[stored]
        trie.set_checksums(written, checksums[stored])
        trie.set_coded(written, coded_bytes[stored], coded_checksums[stored])
        self._note_errors(trie, written, [block.errors for block, taken in zip(blocks, where, strict=True) if taken])
        if how.source is self._placement.tiers.shared:
            trie.checksummed[written] |= (trie.part_mask & groups[stored][:, None]) != 0
        self._placement.put(trie, written, self._store, slots[stored])
        self.written_blocks += int(np.count_nonzero(groups[stored]))
        nbytes_written = np.where((groups[stored][:, None] & trie.part_mask) != 0, trie.stored_bytes(written), 0)
        self.written_bytes += int(nbytes_written.sum())
        self.saved_bytes += int(trie.group_bytes[groups[stored]].sum()) - int(nbytes_written.sum())
        _raise_first(results)
        return batch[~stored]

    def _note_errors(self, trie: Trie, rows: Rows, errors: Sequence[Errors | None]) -> None:
        """Records the errors of lossy codecs, [len(rows)]."""
        made = [at for at, of_block in enumerate(errors) if of_block is not None]
        if made:
            trie.set_errors(rows[made], np.array([errors[at] for at in made], np.float32))


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
