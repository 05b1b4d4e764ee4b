"""The disk tier's side of residency: blocks written, read, made room for and removed, in threads of its own.

One lock orders whatever changes the store, so that a removal and a later write of the same block cannot pass each
other. A call that is cancelled still ends in order: a thread that reads or writes a slot must be done before the
slot is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from prefixd.cache.ledger import Ledger
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.trie import DISK, NO_SLOT, Rows, Trie
from prefixd.cache.victims import find_victims
from prefixd_swap import ChecksumError, DiskFullError, DiskPart, EvictionPolicy, NewBlock, StorageError, round_to_slot

log = logging.getLogger(__name__)

T = TypeVar("T")

_WRITE_BATCH = 64

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
        ledger: where copies are entered.
        tries: all tries, by ordinal.
        namespaces: for the ids on disk.
        policy: who goes first.
        threads: threads for reads and writes.
    """

    def __init__(
        self,
        ledger: Ledger,
        tries: list[Trie],
        namespaces: NamespaceRegistry,
        policy: EvictionPolicy,
        *,
        threads: int = 4,
    ) -> None:
        self._ledger = ledger
        self._tiers = ledger.tiers
        self._tries = tries
        self._namespaces = namespaces
        self._policy = policy
        self._lock = asyncio.Lock()
        self._removals: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="prefixd-disk")

    @property
    def busy(self) -> set[asyncio.Task[None]]:
        """Removals of damaged blocks under way."""
        return self._removals

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def identity(self, trie: Trie, row: int) -> Identity:
        """The block's name on disk."""
        return self._namespaces.at(int(trie.namespace[row])).id, trie.key(row)

    # -- writing ------------------------------------------------------------------------------------------------

    async def write(self, trie: Trie, rows: Rows, source: int, *, ahead: bool = False) -> int:
        """Writes rows, held in `source`, to disk; returns how many became durable.

        Parents first, and no ancestor is evicted for a descendant, so that what survives a crash is prefix-closed.
        `ahead` makes room by evicting only blocks that live on disk alone: what is written ahead of need must not cost
        another block its copy.
        """
        return await _to_the_end(self._write(trie, rows, source, ahead))

    async def _write(self, trie: Trie, rows: Rows, source: int, ahead: bool) -> int:
        rows = rows[np.argsort(trie.depth[rows], kind="stable")]
        written = 0
        async with self._lock:
            for start in range(0, len(rows), _WRITE_BATCH):
                batch = trie.missing(rows[start : start + _WRITE_BATCH], DISK)
                try:
                    left = await self._write_batch(trie, batch.tolist(), source)
                    while left and await self._make_room(trie, rows, len(left), ahead):
                        left = await self._write_batch(trie, left, source)
                        if self._tiers.trouble[DISK]:  # it is not our blocks that are in the way
                            break
                except StorageError as error:
                    self._report(error)
                    left = trie.missing(batch, DISK).tolist()
                written += len(batch) - len(left)
                if left:
                    if not ahead:
                        trouble = self._tiers.trouble[DISK]
                        self._ledger.lost["disk write failed" if trouble else "no room on disk"] += len(left)
                    break
        return written

    async def _write_batch(self, trie: Trie, batch: list[int], source: int) -> list[int]:
        """Writes a batch; returns the rows for which there was no room."""
        if not batch:
            return batch
        blocks = [self._new_block(trie, row, source) for row in batch]
        try:
            records = await self._in_thread(self._tiers.store.write, blocks)
        except DiskFullError as error:
            self._report(error)
            return batch
        left = []
        for row, record in zip(batch, records, strict=True):
            if record is None:
                left.append(row)
                continue
            places = [part if part is not None else DiskPart(NO_SLOT, 0, 0) for part in record.parts]
            trie.checksums[row] = [place.checksum for place in places]
            self._ledger.put(trie, row, DISK, [place.slot for place in places])
        if len(left) < len(batch) and self._tiers.trouble[DISK]:
            log.warning("the disk tier is back in service")
            self._tiers.trouble[DISK] = ""
        return left

    async def _make_room(self, trie: Trie, rows: Rows, want: int, ahead: bool) -> int:
        """Evicts up to `want` blocks from disk, none of them in the prefixes of `rows`.

        Blocks whose slots are of the sizes that are wanted go first. Only when there is none of them that may go, those
        of other sizes do: their slots help once a whole slab of them is empty.
        """
        family = trie.ancestry(rows)
        trie.hold(family, DISK)
        removed: list[Identity] = []
        wanted = {round_to_slot(size) for size in trie.part_bytes}
        fitting = [other for other in self._tries if wanted <= {round_to_slot(size) for size in other.part_bytes}]
        try:
            for among in (fitting, self._tries):
                for other, victims in find_victims(
                    self._tries, DISK, want, self._policy, demotable=False, spare_copies=ahead, among=among
                ):
                    for row in victims.tolist():
                        identity = self.identity(other, row)
                        if self._ledger.drop(other, [row], DISK):
                            removed.append(identity)
                if removed:
                    await self._in_thread(self._tiers.store.remove, removed)
                    break
        finally:
            trie.unhold(family, DISK)
        return len(removed)

    def _new_block(self, trie: Trie, row: int, source: int) -> NewBlock:
        parent = int(trie.parent[row])
        namespace, key = self.identity(trie, row)
        return NewBlock(
            namespace=namespace,
            key=key,
            parent=trie.key(parent) if parent >= 0 else b"",
            tokens=trie.tokens[row].tobytes(),
            depth=int(trie.depth[row]),
            parts=[
                self._tiers.span(source, slot, size)
                for slot, size in zip(trie.slots[row, source].tolist(), trie.part_bytes, strict=True)
            ],
        )

    def _report(self, error: StorageError) -> None:
        if not self._tiers.trouble[DISK]:
            log.error("the disk tier is out of service: %s", error)
        self._tiers.trouble[DISK] = str(error)

    # -- reading ------------------------------------------------------------------------------------------------

    async def read(self, trie: Trie, rows: Rows, taken: Sequence[Sequence[int]], target: int) -> list[bool]:
        """Reads rows, held on disk, into slots of `target`, which a CPU can address; returns which are good.

        A block whose bytes are bad is dropped, with those of its descendants that nobody holds.
        """
        return await _to_the_end(self._read(trie, rows, taken, target))

    async def _read(self, trie: Trie, rows: Rows, taken: Sequence[Sequence[int]], target: int) -> list[bool]:
        store = self._tiers.store

        def read(row: int, slots: Sequence[int]) -> None:
            for part, (slot, size) in enumerate(zip(slots, trie.part_bytes, strict=True)):
                where = DiskPart(int(trie.slots[row, DISK, part]), size, int(trie.checksums[row, part]))
                store.read(where, self._tiers.span(target, slot, size))

        results = await asyncio.gather(
            *(self._in_thread(read, row, slots) for row, slots in zip(rows.tolist(), taken, strict=True)),
            return_exceptions=True,
        )
        return [self._judge(trie, row, result) for row, result in zip(rows.tolist(), results, strict=True)]

    def _judge(self, trie: Trie, row: int, result: BaseException | None) -> bool:
        if result is None:
            return True
        if not isinstance(result, StorageError):
            raise result
        self.drop_damaged(trie, row, result)
        return False

    async def recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        """Verifies a block on disk while nothing else changes the store, and drops it if it is bad.

        None when it is good, or when `row` is no longer the block that it was at `generation`.
        """
        return await _to_the_end(self._recheck(trie, row, generation))

    async def _recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        def there() -> bool:
            return trie.generation[row] == generation and bool(trie.some[row] & (1 << DISK))

        async with self._lock:
            if not there():
                return None
            identity = self.identity(trie, row)
            try:
                if await self._in_thread(self._tiers.store.check, *identity):
                    return None
                error = StorageError("the index has lost the block")
            except StorageError as found:
                error = found
            if not there():
                return None
            return Damage(identity, error, self.drop_damaged(trie, row, error))

    def drop_damaged(self, trie: Trie, row: int, error: StorageError) -> int:
        """Drops a block's copy on disk, whoever holds it, because its bytes cannot be had.

        A block that has no other copy is matched no more, and its descendants that nobody holds go with it; one that is
        in memory is written again by write-back. Their removal from the index becomes durable in the background, see
        `busy`. Counts the block under `lost`.

        Args:
            trie: the block's trie.
            row: a row that has a copy on disk.
            error: what was found.

        Returns:
            How many blocks have left the disk.
        """
        ledger = self._ledger
        ledger.lost["checksum mismatch on disk" if isinstance(error, ChecksumError) else "disk read failed"] += 1
        log.error("block %s dropped, it will be recomputed: %s", trie.key(row).hex(), error)
        identities = [self.identity(trie, row)]
        ledger.discard_copy(trie, row, DISK)
        if trie.some[row]:
            ledger.changed.set()  # write-back writes it again
        else:
            for child in trie.subtree(row)[:0:-1]:
                if trie.removable(child):
                    if trie.some[child] & (1 << DISK):
                        identities.append(self.identity(trie, child))
                    ledger.discard(trie, child)
            ledger.sweep(trie, np.array([row], np.int64))
        task = asyncio.create_task(self._remove_damaged(trie, identities))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)
        return len(identities)

    # -- removing -----------------------------------------------------------------------------------------------

    async def remove(self, trie: Trie, ids: list[Identity]) -> None:
        """Removes blocks that have left the trie; returns when that is durable.

        Raises:
            StorageError: I/O failed; the blocks come back at the next start.
        """
        if ids:
            await _to_the_end(self._remove(trie, ids))

    async def _remove(self, trie: Trie, ids: list[Identity]) -> None:
        async with self._lock:
            gone = [identity for identity in ids if not self._is_back(trie, identity)]
            await self._in_thread(self._tiers.store.remove, gone)

    async def _remove_damaged(self, trie: Trie, ids: list[Identity]) -> None:
        try:
            await self.remove(trie, ids)
        except StorageError as error:
            self._report(error)

    def _is_back(self, trie: Trie, identity: Identity) -> bool:
        """Whether the block was written again while its removal waited; the write has replaced the record."""
        row = trie.find(identity[1])
        return row is not None and bool(trie.some[row] & (1 << DISK)) and self.identity(trie, row) == identity

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


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
