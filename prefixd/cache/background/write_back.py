"""Write-back: copies blocks down ahead of need, so that a later eviction does not have to wait for a copy."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import Pacer
from prefixd.base.tenancy.fairness import SharedLimit
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.scan import SCANNED_AT_ONCE, slices
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.mover import Mover
from prefixd.cache.moving.victims import Search, find_victims
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.paths import by_chain
from prefixd.cache.placement.unwritten import UnwrittenBlocks
from prefixd.observability.actor import DaemonTask, acting
from prefixd_swap import SwapError
from prefixd_swap.tiers import MemoryTier, Tier, can_move
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_BATCH = 64
_CLEAN_SHARE = 8  # an eighth of the compute tier is free or can be evicted without waiting for a copy
_MOST_VICTIMS = 2048  # next victims to find at once: some milliseconds on the event loop
_RETRY_S = 5.0
_NO_WAY = "no room in the CPU tier to write back through"


class WriteBack:
    """Copies every block of the shared tier to disk, and the next victims of the compute tier to the tier below.

    Args:
        mover: copies blocks.
        enabled: False: only `flush` works.
        limit_bytes: `admit` waits while more bytes of blocks than this wait in the CPU tier to be written to disk. The
            tenants share it.
    """

    def __init__(self, mover: Mover, *, enabled: bool = True, limit_bytes: int | None = None) -> None:
        self._mover = mover
        self._tiers = mover.tiers
        self._holds = mover.placement.holds
        self._enabled = enabled
        self.limit_bytes = limit_bytes
        self.written = 0
        """Blocks written to disk since the start."""
        self.pushed_back = 0
        """Calls that had to wait in `admit`."""
        self._queues: list[UnwrittenBlocks] = []  # by the ordinal of the trie
        self._without_room: set[Tenant] = set()  # the disk had no room for their blocks in this turn
        self._awaited = 0  # calls that wait in `admit`
        self._flushed_s = -math.inf  # when the last flush began that could try all blocks
        self._movement = Movement(Urgency.WRITE_BACK)  # of the batch under way, or the last one
        self._working = False
        self._turned = asyncio.Event()  # set, and replaced, when a call that waits in `admit` may go on
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        # Other writes shorten the queue too, such as a long durable commit, so check the waiting calls then.
        mover.placement.on_shorter_queue = self._wake_waiting

    def start(self) -> asyncio.Task[None] | None:
        """Starts working in the background, if enabled; the task ends with `stop`, or by a defect."""
        if self._enabled:
            with acting(DaemonTask.WRITE_BACK):
                self._task = asyncio.create_task(self._run(), name="write-back")
        return self._task

    async def admit(self, tenant: Tenant) -> None:
        """Waits until the disk has caught up with its queue, so that a tenant's new blocks do not outrun it.

        Does not wait in vain: while the disk is out of service, or has no room for the queued blocks, the queue may
        fill the memory, and eviction counts the lost blocks.
        """
        if not self._must_wait(tenant):
            return
        self.pushed_back += 1
        self._awaited += 1
        self._movement.raise_to(self._urgency)
        try:
            while self._must_wait(tenant):
                await self._turned.wait()
        finally:
            self._awaited -= 1

    @property
    def _urgency(self) -> Urgency:
        """As urgent as prefetches while a call waits in `admit`, so that these do not delay it."""
        return Urgency.PREFETCH if self._awaited else Urgency.WRITE_BACK

    def _must_wait(self, tenant: Tenant) -> bool:
        if self.limit_bytes is None or self._task is None or self._task.done() or not self._tiers.writes:
            return False
        works = self._working or self._mover.demanded_writes or self._mover.changed.is_set()
        return bool(works) and self._fills_queue(tenant, self.limit_bytes)

    def _fills_queue(self, tenant: Tenant, limit_bytes: int) -> bool:
        """Whether the queue is full, and this tenant has more than its share of it.

        A tenant within its share never waits, even if others exceed theirs, as one large reservation may. Blocks
        without room on disk do not count: they stay in memory and must not delay others.
        """
        placement, tenants = self._mover.placement, self._mover.use.tenants
        if tenant in placement.without_room:
            return False
        queued = {each: have for each, have in placement.queued_bytes_of.items() if each not in placement.without_room}
        shared = SharedLimit(limit_bytes, lambda: tenants.calling, queued)
        return shared[tenant] > shared.reserved and not shared.left(tenant)

    def _wake_waiting(self) -> None:
        """Has the calls that wait in `admit` check again."""
        if not self._awaited:
            return
        turned, self._turned = self._turned, asyncio.Event()
        turned.set()

    async def stop(self) -> None:
        """Ends after the batch under way."""
        if self._task is not None:
            self._stopping.set()
            self._mover.changed.set()
            await asyncio.wait({self._task})  # how it ended is its watcher's to report
            self._task = None
            self._wake_waiting()

    async def flush(self) -> int:
        """Writes blocks without a copy on disk to disk, as many as fit; returns how many became durable.

        To make room on disk, whole pages may be evicted, with copies of blocks that are also in memory. These are
        written again at the end, if there is free room.

        Blocks that were not used since the last flush get only free room: it found no room for them, and making room
        now would evict blocks that it has written instead.
        """
        if self._tiers.durable is None:
            return 0
        begun_s = self._mover.placement.clock()
        with self._mover.working():
            lost = self._mover.lost[_NO_WAY]
            written = await self._flush(self._flushed_s, evict=True)
            written += await self._flush(-math.inf, evict=False)
        if self._tiers.writes and self._mover.lost[_NO_WAY] == lost:
            self._flushed_s = begun_s
        self.written += written
        return written

    async def _flush(self, used_since_s: float, *, evict: bool) -> int:
        written = 0
        for trie in self._mover.tries:
            for source in reversed(self._tiers.memories):  # what a file can be written from first
                # Blocks that reach the disk through the CPU tier evict others there, so only with `evict`.
                if self._tiers.exists(source) and (evict or can_move(source, self._tiers.require_durable())):
                    written += await self._flush_tier(trie, source, used_since_s, evict)
        return written

    async def _flush_tier(self, trie: Trie, source: MemoryTier, used_since_s: float, evict: bool) -> int:
        """Writes a trie's blocks in `source` that were used since and are not on disk, parents first."""
        found, durable = [np.empty(0, np.int64)], self._tiers.require_durable()
        with ExitStack() as held:
            pacer = Pacer(SCANNED_AT_ONCE)
            for part in slices(trie.rows):
                waiting = trie.unwritten(part, source.level, durable.level, self._mover.placement.admit_uses)
                rows = part.start + np.flatnonzero(waiting)
                rows = rows[trie.last_used[rows] >= used_since_s]
                held.enter_context(self._holds.hold("flush", trie, rows, source))
                found.append(rows)
                await pacer.worked(part.stop - part.start)
            rows = np.concatenate(found)
            written = 0
            for _, its in self._mover.use.by_owner(trie, rows):  # one tenant may have no room while others have
                written += await self._to_disk(trie, its, source, evict)
            return written

    async def _to_disk(self, trie: Trie, rows: Rows, source: MemoryTier, evict: bool) -> int:
        """As `_flush_tier`, of one tenant's rows."""
        mover, shared = self._mover, self._tiers.shared
        if self._tiers.durable is None or can_move(source, self._tiers.durable):
            return await mover.write(trie, rows, source, Urgency.WRITE_BACK, evict=evict)
        written, rows = 0, await by_chain(trie, rows)
        while len(rows):  # device memory is written through the pinned arena, in batches
            batch = rows[:_BATCH]
            with self._holds.hold("flush", trie, batch, shared):
                wanted = trie.wanted(batch, source.level)
                there = await mover.bring(trie, batch, shared, wanted, urgency=Urgency.WRITE_BACK)
                written += await mover.write(trie, batch[:there], shared, Urgency.WRITE_BACK)
            if not there:
                mover.lost[_NO_WAY] += len(rows)
                break
            rows = rows[there:]
        return written

    async def _run(self) -> None:
        mover = self._mover
        while not self._stopping.is_set():
            await mover.changed.wait()
            mover.changed.clear()
            self._without_room.clear()
            self._working = True
            failed = False
            try:
                with mover.working():
                    while not self._stopping.is_set() and await self._batch():
                        self._wake_waiting()
            except SwapError as error:
                log.error("write back failed and is tried again: %s", error)
                failed = True
            finally:
                self._working = False
                self._wake_waiting()
            if failed:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _RETRY_S)
                mover.changed.set()

    async def _batch(self) -> bool:
        """Copies one batch down from each tier; returns whether there may be more to write to disk."""
        compute, shared, durable = self._tiers.compute, self._tiers.shared, self._tiers.durable
        below = self._tiers.below(compute)
        if below is not None:
            await self._down(await self._next_victims(compute, below), compute, below)
        if durable is None or not durable.writable or not self._mover.placement.queued_blocks:
            return False
        more = False
        for trie in self._mover.tries:
            queue = self._queue(trie)
            rows = await queue.next(_BATCH)
            written = await self._down([(trie, rows)], shared, durable)
            self._note_room(trie, rows)
            if written < len(rows):
                queue.begin_again()
                more |= 0 < len(self._without_room) < len(self._mover.use.tenants)  # others' blocks may follow
            self.written += written
            more |= written > 0
        return more

    def _note_room(self, trie: Trie, rows: Rows) -> None:
        """Marks tenants as without room if none of their blocks in `rows` could be written."""
        for tenant, its in self._mover.use.by_owner(trie, rows):
            if self._mover.disk.missing(trie, its) == len(its):
                self._without_room.add(tenant)
                self._mover.placement.without_room.add(tenant)
            else:
                self._mover.placement.without_room.discard(tenant)

    def _has_room(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        if not self._without_room:
            return np.ones(len(rows), np.bool_)
        return ~np.isin(self._mover.use.owners(trie, rows), [tenant.ordinal for tenant in self._without_room])

    async def _down(self, chosen: list[tuple[Trie, Rows]], source: MemoryTier, target: Tier) -> int:
        copied = 0
        self._movement = movement = Movement(self._urgency)
        with ExitStack() as held:
            held.enter_context(self._mover.room.under_way(source, movement))
            for trie, rows in chosen:  # hold all before the first copy: rows may be reused meanwhile
                held.enter_context(self._holds.hold("write-back", trie, rows, source))
            for trie, rows in chosen:
                if len(rows):
                    copied += await self._mover.copying.copy(trie, rows, source, target, movement, ahead=True)
        return copied

    def _queue(self, trie: Trie) -> UnwrittenBlocks:
        """The queue of a trie's blocks from the shared tier to disk."""
        source, placement = self._tiers.shared.level, self._mover.placement
        while len(self._queues) <= trie.ordinal:
            later = self._mover.tries[len(self._queues)]
            target = self._tiers.require_durable().level
            self._queues.append(
                UnwrittenBlocks(
                    *(later, source, target, placement.clock, placement.admit_uses),
                    partial(self._has_room, later),
                    partial(self._mover.use.owners, later),
                )
            )
        return self._queues[trie.ordinal]

    async def _next_victims(self, tier: MemoryTier, below: Tier) -> list[tuple[Trie, Rows]]:
        """The next victims of a tier that the tier below lacks."""
        mover = self._mover
        capacity_bytes = tier.capacity_bytes
        lacking_bytes = capacity_bytes // _CLEAN_SHARE - (capacity_bytes - tier.used_bytes)
        if lacking_bytes <= 0 or not mover.tries:
            return []
        want = min(lacking_bytes // min(tier.footprint(trie.part_bytes) for trie in mover.tries), _MOST_VICTIMS)
        search = Search(tier.level, mover.policy, demotable=True, now_s=mover.placement.clock())
        victims = await find_victims(mover.tries, search, want)
        lacking = [
            (trie, rows[(trie.wanted(rows, tier.level) & ~trie.there[rows, below.level]) != 0])
            for trie, rows in victims
        ]
        if below is not self._tiers.durable:
            return lacking
        return [(trie, rows[mover.placement.admits(trie, rows)]) for trie, rows in lacking]
