"""Copies between the tiers, and room made in them.

Demotion goes down a tier at a time, promotion straight to the tier that wants the block (paper
`prefix_cache_long_term_memory`, IV.B). All of it is driven from the event loop; only the copies themselves run
elsewhere (CUDA streams, threads). A row that takes part in a copy is held in the copy's source tier meanwhile.

Locks are taken downward only (GPU, CPU, disk): whoever makes room in a tier may have to make room in the one below.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from prefixd.cache.checksums import Checksums
from prefixd.cache.disk_copies import DiskCopies, Identity
from prefixd.cache.groups import GroupMask
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceRegistry
from prefixd.cache.page_victims import find_page_victims, has_other_sizes
from prefixd.cache.placement import Placement
from prefixd.cache.tiers import Slots, Tiers
from prefixd.cache.victims import can_free, find_expired, find_victims
from prefixd_swap import CopyEngine, EvictionPolicy, choose_page_victims

T = TypeVar("T")


_ALLOCATED_AT_ONCE = 2048  # blocks: a millisecond or two on the event loop
_EVICTED_AT_ONCE = 512
_COPIED_AT_ONCE = 512


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
        self._probing = asyncio.create_task(self.disk.health.watch(), name="disk-probe")
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

    async def allocate(
        self, tier: int, sizes: Sequence[int], blocks: int, *, ahead: bool = False, near: Sequence[int] = ()
    ) -> Slots:
        """Slots in flight for up to `blocks` blocks in the GPU or CPU tier, evicting what may go; fewer if need be.

        Args:
            tier: where.
            sizes: bytes of each of the p parts of a block.
            blocks: how many.
            ahead: spare copies of blocks that are in a tier above as well: they were made ahead of need, too, and one
                such copy must not cost another.
            near: see `Tiers.allocate`.

        Returns:
            [m, p], m <= blocks.
        """
        taken: list[Slots] = [np.empty((0, len(sizes)), np.int64)]
        count = 0
        if not self.tiers.exists(tier) or not self.tiers.ever_fits(tier, sizes):
            return taken[0]
        try:
            async with self._locks[tier]:
                while count < blocks:
                    some = self.tiers.allocate(tier, sizes, min(blocks - count, _ALLOCATED_AT_ONCE), near)
                    if len(some):
                        taken.append(some)
                        count += len(some)
                        near = some[-1].tolist()
                        await asyncio.sleep(0)
                    elif await self._evict(tier, sizes, min(blocks - count, _EVICTED_AT_ONCE), ahead):
                        await asyncio.sleep(0)
                    elif tier != CPU or not await self._checksums.wait_for_some():  # what was hashed may go now
                        break
        except BaseException:
            self.tiers.release(tier, np.concatenate(taken))
            raise
        return np.concatenate(taken)

    async def take_frames(self, count: int) -> list[int] | None:
        """`count` GPU frames in flight; all or none. Evicts nothing when not all can be had."""
        lacking = count - self.tiers.frames.free_count
        if not await can_free(self.tries, GPU, lacking, demotable=self.tiers.below(GPU) is not None):
            return None
        frames = (await self.allocate(GPU, (0,), count)).ravel().tolist()
        if len(frames) < count:
            self.tiers.release(GPU, frames)
            return None
        return frames

    async def _evict(self, tier: int, sizes: Sequence[int], want: int, ahead: bool) -> int:
        """Makes room in `tier`, whose lock the caller has, for up to `want` blocks with parts of `sizes` bytes.

        Bytes that only shorter prefixes need go before anything else. Then single blocks go, or whole pages where
        blocks of other sizes have the room; see `victims` and `page_victims`. Returns how many blocks lost something, 0
        when nothing may go.
        """
        placement = self._placement
        expired = await find_expired(self.tries, tier, want)
        freed = sum(placement.drop(trie, rows, tier, groups) for trie, rows, groups in expired)
        if not freed:
            below = self.tiers.below(tier)
            if below is not None:
                freed = await self._demote(tier, below, sizes, want, ahead)
        if not freed:  # nothing can go down: drop what may vanish
            victims, with_page = await self._choose(tier, sizes, want, ahead, demotable=False)
            freed = sum(placement.drop(trie, rows, tier, with_page=with_page) for trie, rows in victims)
        if freed:
            self.changed.set()
        return freed

    async def _demote(self, tier: int, below: int, sizes: Sequence[int], want: int, ahead: bool) -> int:
        """Copies the next victims down where they have no copy, and drops them; returns how many went."""
        placement = self._placement
        victims, with_page = await self._choose(tier, sizes, want, ahead, demotable=True)
        with ExitStack() as held:
            for trie, rows in victims:  # all of them before the first copy: rows may be recycled meanwhile
                held.enter_context(placement.holds.hold("eviction", trie, rows, tier))
            for trie, rows in victims:
                # A tier at a time, though there may be a copy further down: what was up here is wanted near.
                sinks = (trie.wanted(rows, tier) & ~trie.there[rows, below]) != 0
                if sinks.any():
                    arrived = await self.copy(trie, rows[sinks], tier, below, ahead=ahead)
                    self.tiers.counters[tier].demoted += arrived
        return sum(placement.drop(trie, rows, tier, with_page=with_page) for trie, rows in victims)

    async def _choose(
        self, tier: int, sizes: Sequence[int], want: int, ahead: bool, *, demotable: bool
    ) -> tuple[list[tuple[Trie, Rows]], bool]:
        """The next victims in the GPU or CPU tier, and whether they leave with their pages."""
        pages = self.tiers.pages(tier)
        if pages is None or not has_other_sizes(self.tries, tier, sizes):
            found = await find_victims(self.tries, tier, want, self.policy, demotable=demotable, spare_copies=ahead)
            return found, False
        found = await find_page_victims(
            self.tries,
            tier,
            sizes,
            want,
            self.policy,
            partial(choose_page_victims, pages),
            demotable=demotable,
            spare_copies=ahead,
            for_thread=lambda: partial(choose_page_victims, pages.copy()),
        )
        return found, True

    # -- moving -------------------------------------------------------------------------------------------------

    async def bring(self, trie: Trie, rows: Rows, tier: int, wanted: GroupMask | None = None) -> int:
        """Brings `rows` (held in `tier` by the caller) into `tier`; returns how many, from the first, are there.

        Copies that are under way already are waited for, not repeated (the paper's lock on a prefix, V.D).

        Args:
            trie: the blocks' trie.
            rows: [m] blocks.
            tier: where to.
            wanted: [m] KV groups of each that have to be there; all by default.
        """
        if wanted is None:
            wanted = np.full(len(rows), trie.all_groups, np.uint8)
        while True:
            own, others = await self._start_to_bring(trie, rows, tier, wanted)
            if own or others:
                await asyncio.shield(asyncio.gather(*own, *others))
            if not others:  # what others bring may be other KV groups of the same block
                break
        there = trie.lacking(rows, tier, wanted) == 0
        return len(rows) if there.all() else int(there.argmin())

    async def _start_to_bring(
        self, trie: Trie, rows: Rows, tier: int, wanted: GroupMask
    ) -> tuple[set[asyncio.Task[None]], set[asyncio.Task[None]]]:
        """Starts copies of what is lacking and that nobody brings; these copies, and those of others."""
        own: set[asyncio.Task[None]] = set()
        others: set[asyncio.Task[None]] = set()
        for start in range(0, len(rows), _ALLOCATED_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            some = slice(start, start + _ALLOCATED_AT_ONCE)
            lacking = trie.lacking(rows[some], tier, wanted[some])
            todo = np.flatnonzero(lacking)
            fresh: list[int] = []
            for at, row in zip(todo.tolist(), rows[some][todo].tolist(), strict=True):
                task = self._moving.get((trie.ordinal, row, tier))
                if task is None:
                    fresh.append(at)
                else:
                    others.add(task)
            if fresh:
                chosen = rows[some][fresh]
                task = asyncio.create_task(self._fetch(trie, chosen, tier, lacking[fresh]))
                for row in chosen.tolist():
                    self._moving[trie.ordinal, row, tier] = task
                own.add(task)
        return own, others - own

    async def _fetch(self, trie: Trie, rows: Rows, tier: int, wanted: GroupMask) -> None:
        """Brings `wanted` groups of `rows` to `tier`, each from the nearest tier that has it."""
        sources: list[tuple[int, Rows, GroupMask]] = []
        left = wanted.copy()
        with ExitStack() as held:
            try:
                for source in (GPU, CPU, DISK):
                    there = left & trie.there[rows, source]
                    if source != tier and there.any():
                        chosen = there != 0
                        sources.append((source, rows[chosen], there[chosen]))
                        held.enter_context(
                            self._placement.holds.hold("promotion", trie, rows[chosen], source, there[chosen])
                        )
                        left &= ~there
                for source, chosen_rows, groups in sources:
                    arrived = await self.copy(trie, chosen_rows, source, tier, groups)
                    self.tiers.counters[tier].promoted += arrived
            finally:
                for row in rows.tolist():
                    del self._moving[trie.ordinal, row, tier]

    async def copy(
        self, trie: Trie, rows: Rows, source: int, target: int, groups: GroupMask | None = None, *, ahead: bool = False
    ) -> int:
        """Copies rows, held in `source`, to `target`; returns how many arrived (the first ones when room is short).

        Args:
            trie: the blocks' trie.
            rows: [m] different blocks.
            source: a tier that has the `groups` of each.
            target: where to.
            groups: [m] KV groups to copy; all by default.
            ahead: see `allocate` and `write`.
        """
        if target == DISK:
            return await self.disk.write(trie, rows, source, ahead=ahead)
        if source == DISK and not self.tiers.disk_gives:
            return 0
        if groups is None:
            groups = np.full(len(rows), trie.all_groups, np.uint8)
        arrived = 0
        borders = 1 + np.flatnonzero(np.diff(groups))  # between blocks of which different groups are copied
        for start, end in pairwise([0, *borders.tolist(), len(rows)]):
            for first in range(start, end, _COPIED_AT_ONCE):
                some = rows[first : min(first + _COPIED_AT_ONCE, end)]
                came = await self._copy_alike(trie, some, source, target, int(groups[start]), ahead)
                arrived += came
                if came < len(some) and source != DISK:
                    return arrived  # there is no room for more
        return arrived

    async def _copy_alike(self, trie: Trie, rows: Rows, source: int, target: int, groups: int, ahead: bool) -> int:
        """As `copy`, the same groups of all blocks."""
        parts = np.flatnonzero(trie.part_mask & np.uint8(groups)).tolist()
        sizes = [trie.part_bytes[part] for part in parts]
        taken = await self.allocate(target, sizes, len(rows), ahead=ahead, near=self._near(trie, rows, target, parts))
        rows = rows[: len(taken)]
        arrived = np.zeros(len(rows), np.bool_)
        try:
            if source != DISK:
                pairs = [
                    (self.tiers.span(target, into, size), self.tiers.span(source, out, size))
                    for slots, old in zip(taken.tolist(), trie.slots[rows, source][:, parts].tolist(), strict=True)
                    for into, out, size in zip(slots, old, sizes, strict=True)
                ]
                await self.engine.copy(pairs)
                arrived[:] = True
            elif target == GPU and self.tiers.gpu_on_device:
                arrived[:] = await self._read_staged(trie, rows, taken)
            else:
                arrived[:] = await self.disk.read(trie, rows, parts, taken, target)
        finally:
            slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
            slots[:, parts] = taken
            self.tiers.release(target, slots[~arrived])
            self._enter(trie, rows[arrived], source, target, slots[arrived])
            if source == GPU and target == CPU:
                self.start_checksums(trie, rows[arrived])
        return int(arrived.sum())

    def _near(self, trie: Trie, rows: Rows, target: int, parts: Sequence[int]) -> list[int]:
        """The slots in `target` of the block before the first of `rows`: what is read together lies together."""
        parent = int(trie.parent[rows[0]]) if len(rows) else -1
        if parent < 0 or target == GPU:
            return []
        near: list[int] = trie.slots[parent, target][list(parts)].tolist()
        return near

    def _enter(self, trie: Trie, rows: Rows, source: int, target: int, slots: Slots) -> None:
        if len(rows):
            lacked = (trie.slots[rows, target] == NO_SLOT) & (slots != NO_SLOT)
            self._placement.put_lacking(trie, rows, target, slots)
            if source == DISK and target == CPU:
                trie.checksummed[rows] |= lacked  # verified

    def start_checksums(self, trie: Trie, rows: Rows) -> None:
        """Starts taking the checksums of blocks that have come to the CPU tier other than from disk; see `seals`."""
        self._checksums.begin(trie, rows)

    async def wait_for_checksums(self) -> None:
        """Waits until no block is held for its checksum's sake."""
        while await self._checksums.wait_for_some():
            pass

    async def _read_staged(self, trie: Trie, rows: Rows, taken: Slots) -> list[bool]:
        """Disk to GPU memory by way of the pinned arena, since a file cannot be read into a device address.

        Unverified: never ran on a GPU.
        """
        good: list[bool] = []
        for row, (frame,) in zip(rows.tolist(), taken.tolist(), strict=True):
            staged = await self.allocate(CPU, trie.part_bytes, 1)
            if not len(staged):
                self.lost["no room in the CPU tier to stage a read"] += 1
                good.append(False)
                continue
            try:
                fine = (await self.disk.read(trie, np.array([row]), [0], staged, CPU))[0]
                if fine:
                    size = trie.part_bytes[0]
                    await self.engine.copy(
                        [(self.tiers.span(GPU, frame, size), self.tiers.span(CPU, int(staged[0, 0]), size))]
                    )
                good.append(fine)
            finally:
                self.tiers.release(CPU, staged)
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

    async def forget(self, trie: Trie, rows: Sequence[int]) -> int:
        """Drops different blocks, children before parents, from every tier; skips what is held, kept, pinned or has
        other children.

        It holds the event loop for some 10 us a block: see `forgetting.py` for many blocks.

        Returns how many went, when their going is durable.

        Raises:
            StorageError: they are gone from memory, but the disk failed and they come back at the next start.
        """
        await self.wait_for_checksums()
        went, on_disk = self.forget_in_memory(trie, rows)
        await self.disk.remove(trie, on_disk)
        return went

    def forget_in_memory(self, trie: Trie, rows: Sequence[int]) -> tuple[int, list[Identity]]:
        """As `forget`, but those that were on disk are the caller's to remove there: they are returned, too."""
        going = trie.all_removable(rows)
        on_disk = going[(trie.any_part[going] & np.uint8(1 << DISK)) != 0]
        if self.tiers.disk is not None and len(on_disk) < len(going):
            self.lost["removed before it was written"] += len(going) - len(on_disk)
        identities = self.disk.identities(trie, on_disk)
        self._placement.discard(trie, going)
        return len(going), identities
