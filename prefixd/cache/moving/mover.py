"""Moves blocks between the tiers.

A demotion goes down a tier at a time, a promotion straight to the tier that needs the block (paper
`prefix_cache_long_term_memory`, IV.B). The event loop controls all of it; `swap/transfers` moves the bytes, the
most urgent first. A row is held in the source tier while it is copied.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import numpy as np

from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache.coding.namespace_codings import EXACT, NamespaceCodings, TierCodec
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.copies import DiskCopies
from prefixd.cache.disk.part_coder import PartCoder
from prefixd.cache.disk.writes import Write
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.allocation import Allocation
from prefixd.cache.moving.room import Room
from prefixd.cache.moving.tier_copies import COPIED_AT_ONCE, Copying
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.layer_watch import LayerWatch
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.placement import Placement
from prefixd.cache.placement.tenant_use import TenantUse
from prefixd.cache.remote import Remote, RemoteOptions
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Tiers
from prefixd.observability.measurements import Timings
from prefixd_swap import CopyEngine, EvictionPolicy, UseHistory
from prefixd_swap.tiers import MemoryTier, Tier
from prefixd_swap.transfers import PIECE_BYTES, Urgency

log = logging.getLogger(__name__)

T = TypeVar("T")

_DURABLE_BYTES = 64 << 20
"""Bytes that are written and synced together if a caller waits for them. Between two pieces the disk idles for as long
as it needs for some 10 MiB, so the pieces of 4 MiB of other writes would make far less durable in a second."""
_MOVED_AHEAD = 2  # movements of one caller under way: the next starts before the last piece of the first has arrived


class Mover:
    """Brings blocks to the tier that needs them, writes them to disk, and makes room.

    Args:
        tiers: the memory, and the transfers.
        tries: all tries, by ordinal; the list grows as geometries are registered.
        namespaces: for the ids on disk.
        engine: copies between memory spans.
        policy: orders evictions.
        clock: seconds; passed in so that tests own the time.
        uses: counts the uses of blocks.
        admit_uses: a block is written to disk after this many uses.
        remote: settings of the remote tier, if there is one.
        tenants: the owners of blocks.
        disk_codec: how blocks are stored on disk.
        timings: measures loads and writes.
    """

    def __init__(
        self,
        tiers: Tiers,
        tries: list[Trie],
        namespaces: NamespaceRegistry,
        engine: CopyEngine,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        uses: UseHistory,
        admit_uses: int = 0,
        remote: RemoteOptions | None = None,
        tenants: Tenants | None = None,
        *,
        disk_codec: TierCodec = EXACT,
        timings: Timings | None = None,
    ) -> None:
        self.timings = timings or Timings()
        self.tiers = tiers
        self.use = TenantUse(tiers, tenants or Tenants())
        self.tries = tries
        self.policy = policy
        self.placement = Placement(tiers, clock, uses, self.use, admit_uses)
        self.lost = self.placement.lost
        self.changed = self.placement.changed
        self.checksums = Checksums(self.placement)
        self.codings = codings = NamespaceCodings(namespaces, self.use.tenants, disk_codec)
        self.coder = PartCoder(self.placement, codings, namespaces)
        self.disk = DiskCopies(self.placement, tries, namespaces, self.checksums, self.coder)
        self.room = Room(self.placement, tries, policy, self.disk)
        self.disk.writes.make_room = self.room.make
        self.disk.writes.timings = self.timings
        self.slots = Allocation(self.placement, tries, self.room, self.checksums, self.working)
        self.copying = Copying(self.placement, self.slots, engine, self.disk, self.checksums)
        self.room.copy = self.copying.copy
        self.remote: Remote | None = None
        if tiers.remote is not None:
            self.remote = Remote(
                *(tiers.remote, self.placement, tries, namespaces, clock, self.checksums, self._copy_ahead),
                remote or RemoteOptions(),
            )
            self.copying.read_remote = self.remote.copies.read
        self._moving: dict[tuple[int, int, int], Movement] = {}  # by (trie, row, level)
        self._tasks: set[asyncio.Task[object]] = set()
        self._probing: asyncio.Task[None] | None = None
        self.demanded_writes = 0
        """Writes to disk under way that a caller waits for; `changed` is set when one ends."""
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def queued(self) -> tuple[int, int]:
        """The number of blocks that wait in the shared tier to be written to disk, and their bytes."""
        if self.tiers.durable is None:
            return 0, 0
        return self.placement.queued_blocks, self.placement.queued_bytes_of.total()

    @property
    def epoch(self) -> int:
        """Grows with every change of a copy."""
        return self.placement.epoch

    def start_probing(self) -> asyncio.Task[None]:
        """Starts the background task that probes the disk after a failure; it ends with `close`."""
        self._probing = asyncio.create_task(self.disk.health.watch(), name="disk-probe")
        return self._probing

    @property
    def quiet(self) -> bool:
        """Whether no work is under way that holds blocks or has slots, except leases and requests."""
        changing = self.room.making or self.disk.changing
        return not (self._working or self._moving or self._tasks or self.checksums.tasks or changing)

    @contextmanager
    def working(self) -> Iterator[None]:
        """A context for work that holds blocks or has slots across an await."""
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    async def idle(self) -> None:
        """Waits until no work in `working` is under way."""
        await self._idle.wait()

    async def close(self) -> None:
        """Waits for the copies under way and ends the threads."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        await self.quiesce()
        await self.tiers.close()
        self.checksums.close()
        self.coder.close()

    async def quiesce(self) -> None:
        """Waits for the copies under way."""
        while waiting := {*self._tasks, *self.disk.damaged.busy, *self.checksums.tasks}:
            await asyncio.wait(waiting)

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Runs `work` beside the caller; `quiesce` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- room ---------------------------------------------------------------------------------------------------

    async def send_down(self, owner: str, trie: Trie, rows: Rows, tier: MemoryTier) -> int:
        """Evicts chosen blocks from `tier` at DEMAND urgency; returns how many were copied down (`Room.send_down`).

        Raises:
            SwapError: a copy failed; the blocks stay where they are.
        """
        with self.working():
            return await self.room.send_down(owner, tier, trie, rows, Movement(Urgency.DEMAND))

    async def _copy_ahead(self, trie: Trie, rows: Rows, source: Tier, target: Tier, movement: Movement) -> int:
        with self.working():
            return await self.copying.copy(trie, rows, source, target, movement, ahead=True)

    # -- moving -------------------------------------------------------------------------------------------------

    async def bring(
        self,
        trie: Trie,
        rows: Rows,
        tier: MemoryTier,
        wanted: GroupMask | None = None,
        *,
        urgency: Urgency | Callable[[], Urgency] = Urgency.DEMAND,
        due_s: float | None = None,
    ) -> int:
        """Brings `rows` (held in `tier` by the caller) into `tier`; returns how many, from the first, are there.

        Joins movements that are under way already and makes them as urgent, instead of repeating them (the paper's lock
        on a prefix, V.D). It joins movements to the shared tier too, so that a block is not read from disk twice: the
        rest of the way is short. A movement is dropped when all its callers were cancelled.

        Args:
            trie: the blocks' trie.
            rows: [m] blocks.
            tier: where to.
            wanted: [m] KV groups of each that have to be there; all by default.
            urgency: the urgency for this caller; a function is called for each movement that begins.
            due_s: when the caller needs the blocks, on the clock of the transfers: of equally urgent movements the
                first one due goes first.
        """
        if wanted is None:
            wanted = np.full(len(rows), trie.all_groups, np.uint8)
        urgency_now = urgency if callable(urgency) else partial(Urgency, urgency)
        while await self._bring_once(trie, rows, tier, wanted, urgency_now, due_s):
            pass  # others may have brought other KV groups of the same blocks
        there = trie.lacking(rows, tier.level, wanted) == 0
        return len(rows) if there.all() else int(there.argmin())

    async def bring_by_layers(
        self, trie: Trie, rows: Rows, tier: MemoryTier, wanted: GroupMask, watch: LayerWatch
    ) -> None:
        """Brings `rows`, which `tier` lacks and the caller holds there, layer by layer; `watch` follows that.

        Does nothing if one of them is on its way already, or is not wholly in the shared tier; the blocks come whole if
        there is no room for all of them at once. So `bring` is to be called afterwards.

        Raises:
            SwapError: it failed.
        """
        elsewhere = wanted & ~trie.there[rows, self.tiers.shared.level]
        if elsewhere.any() or any(self._coming(trie, row, tier) is not None for row in rows.tolist()):
            return
        movement = self._start(trie, rows, tier, wanted, Urgency.DEMAND, None, watch)
        try:
            await self._arrived(movement)
        finally:
            movement.leave()

    def hurry(self, trie: Trie, rows: Rows, tier: MemoryTier) -> None:
        """Raises movements of `rows` to `tier` that are under way to DEMAND, since a caller waits for them now."""
        for row in rows.tolist():
            if (movement := self._coming(trie, row, tier)) is not None:
                movement.raise_to(Urgency.DEMAND)

    def _coming(self, trie: Trie, row: int, tier: MemoryTier) -> Movement | None:
        """The movement under way that brings a row to `tier`, or to the shared tier before."""
        movement = self._moving.get((trie.ordinal, row, tier.level))
        return movement or self._moving.get((trie.ordinal, row, self.tiers.shared.level))

    async def _bring_once(
        self,
        trie: Trie,
        rows: Rows,
        tier: MemoryTier,
        wanted: GroupMask,
        urgency: Callable[[], Urgency],
        due_s: float | None,
    ) -> bool:
        """Moves lacking blocks that are not being moved yet, some at a time, and waits for all of them.

        Returns whether others moved some of them.
        """
        own: list[Movement] = []
        others: set[Movement] = set()
        with ExitStack() as joined:
            short = False
            for start in range(0, len(rows), COPIED_AT_ONCE):
                while len(own) >= _MOVED_AHEAD:
                    short |= not await self._arrived(own.pop(0))
                if short:
                    break  # later blocks must not take room that these lack
                here = slice(start, start + COPIED_AT_ONCE)
                lacking = trie.lacking(rows[here], tier.level, wanted[here])
                fresh: list[int] = []
                todo = np.flatnonzero(lacking)
                for at, row in zip(todo.tolist(), rows[here][todo].tolist(), strict=True):
                    movement = self._coming(trie, row, tier)
                    if movement is None:
                        fresh.append(at)
                    elif movement not in others:
                        others.add(movement)
                        movement.join(urgency(), due_s)
                        joined.callback(movement.leave)
                if fresh:
                    own.append(self._start(trie, rows[here][fresh], tier, lacking[fresh], urgency(), due_s))
                    joined.callback(own[-1].leave)
                else:
                    await give_way()
            for movement in own:
                await self._arrived(movement)
            for movement in others:
                await movement.wait()
        return bool(others)

    def _start(
        self,
        trie: Trie,
        rows: Rows,
        tier: MemoryTier,
        wanted: GroupMask,
        urgency: Urgency,
        due_s: float | None,
        by_layers: LayerWatch | None = None,
    ) -> Movement:
        """Starts a movement, which the caller has joined."""
        movement = Movement(urgency, due_s, by_layers)
        movement.join(urgency, due_s)
        for row in rows.tolist():
            self._moving[trie.ordinal, row, tier.level] = movement
        movement.task = self.spawn(self._fetch(trie, rows, tier, wanted, movement))
        movement.task.add_done_callback(partial(_note_unwanted, movement))
        return movement

    async def _arrived(self, movement: Movement) -> bool:
        """Waits for the end of a movement; returns whether all its blocks arrived.

        Raises:
            SwapError: it failed.
        """
        await movement.wait()
        return movement.task is not None and movement.task.result()

    async def _fetch(self, trie: Trie, rows: Rows, tier: MemoryTier, wanted: GroupMask, movement: Movement) -> bool:
        """Brings `wanted` groups of `rows` to `tier`, each from the nearest tier that has it.

        Returns whether all arrived.
        """
        sources: list[tuple[Tier, Rows, GroupMask]] = []
        left = wanted.copy()
        with ExitStack() as held:
            try:
                for source in self.tiers:
                    there = left & trie.there[rows, source.level]
                    if source is not tier and there.any():
                        chosen = there != 0
                        sources.append((source, rows[chosen], there[chosen]))
                        held.enter_context(
                            self.placement.holds.hold("promotion", trie, rows[chosen], source, there[chosen])
                        )
                        left &= ~there
                for source, chosen_rows, groups in sources:
                    begun_s = self.placement.clock()
                    arrived = await self.copying.copy(trie, chosen_rows, source, tier, movement, groups)
                    self.tiers.counters[tier.level].promoted += arrived
                    self._count_load(trie, source, groups[:arrived], movement, begun_s)
            finally:
                for row in rows.tolist():
                    del self._moving[trie.ordinal, row, tier.level]
        return not trie.lacking(rows, tier.level, wanted).any()

    def _count_load(self, trie: Trie, source: Tier, groups: GroupMask, movement: Movement, begun_s: float) -> None:
        """Counts copies up. `groups`: [m] KV groups of each block that arrived; if only some did, of the first ones."""
        if not len(groups):
            return
        self.tiers.counters[source.level].loaded_bytes += int(trie.group_bytes[groups].sum())
        self.timings.load_s.observe(self.placement.clock() - begun_s, source.name, movement.urgency.name.lower())

    async def write(
        self, trie: Trie, rows: Rows, source: MemoryTier, urgency: Urgency = Urgency.DEMAND, *, evict: bool = True
    ) -> int:
        """Writes rows, held in `source`, to disk, parents first; returns how many became durable.

        Without `evict` they get what room is free.
        """
        lacking = self.disk.missing(trie, rows)
        demanded = urgency is Urgency.DEMAND
        piece_bytes = _DURABLE_BYTES if demanded else PIECE_BYTES
        how = Write(trie, source, Movement(urgency), evict=evict, piece_bytes=piece_bytes)
        self.demanded_writes += demanded
        try:
            written = await self.disk.writes.write(how, rows)
        finally:
            if demanded:
                self.demanded_writes -= 1
                self.changed.set()  # write-back continues with the rest, and callers that wait for it check again
        if evict and written < lacking:
            for tenant, its in self.use.by_owner(trie, rows):
                if missing := self.disk.missing(trie, its):
                    self.lost[f"not written: {self.placement.why_unwritten(tenant, trie)}"] += missing
        return written


def _note_unwanted(movement: Movement, task: asyncio.Task[bool]) -> None:
    """Logs the error of a movement whose callers were all cancelled: none of them sees it."""
    if movement.dropped and not task.cancelled() and (error := task.exception()) is not None:
        log.error("blocks that nobody waits for could not be moved: %s", error)
