"""The disk tier's side of mover: blocks written, read, made room for and removed, in threads of its own.

One lock orders whatever changes the store, so that a removal and a later write of the same block cannot pass each
other. A call that is cancelled still ends in order: a thread that reads or writes a slot must be done before the
slot is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from prefixd.cache.checksums import Checksums
from prefixd.cache.disk_health import DiskHealth
from prefixd.cache.groups import GroupMask
from prefixd.cache.index.children import Descendants, MovedError
from prefixd.cache.index.trie import CPU, DISK, NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceRegistry
from prefixd.cache.page_victims import find_page_victims, has_other_sizes
from prefixd.cache.placement import Placement
from prefixd.cache.tiers import Slots
from prefixd.cache.victims import find_expired, find_victims
from prefixd_swap import (
    BlockRecord,
    ChecksumError,
    DiskFullError,
    DiskPart,
    EvictionPolicy,
    IndexUnavailableError,
    LostBytesError,
    NewBlock,
    RecordDamagedError,
    Span,
    StorageError,
    started_threads,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")

_WRITE_BATCH = 64
_DROPPED_AT_ONCE = 1024  # blocks behind damaged ones

Identity = tuple[bytes, bytes]
"""Namespace id and block key: a block's name on disk."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A block whose bytes on disk were not what was written."""

    identity: Identity
    error: StorageError
    dropped: int
    """Blocks that left the disk for it: itself, and what continued it."""


class DiskCopies:
    """Copies of blocks on disk.

    Args:
        placement: where copies are entered.
        tries: all tries, by ordinal.
        namespaces: for the ids on disk.
        policy: who goes first.
        seals: checksums of what is in memory.
        threads: threads for reads and writes.
    """

    def __init__(
        self,
        placement: Placement,
        tries: list[Trie],
        namespaces: NamespaceRegistry,
        policy: EvictionPolicy,
        seals: Checksums,
        *,
        threads: int = 4,
    ) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._tries = tries
        self._namespaces = namespaces
        self._policy = policy
        self._checksums = seals
        self._lock = asyncio.Lock()
        self._saved: set[bytes] = set()  # namespaces that the index knows
        self._removals: set[asyncio.Task[None]] = set()
        self._leaving: Counter[Identity] = Counter()
        self._parallel = threads
        self._threads = started_threads(threads, "prefixd-disk")
        self.health = DiskHealth(placement, tries, self._lock, self.drop_damaged, self._reread, self._saved.clear)

    @property
    def busy(self) -> set[asyncio.Task[None]]:
        """Removals of damaged blocks under way."""
        return self._removals

    @property
    def writing(self) -> bool:
        """Whether a write or a removal is under way."""
        return self._lock.locked()

    @property
    def leaving(self) -> Iterable[Identity]:
        """Blocks that have left the tries, and are about to leave the index."""
        return self._leaving.keys()

    async def undisturbed(self, look: Callable[[], T], work: Callable[[T], U]) -> U:
        """`work` on what `look` gives, in a thread, while no write or removal is under way."""
        async with self.still():
            return await self._in_thread(work, look())

    @asynccontextmanager
    async def still(self) -> AsyncGenerator[None, None]:
        """Within it no write or removal is under way; those that come wait."""
        async with self._lock:
            yield

    def close(self) -> None:
        """Ends the threads."""
        self.health.close()
        self._threads.shutdown()

    def identity(self, trie: Trie, row: int) -> Identity:
        """The block's name on disk."""
        return self._namespaces.at(int(trie.namespace[row])).id, trie.key(row)

    def expected(self, trie: Trie, row: int) -> BlockRecord:
        """What the index has to say of a block that is on disk."""
        namespace, key = self.identity(trie, row)
        parent = int(trie.parent[row])
        return BlockRecord(
            namespace,
            key,
            trie.key(parent) if parent >= 0 else b"",
            trie.tokens[row].tobytes(),
            tuple(
                DiskPart(slot, nbytes, checksum) if slot != NO_SLOT else None
                for slot, nbytes, checksum in zip(
                    trie.slots[row, DISK].tolist(), trie.part_bytes, trie.checksums[row].tolist(), strict=True
                )
            ),
            int(trie.depth[row]),
        )

    def identities(self, trie: Trie, rows: Rows) -> list[Identity]:
        """The blocks' names on disk."""
        ids = [namespace.id for namespace in self._namespaces]
        keys = trie.keys(rows).tobytes()
        namespaces = trie.namespace[rows].tolist()
        return [(ids[ordinal], keys[16 * at : 16 * at + 16]) for at, ordinal in enumerate(namespaces)]

    # -- writing ------------------------------------------------------------------------------------------------

    async def write(self, trie: Trie, rows: Rows, source: int, *, ahead: bool = False) -> int:
        """Writes rows, held in `source`, to disk; returns how many became durable.

        Of each block the KV groups are written that `source` has, the disk lacks, and a prefix still needs. Parents
        come first, and no ancestor is evicted for a descendant, so that what survives a crash is node-closed. `ahead`
        makes room by evicting only blocks that live on disk alone: what is written ahead of need must not cost another
        block its copy.
        """
        return await _to_the_end(self._write(trie, rows, source, ahead))

    async def _write(self, trie: Trie, rows: Rows, source: int, ahead: bool) -> int:
        rows = rows[np.argsort(trie.depth[rows], kind="stable")]
        written = 0
        async with self._lock:
            if not ahead:  # somebody waits for it: try now, whenever the next probe is due
                await self.health.revive_locked()
            for start in range(0, len(rows), _WRITE_BATCH):
                if not self._tiers.disk_takes:
                    break
                batch = self._unwritten(trie, rows[start : start + _WRITE_BATCH], source)
                await self._checksums.wait(trie, batch)
                try:
                    await self._save_namespaces(trie, batch)
                    if trie.has_rules:
                        await self._record_ancestors(trie, batch)
                    left = await self._fit_batch(trie, rows, batch, source, ahead)
                except StorageError as error:
                    self.health.write_failed(error)
                    left = self._unwritten(trie, batch, source)
                written += len(batch) - len(left)
                if len(left):
                    break
        return written

    async def _record_ancestors(self, trie: Trie, rows: Rows) -> None:
        """Stores records without bytes of the blocks before `rows` that have none: the records of `rows` need them."""
        family = trie.ancestry(rows)
        bare = family[(trie.any_part[family] & np.uint8(1 << DISK)) == 0]
        bare = bare[~np.isin(bare, rows)]
        bare = bare[np.argsort(trie.depth[bare], kind="stable")]
        for start in range(0, len(bare), _WRITE_BATCH):
            batch = bare[start : start + _WRITE_BATCH]
            blocks = [self._new_block(trie, row, CPU, 0) for row in batch.tolist()]
            await self._in_thread(self._tiers.store.write, blocks)
            self._placement.put(trie, batch, DISK, np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64))

    def _unwritten(self, trie: Trie, rows: Rows, source: int) -> Rows:
        """Those of `rows` of which the disk lacks something that `source` has and a prefix needs."""
        lacking: Rows = rows[self._to_write(trie, rows, source) != 0]
        return lacking

    def _to_write(self, trie: Trie, rows: Rows, source: int) -> GroupMask:
        groups: GroupMask = trie.there[rows, source] & ~trie.there[rows, DISK] & ~trie.expired[rows]
        return groups

    async def _fit_batch(self, trie: Trie, rows: Rows, batch: Rows, source: int, ahead: bool) -> Rows:
        """Writes a batch, at others' cost if need be; returns the rows for which there was no room."""
        try:
            left = await self._write_batch(trie, batch, source)
        except DiskFullError as error:
            if not await self._in_thread(lambda: self._tiers.store.shrunk):
                raise
            await self._in_thread(self._tiers.store.try_commit)  # else others would be evicted for nothing
            self.health.shrunk(error)
            left = batch
        while len(left) and await self._make_room(trie, rows, len(left), ahead):
            left = await self._write_batch(trie, left, source)
        return left

    async def _write_batch(self, trie: Trie, batch: Rows, source: int) -> Rows:
        """Writes a batch; returns the rows for which there was no room."""
        if not len(batch):
            return batch
        groups = self._to_write(trie, batch, source)
        blocks = [
            self._new_block(trie, row, source, mask) for row, mask in zip(batch.tolist(), groups.tolist(), strict=True)
        ]
        records = await self._in_thread(self._tiers.store.write, blocks)
        stored = np.array([record is not None for record in records], np.bool_)
        slots = np.full((len(batch), len(trie.part_bytes)), NO_SLOT, np.int64)
        checksums = trie.checksums[batch]
        for at, record in enumerate(records):
            for part, place in enumerate(record.parts if record is not None else ()):
                if place is not None:
                    slots[at, part], checksums[at, part] = place.slot, place.checksum
        written = batch[stored]
        trie.set_checksums(written, checksums[stored])
        if source == CPU:
            trie.checksummed[written] |= (trie.part_mask & groups[stored][:, None]) != 0
        self._placement.put(trie, written, DISK, slots[stored])
        return batch[~stored]

    async def save_namespace(self, namespace: Namespace) -> None:
        """Makes durable what a namespace stands for, unless the disk is out of service."""
        async with self._lock:
            if self._tiers.disk_takes:
                try:
                    await _to_the_end(self._save_namespace(namespace))
                except StorageError as error:
                    self.health.write_failed(error)

    async def _save_namespaces(self, trie: Trie, rows: Rows) -> None:
        """Makes durable what the blocks' namespaces stand for, before the first block of each."""
        for ordinal in np.unique(trie.namespace[rows]).tolist():
            await self._save_namespace(self._namespaces.at(ordinal))

    async def _save_namespace(self, namespace: Namespace) -> None:
        if namespace.id not in self._saved:
            await self._in_thread(self._tiers.store.put_namespace, namespace.id, msgspec.msgpack.encode(namespace.spec))
            self._saved.add(namespace.id)

    async def _make_room(self, trie: Trie, rows: Rows, want: int, ahead: bool) -> int:
        """Evicts up to `want` blocks from disk, none of them in the prefixes of `rows`.

        Bytes that only shorter prefixes need go first. Then single blocks go, or whole pages where blocks of other
        sizes have the room.
        """
        placement = self._placement
        with placement.holds.hold("eviction", trie, trie.ancestry(rows), DISK):
            expired = [
                (other, some, groups)
                for other, some, groups in await find_expired(self._tries, DISK, want)
                if placement.drop(other, some, DISK, groups)
            ]
            if expired:
                await self._in_thread(self._tiers.store.drop_parts, self._parts_of(expired))
                return sum(len(some) for _, some, _ in expired)
            if has_other_sizes(self._tries, DISK, trie.part_bytes):
                return await self._evict_pages(trie.part_bytes, want, ahead)
            removed: list[Identity] = []
            for other, victims in await find_victims(
                self._tries, DISK, want, self._policy, demotable=False, spare_copies=ahead
            ):
                for row in victims.tolist():
                    identity = self.identity(other, row)
                    if placement.drop(other, [row], DISK):
                        removed.append(identity)
            if removed:
                await self._in_thread(self._tiers.store.remove, removed)
        return len(removed)

    async def _evict_pages(self, sizes: Sequence[int], want: int, ahead: bool) -> int:
        """Evicts whole pages, or single slots, for `want` blocks with parts of `sizes` bytes; returns how many blocks
        went.

        The record of a block that others on disk continue stays, without bytes.
        """
        victims = await find_page_victims(
            self._tries,
            DISK,
            sizes,
            want,
            self._policy,
            self._tiers.store.choose_victims,
            demotable=False,
            spare_copies=ahead,
        )
        removed: list[Identity] = []
        emptied: list[tuple[Trie, Rows, GroupMask]] = []
        for trie, rows in victims:
            leaves, inner = _leaves_first(trie, rows)
            identities = self.identities(trie, leaves)
            if self._placement.drop(trie, leaves, DISK, with_page=True):
                left = trie.any_part[leaves] & np.uint8(1 << DISK)
                removed += [each for each, stays in zip(identities, left.tolist(), strict=True) if not stays]
            groups = trie.there[inner, DISK].copy()
            if self._placement.drop(trie, inner, DISK, groups):
                gone = trie.there[inner, DISK] == 0
                emptied.append((trie, inner[gone], groups[gone]))
        if emptied:
            await self._in_thread(self._tiers.store.drop_parts, self._parts_of(emptied))
        if removed:
            await self._in_thread(self._tiers.store.remove, removed)
        return len(removed) + len(emptied)

    def _parts_of(self, dropped: Sequence[tuple[Trie, Rows, GroupMask]]) -> list[tuple[bytes, bytes, list[int]]]:
        """What `SlabStore.drop_parts` is told of groups that were dropped."""
        return [
            (*self.identity(trie, row), np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist())
            for trie, rows, groups in dropped
            for row, mask in zip(rows.tolist(), groups.tolist(), strict=True)
        ]

    def _new_block(self, trie: Trie, row: int, source: int, groups: int) -> NewBlock:
        parent = int(trie.parent[row])
        namespace, key = self.identity(trie, row)
        columns = zip(
            trie.slots[row, source].tolist(),
            trie.slots[row, DISK].tolist(),
            trie.part_bytes,
            trie.checksums[row].tolist(),
            trie.part_mask.tolist(),
            strict=True,
        )
        return NewBlock(
            namespace=namespace,
            key=key,
            parent=trie.key(parent) if parent >= 0 else b"",
            tokens=trie.tokens[row].tobytes(),
            depth=int(trie.depth[row]),
            parts=[
                self._tiers.span(source, slot, size)
                if groups & mask
                else (DiskPart(stored, size, checksum) if stored != NO_SLOT else None)
                for slot, stored, size, checksum, mask in columns
            ],
            checksums=[
                checksum if known and source == CPU else None
                for checksum, known in zip(trie.checksums[row].tolist(), trie.checksummed[row].tolist(), strict=True)
            ],
        )

    # -- reading ------------------------------------------------------------------------------------------------

    async def read(self, trie: Trie, rows: Rows, parts: Sequence[int], taken: Slots, target: int) -> list[bool]:
        """Reads `parts` of rows, held on disk, into slots of `target`, which a CPU can address; returns which are good.

        A block whose bytes are bad is dropped, with those of its descendants that nobody holds.
        """
        return await _to_the_end(self._read(trie, rows, parts, taken, target))

    async def _read(self, trie: Trie, rows: Rows, parts: Sequence[int], taken: Slots, target: int) -> list[bool]:
        if not self._tiers.disk_gives:
            return [False] * len(rows)
        results: list[StorageError | None] = [None] * len(rows)
        places = list(zip(taken.tolist(), trie.slots[rows, DISK].tolist(), trie.checksums[rows].tolist(), strict=True))
        left = iter(range(len(rows)))  # the threads share it: one wakes the event loop once, not after every block

        def read() -> None:
            for at in left:
                targets, slots, checksums = places[at]
                stored = [DiskPart(slots[part], trie.part_bytes[part], checksums[part]) for part in parts]
                spans = [
                    self._tiers.span(target, slot, part.nbytes) for slot, part in zip(targets, stored, strict=True)
                ]
                results[at] = self._read_parts(stored, spans)

        await asyncio.gather(*(self._in_thread(read) for _ in range(min(self._parallel, len(rows)))))
        return self._judge(trie, rows, results)

    def _read_parts(self, places: Sequence[DiskPart], spans: Sequence[Span]) -> StorageError | None:
        try:
            for place, span in zip(places, spans, strict=True):
                self._tiers.store.read(place, span)
        except StorageError as error:
            return error
        return None

    async def _reread(self, trie: Trie, row: int) -> StorageError | None:
        """Reads a block to nowhere; why that failed, if it did."""
        places = _places(trie, row)
        scratch = [np.empty(place.nbytes, np.uint8) for place in places]
        spans = [Span(buffer.ctypes.data, buffer.nbytes) for buffer in scratch]
        with self._placement.holds.hold("disk probe", trie, np.array([row]), DISK):
            return await self._in_thread(self._read_parts, places, spans)

    def _judge(self, trie: Trie, rows: Rows, errors: Sequence[StorageError | None]) -> list[bool]:
        """Which reads were good; drops what is bad, all blocks of one kind of damage at once."""
        damaged: dict[type[StorageError], list[int]] = {}
        first: dict[type[StorageError], StorageError] = {}
        for row, error in zip(rows.tolist(), errors, strict=True):
            if isinstance(error, ChecksumError | LostBytesError):
                damaged.setdefault(type(error), []).append(row)
                first.setdefault(type(error), error)
            elif error is not None:
                self._placement.lost["not served: disk read error"] += 1
                self.health.read_failed(trie, row, error)
        for kind, lost in damaged.items():
            self.drop_damaged(trie, np.array(lost), first[kind])
        return [error is None for error in errors]

    async def recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        """Verifies a block on disk while nothing else changes the store, and drops it if it is bad.

        None when it is good, or when `row` is no longer the block that it was at `generation`.

        Raises:
            IndexUnavailableError: whether it is bad cannot be told.
        """
        return await _to_the_end(self._recheck(trie, row, generation))

    async def _recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        def there() -> bool:
            return trie.generation[row] == generation and bool(trie.any_part[row] & (1 << DISK))

        async with self._lock:
            if not there():
                return None
            identity, expected = self.identity(trie, row), self.expected(trie, row)
            try:
                if await self._in_thread(self._tiers.store.check, *identity, expected):
                    return None
                error: StorageError = LostBytesError("the index has lost the block")
            except IndexUnavailableError:
                raise
            except StorageError as found:
                error = found
            if not there():
                return None
            return Damage(identity, error, self.drop_damaged(trie, np.array([row]), error))

    def drop_damaged(self, trie: Trie, rows: Rows, error: StorageError) -> int:
        """Drops blocks' copies on disk, whoever holds them, because their bytes cannot be had.

        A block that has no other copy is matched no more, and its descendants that nobody holds go with it; one that is
        in memory is written again by write-back. Their removal from the index becomes durable in the background, see
        `busy`. Counts the blocks under `lost`.

        Args:
            trie: the blocks' trie.
            rows: rows that have a copy on disk.
            error: what was found.

        Returns:
            How many blocks have left the disk. Where they are many, those that continue the damaged ones leave it later
            and are not counted.
        """
        placement = self._placement
        why = "disk read failed"
        if isinstance(error, ChecksumError):
            why = "checksum mismatch on disk"
        elif isinstance(error, RecordDamagedError):
            why = "damaged index record"
        placement.lost[why] += len(rows)
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        log.error("block %s%s dropped, to be computed again: %s", trie.key(int(rows[0])).hex(), more, error)
        damaged = [self.identity(trie, row) for row in rows.tolist()]
        children: list[Identity] = []
        placement.discard_copies(trie, rows, DISK)
        emptied = rows[trie.any_part[rows] == 0]
        if len(emptied) < len(rows):
            placement.changed.set()  # write-back writes the others again
        walk = Descendants(trie, emptied)
        descendants = walk.take(_DROPPED_AT_ONCE)
        if walk.done:
            children += self._forget(trie, descendants[::-1])
        else:
            self._in_background(self._drop_descendants(trie, emptied, trie.generation[emptied]))
        placement.sweep(trie, emptied[np.argsort(trie.depth[emptied], kind="stable")])
        self._in_background(self._remove_damaged(trie, children, damaged, isinstance(error, RecordDamagedError)))
        return len(damaged) + len(children)

    def _in_background(self, removal: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(removal)
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    def _forget(self, trie: Trie, rows: Sequence[int]) -> list[Identity]:
        """Drops those of `rows`, children before parents, that nobody holds; returns those that were on disk."""
        going = trie.all_removable(rows)
        on_disk = self.identities(trie, going[(trie.any_part[going] & np.uint8(1 << DISK)) != 0])
        self._placement.discard(trie, going)
        return on_disk

    async def _drop_descendants(self, trie: Trie, roots: Rows, generations: npt.NDArray[np.int32]) -> None:
        """Drops what continues blocks that have no copy left and that nobody holds, a part of it in one turn.

        What it does not come to, since a block goes meanwhile, is matched by nobody and evicted like any other.
        """
        found: list[tuple[int, int]] = []
        walk = Descendants(trie, roots[trie.generation[roots] == generations])
        with suppress(MovedError):
            while not walk.done:
                await asyncio.sleep(0)
                rows = walk.take(_DROPPED_AT_ONCE)
                found += zip(rows, trie.generation[rows].tolist(), strict=True)
        for end in range(len(found), 0, -_DROPPED_AT_ONCE):
            await asyncio.sleep(0)
            some = found[max(end - _DROPPED_AT_ONCE, 0) : end][::-1]
            same = [row for row, generation in some if trie.generation[row] == generation]
            with suppress(StorageError):  # reported; the records go when the disk works again
                await self.remove(trie, self._forget(trie, same))

    # -- removing -----------------------------------------------------------------------------------------------

    async def remove(self, trie: Trie, ids: list[Identity], *, damaged: bool = False) -> None:
        """Removes blocks that have left the trie; returns when that is durable.

        `damaged`: their records in the index are damaged, see `SlabStore.remove`.

        Raises:
            StorageError: I/O failed; the blocks are removed when the disk works again, or come back at the next start.
        """
        if ids:
            leaving = Counter(ids)
            self._leaving += leaving
            try:
                await _to_the_end(self._remove(trie, ids, damaged))
            finally:
                self._leaving -= leaving

    async def _remove(self, trie: Trie, ids: list[Identity], damaged: bool) -> None:
        async with self._lock:
            keys = np.frombuffer(b"".join(key for _, key in ids), np.uint8).reshape(-1, 16)
            there = (trie.find_all(keys) >= 0).tolist()
            gone = [each for each, found in zip(ids, there, strict=True) if not (found and self._is_back(trie, each))]
            try:
                await self._in_thread(partial(self._tiers.store.remove, gone, damaged=damaged))
            except StorageError as error:
                self.health.write_failed(error)
                raise

    async def _remove_damaged(
        self, trie: Trie, children: list[Identity], damaged: list[Identity], records: bool
    ) -> None:
        """Removes damaged blocks after what continued them; `records`: it is their records that are damaged."""
        leaving = Counter(damaged)
        self._leaving += leaving
        try:
            with suppress(StorageError):  # reported; the records go when the disk works again
                await self.remove(trie, children if records else children + damaged)
                await self.remove(trie, damaged if records else [], damaged=True)
        finally:
            self._leaving -= leaving

    def _is_back(self, trie: Trie, identity: Identity) -> bool:
        """Whether the block was written again while its removal waited; the write has replaced the record."""
        row = trie.find(identity[1])
        return row is not None and bool(trie.any_part[row] & (1 << DISK)) and self.identity(trie, row) == identity

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _leaves_first(trie: Trie, rows: Rows) -> tuple[Rows, Rows]:
    """Those of `rows`, children before parents, that nothing on disk continues once those before them are gone; the
    others."""
    gone: Counter[int] = Counter()
    leaves, inner = [], []
    for row, children, parent in zip(
        rows.tolist(), trie.tier_children[rows, DISK].tolist(), trie.parent[rows].tolist(), strict=True
    ):
        if children == gone[row]:
            leaves.append(row)
            gone[parent] += 1
        else:
            inner.append(row)
    return np.array(leaves, np.int64), np.array(inner, np.int64)


def _places(trie: Trie, row: int) -> list[DiskPart]:
    """Where the parts are that are on disk."""
    slots, checksums = trie.slots[row, DISK].tolist(), trie.checksums[row].tolist()
    return [DiskPart(*place) for place in zip(slots, trie.part_bytes, checksums, strict=True) if place[0] != NO_SLOT]


async def _to_the_end(work: Coroutine[object, object, T]) -> T:
    """Waits until `work` has ended, even when cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled():
        task.exception()  # seen; the cancellation is what the caller asked for
        raise cancelled
    return task.result()
