"""Copies between the tiers, and room made in them.

Demotion goes down a tier at a time, promotion straight to the tier that wants the block (paper
`prefix_cache_long_term_memory`, IV.B). All of it is driven from the event loop; only the copies themselves run
elsewhere (CUDA streams, threads). A row that takes part in a copy is held in the copy's source tier meanwhile.

Locks are taken downward only (GPU, CPU, disk): whoever makes room in a tier may have to make room in the one below.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np

from prefixd.cache.checksums import Checksums
from prefixd.cache.disk_copies import DiskCopies
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceRegistry
from prefixd.cache.placement import Placement
from prefixd.cache.tiers import Tiers
from prefixd.cache.victims import find_victims
from prefixd_swap import CopyEngine, EvictionPolicy

T = TypeVar("T")


class Mover:
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
        self.engine = engine
        self.policy = policy
        self._placement = Placement(tiers, clock)
        self._checksums = Checksums(self._placement)
        self.disk = DiskCopies(self._placement, tries, namespaces, policy, self._checksums, threads=io_threads)
        self._locks = (asyncio.Lock(), asyncio.Lock())
        self._moving: dict[tuple[int, int, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._working = 0

    @property
    def placement(self) -> Placement:
        """What is where."""
        return self._placement

    @property
    def lost(self) -> Counter[str]:
        """Blocks that could have been kept, by reason."""
        return self._placement.lost

    @property
    def queued(self) -> tuple[int, int]:
        """Blocks, and their bytes, that wait in the CPU tier to be written to disk."""
        if self.tiers.disk is None:
            return 0, 0
        return self._placement.queued_blocks, self._placement.queued_bytes

    @property
    def epoch(self) -> int:
        """Grows with every change of what is where."""
        return self._placement.epoch

    @property
    def changed(self) -> asyncio.Event:
        """Set when write-back may have work."""
        return self._placement.changed

    def start_probing(self) -> asyncio.Task[None]:
        """Has a background task try a disk tier in trouble until it works again; it ends with `close`."""
        self._probing = asyncio.create_task(self.disk.care.watch(), name="disk-probe")
        return self._probing

    @property
    def quiet(self) -> bool:
        """Whether nothing is under way that holds blocks or has slots in hand, besides leases and requests."""
        locks = any(lock.locked() for lock in self._locks) or self.disk.writing
        return not (self._working or self._moving or self._tasks or self._checksums.tasks or locks)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work that holds blocks or has slots in hand across an await."""
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1

    async def close(self) -> None:
        """Waits for the copies under way and ends the threads."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        await self.quiesce()
        self.disk.close()
        self._checksums.close()

    async def quiesce(self) -> None:
        """Waits for the copies under way."""
        while waiting := {*self._moving.values(), *self._tasks, *self.disk.busy, *self._checksums.tasks}:
            await asyncio.wait(waiting)

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Runs `work` beside the caller; `quiesce` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- room ---------------------------------------------------------------------------------------------------

    async def take(self, tier: int, sizes: Sequence[int], blocks: int, *, ahead: bool = False) -> list[list[int]]:
        """Loose slots for up to `blocks` blocks in the GPU or CPU tier, evicting what may go; fewer if need be.

        `ahead` spares copies of blocks that are in a tier above as well: they were made ahead of need, too, and one
        such copy must not cost another.
        """
        taken: list[list[int]] = []
        if not self.tiers.exists(tier) or not self.tiers.ever_fits(tier, sizes):
            return taken
        try:
            async with self._locks[tier]:
                while len(taken) < blocks:
                    slots = self.tiers.allocate(tier, sizes)
                    if slots is not None:
                        taken.append(slots)
                    elif await self._evict(tier, blocks - len(taken), ahead):
                        continue
                    elif tier != CPU or not await self._checksums.settle():  # what was hashed may go now
                        break
        except BaseException:
            for slots in taken:
                self.tiers.release(tier, slots)
            raise
        return taken

    async def take_frames(self, count: int) -> list[int] | None:
        """`count` in_flight GPU frames; all or none."""
        taken = [frame for (frame,) in await self.take(GPU, (0,), count)]
        if len(taken) < count:
            self.tiers.release(GPU, taken)
            return None
        return taken

    def put(self, trie: Trie, row: int, tier: int, slots: Sequence[int]) -> None:
        """Enters a copy into the trie; its slots belong to the trie from here on."""
        self._placement.put(trie, row, tier, slots)

    def unhold(self, trie: Trie, rows: Rows, tier: int) -> None:
        """Ends one hold of each row."""
        self._placement.unhold(trie, rows, tier)

    def sweep(self, trie: Trie, rows: Rows) -> None:
        """Forgets blocks that lost their last copy while somebody kept them, once nobody does."""
        self._placement.sweep(trie, rows)

    async def _evict(self, tier: int, want: int, ahead: bool) -> int:
        """Frees up to `want` blocks' copies in `tier`, whose lock the caller has; 0 when nothing may go."""
        below = self.tiers.below(tier)
        drop = self._placement.drop
        freed = 0
        if below is not None:
            victims = find_victims(self.tries, tier, want, self.policy, demotable=True, spare_copies=ahead)
            for trie, rows in victims:  # all of them before the first copy: rows may be recycled meanwhile
                trie.hold(rows, tier)
            try:
                for trie, rows in victims:
                    # A tier at a time, though there may be a copy further down: what was up here is wanted near.
                    sinks = (trie.some[rows] & np.uint8(1 << below)) == 0
                    sinks &= (trie.whole[rows] & np.uint8(1 << tier)) != 0
                    if sinks.any():
                        arrived = await self.copy(trie, rows[sinks], tier, below, ahead=ahead)
                        self.tiers.counters[tier].demoted += arrived
            finally:
                for trie, rows in victims:
                    trie.unhold(rows, tier)
            freed = sum(drop(trie, rows.tolist(), tier) for trie, rows in victims)
        if not freed:  # nothing can go down: drop what may vanish
            victims = find_victims(self.tries, tier, want, self.policy, demotable=False, spare_copies=ahead)
            freed = sum(drop(trie, rows.tolist(), tier) for trie, rows in victims)
        if freed:
            self.changed.set()
        return freed

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
                arrived = await self.copy(trie, there, source, tier)
                self.tiers.counters[tier].promoted += arrived
        finally:
            for there, source in held:
                self.unhold(trie, there, source)
            for row in rows.tolist():
                del self._moving[trie.ordinal, row, tier]

    async def copy(self, trie: Trie, rows: Rows, source: int, target: int, *, ahead: bool = False) -> int:
        """Copies rows, held in `source`, to `target`; returns how many arrived (the first ones when room is short).

        For `ahead` see `take` and `write`.
        """
        if target == DISK:
            return await self.disk.write(trie, rows, source, ahead=ahead)
        if source == DISK and not self.tiers.disk_gives:
            return 0
        taken = await self.take(target, trie.part_bytes, len(rows), ahead=ahead)
        rows = rows[: len(taken)]
        arrived = [False] * len(rows)
        try:
            if source != DISK:
                pairs = [
                    (self.tiers.span(target, into, size), self.tiers.span(source, out, size))
                    for row, slots in zip(rows.tolist(), taken, strict=True)
                    for into, out, size in zip(slots, trie.slots[row, source].tolist(), trie.part_bytes, strict=True)
                ]
                await self.engine.copy(pairs)
                arrived = [True] * len(rows)
            elif target == GPU and self.tiers.gpu_on_device:
                arrived = await self._read_staged(trie, rows, taken)
            else:
                arrived = await self.disk.read(trie, rows, taken, target)
        finally:
            for row, slots, good in zip(rows.tolist(), taken, arrived, strict=True):
                if good:
                    self._enter(trie, row, source, target, slots)
                else:
                    self.tiers.release(target, slots)
            if source == GPU and target == CPU:
                self.seal(trie, rows[arrived])
        return sum(arrived)

    def _enter(self, trie: Trie, row: int, source: int, target: int, slots: Sequence[int]) -> None:
        lacked = trie.slots[row, target] == NO_SLOT
        self._placement.put_lacking(trie, row, target, slots)
        if source == DISK and target == CPU:
            trie.sealed[row, lacked] = True  # verified

    def seal(self, trie: Trie, rows: Rows) -> None:
        """Starts taking the checksums of blocks that have come to the CPU tier other than from disk; see `seals`."""
        self._checksums.begin(trie, rows)

    async def sealed(self) -> None:
        """Waits until no block is held for its checksum's sake."""
        while await self._checksums.settle():
            pass

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
                fine = (await self.disk.read(trie, np.array([row]), staged, CPU))[0]
                if fine:
                    size = trie.part_bytes[0]
                    await self.engine.copy(
                        [(self.tiers.span(GPU, frame, size), self.tiers.span(CPU, staged[0][0], size))]
                    )
                good.append(fine)
            finally:
                self.tiers.release(CPU, staged[0])
        return good

    async def write(self, trie: Trie, rows: Rows, source: int, *, ahead: bool = False) -> int:
        """Writes rows, held in `source`, to disk, parents first; returns how many became durable.

        `ahead` makes room only at the cost of blocks that live on disk alone.
        """
        lacking = len(trie.missing(rows, DISK))
        written = await self.disk.write(trie, rows, source, ahead=ahead)
        if not ahead and written < lacking:
            self.lost[f"not written: {self._placement.why_unwritten()}"] += len(trie.missing(rows, DISK))
        return written

    def save_namespace(self, namespace: Namespace) -> None:
        """Makes durable, in the background, what a namespace stands for."""
        self.spawn(self.disk.save_namespace(namespace))

    # -- forgetting ---------------------------------------------------------------------------------------------

    async def forget(self, trie: Trie, rows: Iterable[int]) -> int:
        """Drops blocks, children before parents, from every tier; skips what is held, kept, pinned or has children.

        Returns how many went, when their going is durable.

        Raises:
            StorageError: they are gone from memory, but the disk failed and they come back at the next start.
        """
        await self.sealed()
        vanished = 0
        removed: list[tuple[bytes, bytes]] = []
        for row in rows:
            if not trie.removable(row):
                continue
            if trie.some[row] & (1 << DISK):
                removed.append(self.disk.identity(trie, row))
            elif self.tiers.disk is not None:
                self.lost["removed before it was written"] += 1
            self._placement.discard(trie, row)
            vanished += 1
        await self.disk.remove(trie, removed)
        return vanished
