"""The durable tier's side of the mover: blocks written, read and evicted, and what the index is told of each.

One lock orders whatever changes the store, so that a removal and a later write of the same block cannot pass each
other. It is held for one batch at a time, and the most urgent batch is next; its holder moves bytes as urgently as the
most urgent that waits. A call that is cancelled still ends in order: whoever reads or writes a slot must be done before
the slot is given back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from prefixd.base.pacer import give_way
from prefixd.base.tenants import Tenant
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.damaged_blocks import Damage, DamagedBlocks
from prefixd.cache.disk.health import DiskHealth
from prefixd.cache.disk.records import DiskRecords, DiskRemovals, Identity
from prefixd.cache.disk.urgent_lock import UrgentLock, to_the_end
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.paths import find_ancestry
from prefixd.cache.placement.placement import Placement
from prefixd.cache.placement.unwritten import unwritten
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots
from prefixd_swap import (
    ChecksumError,
    DiskFullError,
    IndexUnavailableError,
    LostBytesError,
    StorageError,
    SwapError,
    TransferDroppedError,
)
from prefixd_swap.tiers import Loads, MemoryTier, StoreTier
from prefixd_swap.transfers import PIECE_BYTES, Urgency, piece_items

_PINNED_AT_ONCE = 1 << 13

MakeRoom = Callable[[Sequence[int], int, Movement, Tenant, bool, bool], Awaitable[bool]]
"""(sizes, want, movement, tenant, ahead, own): see `Room.make`."""


class DiskCopies:
    """Copies of blocks in the durable tier.

    Args:
        placement: where copies are entered.
        tries: all tries, by ordinal.
        namespaces: for the ids on disk.
        checksums: of what is in memory.
        make_room: makes room in the durable tier.
    """

    def __init__(
        self,
        placement: Placement,
        tries: list[Trie],
        namespaces: NamespaceRegistry,
        checksums: Checksums,
        make_room: MakeRoom,
    ) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._namespaces = namespaces
        self.records = DiskRecords(self._tiers, namespaces)
        self._checksums = checksums
        self._make_room = make_room
        self.written_bytes = 0
        """Bytes of blocks that were written since the start."""
        self._lock = UrgentLock(urgency_enabled=self._tiers.transfers.urgency_enabled)
        self.saved: set[bytes] = set()
        """Namespaces, by id, that the index knows."""
        self.removals = DiskRemovals(
            *(self._tiers, self.records, self._lock),
            failed=lambda error: self.health.write_failed(error),
            removed=placement.room_may_be_had,
        )
        self.damaged = DamagedBlocks(placement, self.records, self.removals)
        self.health = DiskHealth(placement, tries, self.still, self.damaged.drop, self._reread, self.saved.clear)

    @property
    def _store(self) -> StoreTier:
        """The durable tier, where the caller knows that there is one."""
        return self._tiers.require_durable()

    @property
    def writing(self) -> bool:
        """Whether a write or a removal is under way."""
        return self._lock.locked()

    @asynccontextmanager
    async def still(self) -> AsyncGenerator[None, None]:
        """Within it no write or removal is under way; those that come wait."""
        async with self._lock.hold(Movement(Urgency.DEMAND)):
            yield

    def missing(self, trie: Trie, rows: Rows) -> int:
        """How many of `rows` are not complete in the durable tier."""
        return len(rows) if self._tiers.durable is None else len(trie.missing(rows, self._tiers.durable.level))

    # -- writing ------------------------------------------------------------------------------------------------

    async def write(
        self,
        trie: Trie,
        rows: Rows,
        source: MemoryTier,
        movement: Movement,
        *,
        ahead: bool = False,
        evict: bool = True,
        piece_bytes: int = PIECE_BYTES,
    ) -> int:
        """Writes rows, held in `source`, to disk; returns how many became durable.

        Of each block the KV groups are written that `source` has, the disk lacks, and a prefix still needs. Parents
        come first, and no ancestor is evicted for a descendant, so that what survives a crash is node-closed. `ahead`
        makes room by evicting only blocks that live on disk alone: what is written ahead of need must not cost another
        block its copy. Without `evict` they get free room only. Up to `piece_bytes` are written and synced together.
        Where there is no room for more of one tenant's, others' are written all the same.
        """
        written = 0
        for tenant, its in self._placement.use.by_owner(trie, rows):
            written += await to_the_end(self._write(trie, its, source, movement, tenant, ahead, evict, piece_bytes))
        return written

    async def _write(
        self,
        trie: Trie,
        rows: Rows,
        source: MemoryTier,
        movement: Movement,
        tenant: Tenant,
        ahead: bool,
        evict: bool,
        piece_bytes: int,
    ) -> int:
        rows = rows[np.argsort(trie.depth[rows], kind="stable")]
        piece_bytes = max(piece_bytes, self._store.least_piece_bytes)
        written, step = 0, write_batch(trie, len(rows), piece_bytes)
        for start in range(0, len(rows), step):
            await give_way()
            async with self._lock.hold(movement):
                if not (start or ahead):  # somebody waits for it: try now, whenever the next probe is due
                    await self.health.revive_locked()
                if not self._store.takes or movement.dropped:
                    break
                batch = self._unwritten(trie, rows[start : start + step], source)
                await self._checksums.wait(trie, batch)
                try:
                    await self._save_namespaces(trie, batch)
                    await self._record_parents(trie, batch, source, movement)
                    left = await self._fit_batch(trie, rows, batch, source, movement, tenant, ahead, evict, piece_bytes)
                    if len(left):  # there may have been room for a smaller block, and not for its parent
                        await self._record_parents(trie, batch[~np.isin(batch, left)], source, movement)
                    await self._pin(trie, batch[trie.pinned[batch]], True)
                except StorageError as error:
                    self.health.write_failed(error)
                    left = self._unwritten(trie, batch, source)
            written += len(batch) - len(left)
            if len(left):
                break
        return written

    async def _record_parents(self, trie: Trie, rows: Rows, source: MemoryTier, movement: Movement) -> None:
        """Stores records without bytes of the blocks that `rows` continue, as far as these have none and are not among
        them: they have no bytes that are wanted, or were evicted after `rows` were chosen to be written.

        So it does of all blocks before those, which may be among `rows`: for these there may be no room.
        """
        store = self._store
        parents = trie.parent[rows].astype(np.int64)
        parents = self._unrecorded(trie, parents[parents >= 0])
        parents = parents[~np.isin(parents, rows)]
        if not len(parents):
            return
        bare = self._unrecorded(trie, await find_ancestry(trie, parents))
        bare, step = bare[np.argsort(trie.depth[bare], kind="stable")], write_batch(trie, len(bare))
        for start in range(0, len(bare), step):
            batch = bare[start : start + step]
            blocks = self.records.new_blocks(trie, batch, source, np.zeros(len(batch), np.uint8))
            results = await movement.run(store.submit_write(blocks, movement.urgency, count=len(blocks), nbytes=0))
            _raise_first(results)
            self._placement.put(trie, batch, store, np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64))

    def _unrecorded(self, trie: Trie, rows: Rows) -> Rows:
        """Those of `rows` that have no record."""
        bare: Rows = rows[(trie.any_part[rows] & np.uint8(1 << self._store.level)) == 0]
        return bare

    def _unwritten(self, trie: Trie, rows: Rows, source: MemoryTier) -> Rows:
        """Those of `rows` of which the disk lacks something that `source` has and a prefix needs."""
        lacking: Rows = rows[self._to_write(trie, rows, source) != 0]
        return lacking

    def _to_write(self, trie: Trie, rows: Rows, source: MemoryTier) -> GroupMask:
        return unwritten(trie, source.level, self._store.level, rows)

    async def _fit_batch(
        self,
        trie: Trie,
        rows: Rows,
        batch: Rows,
        source: MemoryTier,
        movement: Movement,
        tenant: Tenant,
        ahead: bool,
        evict: bool,
        piece_bytes: int,
    ) -> Rows:
        """Writes a batch, at others' cost if need be and with `evict`; returns the rows for which there was no room."""
        store = self._store
        if self._placement.use.never_fits(tenant, store, self._placement.use.footprint(store, trie.part_bytes)):
            return batch
        some, beyond = self._within_most(trie, batch, source, tenant)
        try:
            left = await self._write_batch(trie, some, source, movement, piece_bytes)
        except DiskFullError as error:
            if not await store.has_shrunk():
                raise
            await store.try_write()  # else others would be evicted for nothing
            self.health.shrunk(error)
            left = some
        while evict and (len(left) or len(beyond)) and not movement.dropped:
            family = await find_ancestry(trie, rows)
            own = not len(left)
            with self._placement.holds.hold("eviction", trie, family, store):
                want = len(beyond if own else left)
                if not await self._make_room(trie.part_bytes, want, movement, tenant, ahead, own):
                    break
            await give_way()
            some, beyond = self._within_most(trie, np.concatenate([left, beyond]), source, tenant)
            left = await self._write_batch(trie, some, source, movement, piece_bytes)
        return np.concatenate([left, beyond])

    def _within_most(self, trie: Trie, batch: Rows, source: MemoryTier, tenant: Tenant) -> tuple[Rows, Rows]:
        """The first rows of a batch, as many as their tenant may have on disk beside what it has; the others."""
        use = self._placement.use
        room = use.room(tenant, self._store)
        if room is None:
            return batch, batch[:0]
        nbytes = np.cumsum(use.group_bytes(trie, self._store)[self._to_write(trie, batch, source)])
        border = int(np.searchsorted(nbytes, room, "right"))
        return batch[:border], batch[border:]

    async def _write_batch(
        self, trie: Trie, batch: Rows, source: MemoryTier, movement: Movement, piece_bytes: int
    ) -> Rows:
        """Writes a batch; returns the rows for which there was no room."""
        if not len(batch):
            return batch
        groups = self._to_write(trie, batch, source)
        blocks = self.records.new_blocks(trie, batch, source, groups)
        write = self._store.submit_write(
            blocks, movement.urgency, count=len(blocks), nbytes=sum(trie.part_bytes), piece_bytes=piece_bytes
        )
        results = await movement.run(write)
        places = [None if isinstance(result, SwapError) else result for result in results]
        stored = np.array([place is not None for place in places], np.bool_)
        slots = np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64)
        checksums = trie.checksums[batch]
        for at, parts in enumerate(places):
            for part, place in enumerate(parts or ()):
                if place is not None:
                    slots[at, part], checksums[at, part] = place.slot, place.checksum
        written = batch[stored]
        trie.set_checksums(written, checksums[stored])
        if source is self._tiers.shared:
            trie.checksummed[written] |= (trie.part_mask & groups[stored][:, None]) != 0
        self._placement.put(trie, written, self._store, slots[stored])
        self.written_bytes += int(trie.group_bytes[groups[stored]].sum())
        _raise_first(results)
        return batch[~stored]

    async def _save_namespaces(self, trie: Trie, rows: Rows) -> None:
        """Makes durable what the blocks' namespaces stand for, before the first block of each."""
        for ordinal in np.unique(trie.namespace[rows]).tolist():
            namespace = self._namespaces.at(ordinal)
            if namespace.id not in self.saved:
                await self._store.put_namespace(namespace.id, msgspec.msgpack.encode(namespace.spec))
                self.saved.add(namespace.id)

    async def forget_namespaces(self, ids: Sequence[bytes]) -> None:
        """Removes from the index what namespaces stood for, but for those that are known again. If that fails, the next
        start tries again."""
        async with self.still():
            gone = [identity for identity in ids if identity in self.saved and identity not in self._namespaces]
            if gone and self._tiers.writes:
                self.saved.difference_update(gone)
                try:
                    await to_the_end(self._store.remove_namespaces(gone))
                except StorageError as error:
                    self.health.write_failed(error)

    # -- pins -----------------------------------------------------------------------------------------------------

    async def pin(self, trie: Trie, rows: Rows, pinned: bool) -> bool:
        """Makes durable that blocks are pinned, or that they are not any more; whether it is, of all of them.

        Pinned blocks that have yet to be written, or are written again, are made durable as such with that.
        """
        return await to_the_end(self._pin_all(trie, rows, pinned))

    async def _pin_all(self, trie: Trie, rows: Rows, pinned: bool) -> bool:
        durable = 0
        for start in range(0, len(rows), _PINNED_AT_ONCE):  # parents first, so that what survives a crash is a prefix
            async with self.still():
                if not self._store.takes:
                    break
                try:
                    durable += await self._pin(trie, rows[start : start + _PINNED_AT_ONCE], pinned)
                except StorageError as error:
                    self.health.write_failed(error)
                    break
        return durable == len(rows)

    async def _pin(self, trie: Trie, rows: Rows, pinned: bool) -> int:
        stored = self.records.stored(trie, rows)
        done = await self._store.pin(self.records.identities(trie, stored), pinned) if len(stored) else 0
        return done if pinned else len(rows)  # what is not on disk has no pin there

    # -- making room --------------------------------------------------------------------------------------------

    async def drop_groups(self, expired: Sequence[tuple[Trie, Rows, GroupMask]], movement: Movement) -> int:
        """Drops bytes of some KV groups that nobody holds, from the trie and then from the store.

        Returns how many blocks lost some.
        """
        gone = [
            (trie, rows, groups)
            for trie, rows, groups in expired
            if self._placement.drop(trie, rows, self._store, groups)
        ]
        if gone:
            await self._store.drop_parts(self._parts_of(gone), movement.urgency)
        return sum(len(rows) for _, rows, _ in gone)

    async def evict(self, victims: Sequence[tuple[Trie, Rows]], with_page: bool, movement: Movement) -> int:
        """Drops blocks that nobody holds, children before parents, from the trie and then from the store.

        The record of a block that others on disk continue stays, without bytes. Returns how many blocks went.
        """
        store, removed = self._store, list[Identity]()
        emptied: list[tuple[Trie, Rows, GroupMask]] = []
        for trie, rows in victims:
            leaves, inner = _leaves_first(trie, rows, store.level) if with_page else (rows, rows[:0])
            identities = self.records.identities(trie, leaves)
            if self._placement.drop(trie, leaves, store, with_page=with_page):
                left = trie.any_part[leaves] & np.uint8(1 << store.level)
                removed += [each for each, stays in zip(identities, left.tolist(), strict=True) if not stays]
            groups = trie.there[inner, store.level].copy()
            if self._placement.drop(trie, inner, store, groups):
                gone = trie.there[inner, store.level] == 0
                emptied.append((trie, inner[gone], groups[gone]))
        if emptied:
            await store.drop_parts(self._parts_of(emptied), movement.urgency)
        if removed:
            await store.remove(removed, movement.urgency)
        return len(removed) + sum(len(rows) for _, rows, _ in emptied)

    def _parts_of(self, dropped: Sequence[tuple[Trie, Rows, GroupMask]]) -> list[tuple[bytes, bytes, list[int]]]:
        """What `StoreTier.drop_parts` is told of groups that were dropped."""
        return [
            (*self.records.identity(trie, row), np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist())
            for trie, rows, groups in dropped
            for row, mask in zip(rows.tolist(), groups.tolist(), strict=True)
        ]

    # -- reading ------------------------------------------------------------------------------------------------

    async def read(
        self, trie: Trie, rows: Rows, parts: Sequence[int], taken: Slots, target: MemoryTier, movement: Movement
    ) -> npt.NDArray[np.bool_]:
        """Reads `parts` of rows, held on disk, into slots of `target`, which a CPU can address; which are good.

        A block whose bytes are bad is dropped, with those of its descendants that nobody holds.
        """
        store, chosen = self._store, list(parts)
        if not store.gives or not len(rows):
            return np.zeros(len(rows), np.bool_)
        slots = trie.slots[rows, store.level][:, chosen]
        # A damaged block leaves the disk whoever holds it, also while room was made for it: of that nothing is read.
        there: npt.NDArray[np.bool_] = (slots != NO_SLOT).all(axis=1)
        loads = Loads(
            slots,
            trie.checksums[rows][:, chosen],
            target.addresses(taken),
            tuple(trie.part_bytes[part] for part in chosen),
        )
        read = store.submit_read(loads, movement.urgency, deadline_s=movement.due_s)
        errors = await movement.run(read)
        good: npt.NDArray[np.bool_] = self._judge(trie, rows, errors) & there
        return good

    async def _reread(self, trie: Trie, row: int) -> StorageError | None:
        """Reads a block to nowhere; why that failed, if it did."""
        store, here = self._store, np.array([row])
        scratch = [np.empty(nbytes, np.uint8) for nbytes in trie.part_bytes]
        addresses = np.array([[buffer.ctypes.data for buffer in scratch]], np.int64)
        loads = Loads(trie.slots[here, store.level], trie.checksums[here], addresses, tuple(trie.part_bytes))
        with self._placement.holds.hold("disk probe", trie, here, store):
            (error,) = await store.read(loads, Urgency.DEMAND)
        if error is not None and not isinstance(error, StorageError):
            raise error
        return error

    def _judge(self, trie: Trie, rows: Rows, errors: Sequence[SwapError | None]) -> npt.NDArray[np.bool_]:
        """Which reads were good; drops what is bad, all blocks of one kind of damage at once."""
        damaged: dict[type[StorageError], list[int]] = {}
        first: dict[type[StorageError], StorageError] = {}
        for row, error in zip(rows.tolist(), errors, strict=True):
            if isinstance(error, ChecksumError | LostBytesError):
                damaged.setdefault(type(error), []).append(row)
                first.setdefault(type(error), error)
            elif isinstance(error, StorageError):
                self._placement.lost["not served: disk read error"] += 1
                self.health.read_failed(trie, row, error)
        for kind, lost in damaged.items():
            self.damaged.drop(trie, np.array(lost), first[kind])
        return np.array([error is None for error in errors], np.bool_)

    async def recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        """Verifies a block on disk while nothing else changes the store, and drops it if it is bad.

        None when it is good, or when `row` is no longer the block that it was at `generation`.

        Raises:
            IndexUnavailableError: whether it is bad cannot be told.
        """
        return await to_the_end(self._recheck(trie, row, generation))

    async def _recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        def there() -> bool:
            return trie.generation[row] == generation and len(self.records.stored(trie, np.array([row]))) > 0

        movement = Movement(Urgency.SCRUB)
        async with self._lock.hold(movement):
            if not there():
                return None
            identity = self.records.identity(trie, row)
            expected = self.records.expected(trie, np.array([row]))
            verify = self._store.submit_verify(expected, sum(trie.part_bytes), movement.urgency)
            (error,) = await movement.run(verify)
            if error is None:
                return None
            if isinstance(error, IndexUnavailableError) or not isinstance(error, StorageError):
                raise error
            if not there():
                return None
            return Damage(identity, error, self.damaged.drop(trie, np.array([row]), error))


def _leaves_first(trie: Trie, rows: Rows, level: int) -> tuple[Rows, Rows]:
    """Those of `rows`, children before parents, that nothing on that level continues once those before them are gone;
    the others."""
    gone: Counter[int] = Counter()
    leaves, inner = [], []
    for row, children, parent in zip(
        rows.tolist(), trie.tier_children[rows, level].tolist(), trie.parent[rows].tolist(), strict=True
    ):
        if children == gone[row]:
            leaves.append(row)
            gone[parent] += 1
        else:
            inner.append(row)
    return np.array(leaves, np.int64), np.array(inner, np.int64)


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
