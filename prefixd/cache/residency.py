"""Copies between the tiers, and room made in them.

Demotion goes down a tier at a time, promotion straight to the tier that wants the block (paper
`prefix_cache_long_term_memory`, IV.B). All of it is driven from the event loop; only the copies themselves run
elsewhere (CUDA streams, threads). A row that takes part in a copy is held in the copy's source tier meanwhile.

Locks are taken downward only (GPU, CPU, disk): whoever makes room in a tier may have to make room in the one below.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.tiers import Tiers
from prefixd.cache.trie import CPU, DISK, GPU, NO_SLOT, TIERS, Rows, Trie
from prefixd.cache.victims import find_victims
from prefixd_swap import ChecksumError, CopyEngine, DiskPart, EvictionPolicy, NewBlock, StorageError

log = logging.getLogger(__name__)

T = TypeVar("T")

_WRITE_BATCH = 64
_ALL = np.uint8(7)


class Residency:
    """Brings blocks to the tier that wants them and decides who leaves a full one.

    Args:
        tiers: the memory.
        tries: all tries, by ordinal; the list grows as geometries are registered.
        namespaces: for the ids on disk.
        engine: copies between memory spans.
        policy: who goes first.
        clock: seconds; passed in so that tests own the time.
        io_threads: threads for disk reads and writes.
    """

    def __init__(
        self,
        tiers: Tiers,
        tries: list[Trie],
        namespaces: NamespaceRegistry,
        engine: CopyEngine,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        io_threads: int = 4,
    ) -> None:
        self.tiers = tiers
        self.tries = tries
        self.namespaces = namespaces
        self.engine = engine
        self.policy = policy
        self.clock = clock
        self.lost: Counter[str] = Counter()
        self.epoch = 0  # grows with every change of what is where
        self.changed = asyncio.Event()  # set when write-back may have work
        self._locks = tuple(asyncio.Lock() for _ in range(TIERS))
        self._moving: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._io = ThreadPoolExecutor(io_threads, thread_name_prefix="prefixd-disk")

    async def close(self) -> None:
        """Waits for the copies under way and ends the threads."""
        await self.quiesce()
        self._io.shutdown()

    async def quiesce(self) -> None:
        """Waits for the copies under way."""
        while self._moving or self._tasks:
            await asyncio.gather(*self._moving.values(), *self._tasks, return_exceptions=True)

    # -- room ---------------------------------------------------------------------------------------------------

    async def take(self, tier: int, sizes: Sequence[int], blocks: int) -> list[list[int]]:
        """Loose slots for up to `blocks` blocks in the GPU or CPU tier, evicting what may go; fewer if need be."""
        taken: list[list[int]] = []
        if not self.tiers.exists(tier):
            return taken
        async with self._locks[tier]:
            while len(taken) < blocks:
                slots = self.tiers.allocate(tier, sizes)
                if slots is not None:
                    taken.append(slots)
                elif not await self._evict(tier, blocks - len(taken)):
                    break
        return taken

    async def take_frames(self, count: int) -> list[int] | None:
        """`count` loose GPU frames; all or none."""
        taken = [frame for (frame,) in await self.take(GPU, (0,), count)]
        if len(taken) < count:
            self.tiers.release(GPU, taken)
            return None
        return taken

    def put(self, trie: Trie, row: int, tier: int, slots: Sequence[int]) -> None:
        """Enters a copy into the trie; its slots belong to the trie from here on."""
        trie.put_copy(row, tier, slots, self.clock())
        if tier != DISK:
            self.tiers.loose[tier].difference_update(slots)
        self.epoch += 1

    async def _evict(self, tier: int, want: int) -> int:
        """Frees up to `want` blocks' copies in `tier`, whose lock the caller has; 0 when nothing may go."""
        below = self.tiers.below(tier)
        freed = 0
        if below is not None:
            for trie, rows in find_victims(self.tries, tier, want, self.policy, demotable=True):
                last = (trie.some[rows] & ~np.uint8(1 << tier) & _ALL) == 0
                last &= (trie.whole[rows] & np.uint8(1 << tier)) != 0
                trie.hold(rows, tier)
                try:
                    if last.any():
                        self.tiers.counters[tier].demoted += await self.copy(trie, rows[last], tier, below)
                finally:
                    trie.unhold(rows, tier)
                freed += self._drop(trie, rows.tolist(), tier)
        if not freed:  # nothing can go down: drop what may vanish
            for trie, rows in find_victims(self.tries, tier, want, self.policy, demotable=False):
                freed += self._drop(trie, rows.tolist(), tier)
        self.changed.set()
        return freed

    async def _evict_disk(self, want: int, *, only_alone: bool) -> int:
        removed: list[tuple[bytes, bytes]] = []
        for trie, rows in find_victims(self.tries, DISK, want, self.policy, demotable=False, only_alone=only_alone):
            removed += [self._identity(trie, row) for row in rows.tolist()]
            self._drop(trie, rows.tolist(), DISK)
        if removed:
            await self._in_thread(self.tiers.store.remove, removed)
        return len(removed)

    def _drop(self, trie: Trie, rows: Iterable[int], tier: int) -> int:
        """Drops copies that nobody holds and that are not the last of a block that has to stay."""
        dropped = 0
        for row in rows:
            last = int(trie.some[row]) == 1 << tier
            if trie.holds[row, tier] or not trie.some[row] & (1 << tier) or (last and not trie.removable(row)):
                continue
            self._discard_copy(trie, row, tier)
            self.tiers.counters[tier].evicted += 1
            dropped += 1
            if last:
                trie.remove(row)
        self.epoch += 1
        return dropped

    def _discard(self, trie: Trie, row: int) -> None:
        for tier in range(TIERS):
            if trie.some[row] & (1 << tier):
                self._discard_copy(trie, row, tier)
        trie.remove(row)

    def _discard_copy(self, trie: Trie, row: int, tier: int) -> None:
        slots = trie.drop_copy(row, tier)
        if tier != DISK:
            self.tiers.release(tier, slots)

    # -- moving -------------------------------------------------------------------------------------------------

    async def bring(self, trie: Trie, rows: Rows, tier: int) -> int:
        """Brings `rows` (held in `tier` by the caller) into `tier`; returns how many, from the first, are there.

        Copies that are under way already are waited for, not repeated (the paper's lock on a prefix, V.D).
        """
        waiting: set[asyncio.Task[None]] = set()
        fresh: list[int] = []
        for row in trie.missing(rows, tier).tolist():
            task = self._moving.get((trie.ordinal, row, tier))
            if task is None:
                fresh.append(row)
            else:
                waiting.add(task)
        if fresh:
            task = asyncio.create_task(self._fetch(trie, np.array(fresh, np.int64), tier))
            for row in fresh:
                self._moving[trie.ordinal, row, tier] = task
            waiting.add(task)
        if waiting:
            await asyncio.shield(asyncio.gather(*waiting))
        there = (trie.whole[rows] & (1 << tier)) != 0
        return len(rows) if there.all() else int(there.argmin())

    async def _fetch(self, trie: Trie, rows: Rows, tier: int) -> None:
        held: list[tuple[Rows, int]] = []
        left = rows
        try:
            for source in (GPU, CPU, DISK):
                there = (trie.whole[left] & (1 << source)) != 0
                if source != tier and there.any():
                    trie.hold(left[there], source)
                    held.append((left[there], source))
                    left = left[~there]
            for there, source in held:
                self.tiers.counters[tier].promoted += await self.copy(trie, there, source, tier)
        finally:
            for there, source in held:
                trie.unhold(there, source)
            for row in rows.tolist():
                del self._moving[trie.ordinal, row, tier]

    async def copy(self, trie: Trie, rows: Rows, source: int, target: int) -> int:
        """Copies rows, held in `source`, to `target`; returns how many arrived (the first ones when room is short)."""
        if target == DISK:
            return await self.write(trie, rows, source)
        taken = await self.take(target, trie.part_bytes, len(rows))
        rows = rows[: len(taken)]
        arrived = [False] * len(rows)
        try:
            if source == DISK:
                arrived = await self._read(trie, rows, taken, target)
            else:
                pairs = [
                    (self.tiers.span(target, into, size), self.tiers.span(source, out, size))
                    for row, slots in zip(rows.tolist(), taken, strict=True)
                    for into, out, size in zip(slots, trie.slots[row, source].tolist(), trie.part_bytes, strict=True)
                ]
                await self.engine.copy(pairs)
                arrived = [True] * len(rows)
        finally:
            for row, slots, good in zip(rows.tolist(), taken, arrived, strict=True):
                if good and not trie.some[row] & (1 << target):
                    self.put(trie, row, target, slots)
                else:
                    self.tiers.release(target, slots)
        return sum(arrived)

    async def _read(self, trie: Trie, rows: Rows, taken: list[list[int]], target: int) -> list[bool]:
        """Reads rows from disk into slots of `target`; a block whose bytes are bad is dropped, with its descendants."""
        store = self.tiers.store

        def read(row: int, slots: list[int]) -> None:
            for part, (slot, size) in enumerate(zip(slots, trie.part_bytes, strict=True)):
                where = DiskPart(int(trie.slots[row, DISK, part]), size, int(trie.checksums[row, part]))
                store.read(where, self.tiers.span(target, slot, size))

        if target == GPU and self.tiers.gpu_on_device:
            return await self._read_staged(trie, rows, taken)
        results = await asyncio.gather(
            *(self._in_thread(read, row, slots) for row, slots in zip(rows.tolist(), taken, strict=True)),
            return_exceptions=True,
        )
        return [self._judge(trie, row, result) for row, result in zip(rows.tolist(), results, strict=True)]

    async def _read_staged(self, trie: Trie, rows: Rows, taken: list[list[int]]) -> list[bool]:
        """Disk to GPU memory by way of the pinned arena, since a file cannot be read into a device address.

        Unverified: never ran on a GPU.
        """
        good: list[bool] = []
        for row, (frame,) in zip(rows.tolist(), taken, strict=True):
            staged = await self.take(CPU, trie.part_bytes, 1)
            if not staged:
                self.lost["no room in the CPU tier to stage a read"] += 1
                good.append(False)
                continue
            try:
                fine = (await self._read(trie, np.array([row]), staged, CPU))[0]
                if fine:
                    size = trie.part_bytes[0]
                    await self.engine.copy(
                        [(self.tiers.span(GPU, frame, size), self.tiers.span(CPU, staged[0][0], size))]
                    )
                good.append(fine)
            finally:
                self.tiers.release(CPU, staged[0])
        return good

    async def write(self, trie: Trie, rows: Rows, source: int, *, only_alone: bool = False) -> int:
        """Writes rows, held in `source`, to disk; returns how many became durable.

        Parents first, so that what survives a crash is prefix-closed. `only_alone` makes room by evicting only blocks
        that live on disk alone: what is written ahead of need must not cost another block its write-ahead copy.
        """
        rows = rows[np.argsort(trie.depth[rows], kind="stable")]
        written = 0
        async with self._locks[DISK]:
            for start in range(0, len(rows), _WRITE_BATCH):
                batch = trie.missing(rows[start : start + _WRITE_BATCH], DISK).tolist()
                left = await self._write_batch(trie, batch, source)
                if left and await self._evict_disk(len(left), only_alone=only_alone):
                    left = await self._write_batch(trie, left, source)
                written += len(batch) - len(left)
                if left:
                    self.lost["no room on disk" if not self.tiers.trouble[DISK] else "disk write failed"] += len(left)
                    break
        return written

    async def _write_batch(self, trie: Trie, batch: list[int], source: int) -> list[int]:
        """Writes a batch; returns the rows for which there was no room."""
        blocks = [self._new_block(trie, row, source) for row in batch]
        try:
            records = await self._in_thread(self.tiers.store.write, blocks)
        except StorageError as error:
            if not self.tiers.trouble[DISK]:
                log.error("the disk tier is out of service: %s", error)
            self.tiers.trouble[DISK] = str(error)
            return batch
        if self.tiers.trouble[DISK]:
            log.warning("the disk tier is back in service")
            self.tiers.trouble[DISK] = ""
        left = []
        for row, record in zip(batch, records, strict=True):
            if record is None:
                left.append(row)
                continue
            places = [part if part is not None else DiskPart(NO_SLOT, 0, 0) for part in record.parts]
            trie.checksums[row] = [place.checksum for place in places]
            self.put(trie, row, DISK, [place.slot for place in places])
        return left

    def _new_block(self, trie: Trie, row: int, source: int) -> NewBlock:
        parent = int(trie.parent[row])
        namespace, key = self._identity(trie, row)
        return NewBlock(
            namespace=namespace,
            key=key,
            parent=trie.key(parent) if parent >= 0 else b"",
            tokens=trie.tokens[row].tobytes(),
            depth=int(trie.depth[row]),
            parts=[
                self.tiers.span(source, slot, size)
                for slot, size in zip(trie.slots[row, source].tolist(), trie.part_bytes, strict=True)
            ],
        )

    # -- forgetting ---------------------------------------------------------------------------------------------

    async def forget(self, trie: Trie, rows: Iterable[int]) -> int:
        """Drops blocks, children before parents, from every tier; skips what is held, kept, pinned or has children.

        Returns how many went, when their going is durable.
        """
        vanished = 0
        removed: list[tuple[bytes, bytes]] = []
        for row in rows:
            if not trie.removable(row):
                continue
            if trie.some[row] & (1 << DISK):
                removed.append(self._identity(trie, row))
            self._discard(trie, row)
            vanished += 1
        self.epoch += 1
        await self._remove_from_disk(removed)
        return vanished

    def sweep(self, trie: Trie, rows: Rows) -> None:
        """Forgets blocks that lost their last copy while somebody kept them, once nobody does."""
        for row in rows[(trie.some[rows] == 0)].tolist()[::-1]:
            if trie.removable(row):
                trie.remove(row)

    def _judge(self, trie: Trie, row: int, result: BaseException | None) -> bool:
        if result is None:
            return True
        if not isinstance(result, StorageError):
            raise result
        self.lost["checksum mismatch on disk" if isinstance(result, ChecksumError) else "disk read failed"] += 1
        log.error("block %s dropped, it will be recomputed: %s", trie.key(row).hex(), result)
        identities = [self._identity(trie, row)]
        self._discard_copy(trie, row, DISK)
        if not trie.some[row]:
            for child in trie.subtree(row)[:0:-1]:
                if trie.removable(child):
                    if trie.some[child] & (1 << DISK):
                        identities.append(self._identity(trie, child))
                    self._discard(trie, child)
        self.epoch += 1
        task = asyncio.create_task(self._remove_from_disk(identities))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return False

    async def _remove_from_disk(self, ids: list[tuple[bytes, bytes]]) -> None:
        if ids:
            async with self._locks[DISK]:
                await self._in_thread(self.tiers.store.remove, ids)

    # -- helpers ------------------------------------------------------------------------------------------------

    def _identity(self, trie: Trie, row: int) -> tuple[bytes, bytes]:
        return self.namespaces.at(int(trie.namespace[row])).id, trie.key(row)

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._io, work, *args)
