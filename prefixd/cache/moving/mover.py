"""Copies between the tiers: whoever wants a block somewhere asks here.

Demotion goes down a tier at a time, promotion straight to the tier that wants the block (paper
`prefix_cache_long_term_memory`, IV.B). All of it is driven from the event loop; only the bytes move elsewhere, in the
order of their urgency (`swap/transfers`). A row that takes part in a copy is held in the copy's source tier meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from prefixd.base.pacer import give_way
from prefixd.base.tenants import Tenant, Tenants
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.copies import DiskCopies
from prefixd.cache.disk.records import Identity
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.moving.room import Room
from prefixd.cache.moving.victims import can_free
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.placement import Placement
from prefixd.cache.placement.tenant_use import TenantUse
from prefixd.cache.remote import Remote, RemoteOptions
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots, Tiers
from prefixd_swap import CopyEngine, EvictionPolicy, TransferDroppedError, UseHistory
from prefixd_swap.tiers import Account, MemoryCopies, MemoryTier, StoreTier, Tier, can_move
from prefixd_swap.transfers import PIECE_BYTES, Urgency, piece_items

T = TypeVar("T")
Bools = npt.NDArray[np.bool_]

Read = Callable[[Trie, Rows, Sequence[int], Slots, MemoryTier, Movement], Awaitable[Bools]]
"""(trie, rows, parts, slots, target, movement): see `DiskCopies.read`."""

_ALLOCATED_AT_ONCE = 2048  # slots: a millisecond or two on the event loop
_EVICTED_AT_ONCE = 384
_DURABLE_BYTES = 32 << 20
"""What is written and synced together where somebody waits until it is durable. A sync of data and index costs as much
as 6 MiB: pieces of 4 MiB, as others have, make half as much durable in a second."""
_MOVED_AT_ONCE = 512
_MOVED_AHEAD = 2  # movements of one caller under way: one's last piece does not keep the next one's first waiting
_STAGES = 3  # of a read to memory that a file cannot be read into: some are read while others are copied on


class Mover:
    """Brings blocks to the tier that wants them and decides who leaves a full one.

    Args:
        tiers: the memory, and the transfers.
        tries: all tries, by ordinal; the list grows as geometries are registered.
        namespaces: for the ids on disk.
        engine: copies between memory spans.
        policy: who goes first.
        clock: seconds; passed in so that tests own the time.
        uses: how often blocks were asked for; told of all that happens to them.
        admit_uses: see `Placement`.
        remote: how the remote tier is used, where there is one.
        tenants: whom the blocks belong to.
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
    ) -> None:
        self.tiers = tiers
        self.use = TenantUse(tiers, tenants or Tenants())
        self.tries = tries
        self.policy = policy
        self._copies = MemoryCopies(engine, tiers.transfers)
        self._placement = Placement(tiers, clock, uses, self.use, admit_uses)
        self._checksums = Checksums(self._placement)
        self.disk = DiskCopies(self._placement, tries, namespaces, self._checksums, self._make_room_on_disk)
        self.remote: Remote | None = None
        if tiers.remote is not None:
            self.remote = Remote(
                *(tiers.remote, self._placement, tries, namespaces, clock, self._checksums, self._copy_ahead),
                remote or RemoteOptions(),
            )
        self._room = Room(self._placement, tries, policy, self.disk, self._copy_down)
        self._moving: dict[tuple[int, int, int], Movement] = {}  # by (trie, row, level)
        self._tasks: set[asyncio.Task[object]] = set()
        self._probing: asyncio.Task[None] | None = None
        self._working = 0
        self._idle = asyncio.Event()
        self._idle.set()

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
        """Blocks, and their bytes, that wait in the shared tier to be written to disk."""
        if self.tiers.durable is None:
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
        changing = self._room.making or self.disk.writing
        return not (self._working or self._moving or self._tasks or self._checksums.tasks or changing)

    @contextmanager
    def holding(self, tier: Tier, movement: Movement) -> Iterator[None]:
        """Around a movement that holds blocks of `tier` which may go afterwards: who finds no room waits for it."""
        with self._room.under_way(tier, movement):
            yield

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around work that holds blocks or has slots in hand across an await."""
        self._working += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._idle.set()

    async def idle(self) -> None:
        """Returns when no such work is under way."""
        await self._idle.wait()

    async def close(self) -> None:
        """Waits for the copies under way and ends the threads."""
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait({self._probing})
        await self.quiesce()
        await self.tiers.close()
        self._checksums.close()

    async def quiesce(self) -> None:
        """Waits for the copies under way."""
        while waiting := {*self._tasks, *self.disk.damaged.busy, *self._checksums.tasks}:
            await asyncio.wait(waiting)

    def spawn(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        """Runs `work` beside the caller; `quiesce` waits for it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # -- room ---------------------------------------------------------------------------------------------------

    async def allocate(
        self,
        tier: MemoryTier,
        sizes: Sequence[int],
        blocks: int,
        movement: Movement | None = None,
        *,
        tenant: Tenant | None = None,
        account: Account | None = None,
        limit: Callable[[], int | None] | None = None,
        ahead: bool = False,
        near: Sequence[int] = (),
    ) -> Slots:
        """Slots in flight for up to `blocks` blocks in a memory tier, evicting what may go; fewer if need be.

        A tenant never gets above its most; before that its own blocks go.

        Args:
            tier: where.
            sizes: bytes of each of the p parts of a block.
            blocks: how many.
            movement: what they are for; by default somebody waits for them.
            tenant: whom they are for; None: nobody in particular.
            account: has their bytes; `TenantUse.moving` by default.
            limit: bytes that may be allocated beside what is; asked whenever something is about to be; None: any.
            ahead: spare copies of blocks that are in a tier above as well: they were made ahead of need, too, and one
                such copy must not cost another.
            near: slots [p] of a block of the same prefix, close to which the new ones should lie; NO_SLOT for none.

        Returns:
            [m, p], m <= blocks.
        """
        taken: list[Slots] = [np.empty((0, len(sizes)), np.int64)]
        count, footprint = 0, tier.footprint(sizes)
        if not tier.ever_fits(sizes) or (tenant is not None and self.use.never_fits(tenant, tier, footprint)):
            return taken[0]
        if tenant is not None and account is None:
            account = self.use.moving(tenant, tier)
        movement = movement or Movement(Urgency.DEMAND)
        hint = np.array(near, np.int64) if len(near) else None
        at_once = max(1, _ALLOCATED_AT_ONCE // len(sizes))
        with self.working():  # these slots are in nobody's book until this returns
            try:
                while count < blocks and not movement.dropped:
                    lacking = blocks - count
                    if limit is not None and (most := limit()) is not None:
                        lacking = min(lacking, most // footprint)
                    if lacking <= 0:
                        break
                    room = None if tenant is None else self.use.room(tenant, tier)
                    allowed = lacking if room is None else min(lacking, max(room, 0) // footprint)
                    if allowed and len(some := tier.allocate(sizes, min(allowed, at_once), hint, account)):
                        taken.append(some)
                        count += len(some)
                        hint = some[-1]
                        await give_way()
                        continue
                    want = min(allowed or lacking, _EVICTED_AT_ONCE)
                    hashing = set(self._checksums.tasks)  # their blocks are held
                    if await self._room.make(tier, sizes, want, movement, tenant, ahead=ahead, own=not allowed):
                        await give_way()
                        continue
                    hashing |= self._checksums.tasks
                    if tier is not self.tiers.shared or not hashing:
                        break
                    await asyncio.wait(hashing, return_when=asyncio.FIRST_COMPLETED)  # some of them may go now
            except BaseException:
                tier.free(np.concatenate(taken))
                raise
        return np.concatenate(taken)

    async def take_frames(
        self,
        count: int,
        widths: Sequence[int] = (1,),
        *,
        tenant: Tenant | None = None,
        near: Sequence[int] = (),
        beside: int = 0,
    ) -> list[int] | None:
        """Frames of the compute tier in flight, `count` times one or more for each of `widths`; all or none.

        Args:
            count: how often.
            widths: of each slot so many frames side by side, as a block's parts take them (`KvShape.block_widths`).
            tenant: whom they are for, to keep as long as it likes; the default one by default.
            near: slots [widths] of the same prefix, see `allocate`.
            beside: so many frames are taken next. Nothing is evicted when not all, these included, can be had; where
                parts of several sizes share large pages that is an estimate.

        Returns:
            Of each slot the first frame.
        """
        if not count or not widths:
            return []
        tier, frame = self.tiers.compute, self.tiers.frames.frame_bytes
        tenant = tenant or self.use.tenants.default
        sizes = [width * frame for width in widths]
        wanted = count * tier.footprint(sizes) + beside * frame
        limits = [(wanted + tier.used_bytes - tier.capacity_bytes, False)]
        if (room := self.use.room(tenant, tier)) is not None:
            limits.append((wanted - room, True))
        for lacking, own in limits:
            if lacking > 0:
                losses, weigh = self.use.losses(tenant, tier, own=own), partial(_bytes_of_part, tier)
                may_sink = self.tiers.below(tier) is not None
                if not await can_free(self.tries, tier.level, lacking, demotable=may_sink, weigh=weigh, losses=losses):
                    return None
        account = self.use.granted(tenant, tier)
        frames = await self.allocate(tier, sizes, count, tenant=tenant, account=account, near=near)
        if len(frames) < count:
            tier.free(frames)
            return None
        taken: list[int] = frames.ravel().tolist()
        return taken

    async def send_down(self, owner: str, trie: Trie, rows: Rows, tier: MemoryTier) -> int:
        """Sends blocks out of `tier`, as urgently as somebody waits for their room; see `Room.send_down`.

        Raises:
            SwapError: a copy failed; the blocks stay where they are.
        """
        with self.working():
            return await self._room.send_down(owner, tier, trie, rows, Movement(Urgency.DEMAND))

    async def _make_room_on_disk(
        self, sizes: Sequence[int], want: int, movement: Movement, tenant: Tenant, ahead: bool, own: bool
    ) -> bool:
        store = self.tiers.require_durable()
        return await self._room.make(store, sizes, want, movement, tenant, ahead=ahead, own=own)

    async def _copy_down(
        self, trie: Trie, rows: Rows, source: Tier, target: Tier, movement: Movement, ahead: bool
    ) -> int:
        return await self.copy(trie, rows, source, target, movement, ahead=ahead)

    async def _copy_ahead(self, trie: Trie, rows: Rows, source: Tier, target: Tier, movement: Movement) -> int:
        with self.working():
            return await self.copy(trie, rows, source, target, movement, ahead=True)

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

        Movements that are under way already are joined, and made as urgent, not repeated (the paper's lock on a prefix,
        V.D). So are movements to the shared tier, from which the rest of the way is short: nothing is read from disk
        twice. What nobody waits for any more, because its callers were cancelled, is dropped.

        Args:
            trie: the blocks' trie.
            rows: [m] blocks.
            tier: where to.
            wanted: [m] KV groups of each that have to be there; all by default.
            urgency: how urgent it is for this caller; asked for each movement that begins, where it may change.
            due_s: when he wants it, on the clock of the transfers: of equally urgent movements the first one due goes
                first.
        """
        if wanted is None:
            wanted = np.full(len(rows), trie.all_groups, np.uint8)
        urgency_now = urgency if callable(urgency) else partial(Urgency, urgency)
        while await self._bring_once(trie, rows, tier, wanted, urgency_now, due_s):
            pass  # what others bring may be other KV groups of the same block
        there = trie.lacking(rows, tier.level, wanted) == 0
        return len(rows) if there.all() else int(there.argmin())

    def hurry(self, trie: Trie, rows: Rows, tier: MemoryTier) -> None:
        """Somebody waits for `rows` by now: their movements to `tier` that are under way become DEMAND."""
        for row in rows.tolist():
            if (movement := self._coming(trie, row, tier)) is not None:
                movement.raise_to(Urgency.DEMAND)

    def _coming(self, trie: Trie, row: int, tier: MemoryTier) -> Movement | None:
        """What moves a row to `tier`, or to the shared tier on its way there."""
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
        """Moves what is lacking and nobody moves, some at a time, and waits for it and for what others move.

        Returns whether others moved some of it.
        """
        own: list[Movement] = []
        others: set[Movement] = set()
        with ExitStack() as joined:
            short = False
            for start in range(0, len(rows), _MOVED_AT_ONCE):
                while len(own) >= _MOVED_AHEAD:
                    short |= not await self._arrived(own.pop(0))
                if short:
                    break  # the first ones come first: no later one takes room that they lack
                here = slice(start, start + _MOVED_AT_ONCE)
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
        self, trie: Trie, rows: Rows, tier: MemoryTier, wanted: GroupMask, urgency: Urgency, due_s: float | None
    ) -> Movement:
        """Starts a movement that one caller has joined."""
        movement = Movement(urgency, due_s)
        movement.join(urgency, due_s)
        for row in rows.tolist():
            self._moving[trie.ordinal, row, tier.level] = movement
        movement.task = self.spawn(self._fetch(trie, rows, tier, wanted, movement))
        return movement

    async def _arrived(self, movement: Movement) -> bool:
        """Waits for the end of a movement; whether all of it arrived.

        Raises:
            SwapError: it failed.
        """
        await movement.wait()
        return movement.task is not None and movement.task.result()

    async def _fetch(self, trie: Trie, rows: Rows, tier: MemoryTier, wanted: GroupMask, movement: Movement) -> bool:
        """Brings `wanted` groups of `rows` to `tier`, each from the nearest tier that has it; whether all arrived."""
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
                            self._placement.holds.hold("promotion", trie, rows[chosen], source, there[chosen])
                        )
                        left &= ~there
                for source, chosen_rows, groups in sources:
                    arrived = await self.copy(trie, chosen_rows, source, tier, movement, groups)
                    self.tiers.counters(tier).promoted += arrived
            finally:
                for row in rows.tolist():
                    del self._moving[trie.ordinal, row, tier.level]
        return not trie.lacking(rows, tier.level, wanted).any()

    async def copy(
        self,
        trie: Trie,
        rows: Rows,
        source: Tier,
        target: Tier,
        movement: Movement,
        groups: GroupMask | None = None,
        *,
        ahead: bool = False,
    ) -> int:
        """Copies rows, held in `source`, to `target`; returns how many arrived, of each tenant the first ones when room
        is short.

        Args:
            trie: the blocks' trie.
            rows: [m] different blocks.
            source: a tier that has the `groups` of each.
            target: where to.
            movement: what it belongs to.
            groups: [m] KV groups to copy; by default those that `source` has, `target` lacks and a prefix needs.
            ahead: see `allocate` and `write`.
        """
        if isinstance(target, StoreTier):
            return await self.disk.write(trie, rows, _memory(source), movement, ahead=ahead)
        memory = _memory(target)
        if not self.tiers.gives(source):
            return 0
        if groups is None:
            groups = trie.wanted(rows, source.level) & ~trie.there[rows, target.level]
            rows, groups = rows[groups != 0], groups[groups != 0]
        arrived = 0
        for tenant, mine in self.use.places_by_owner(trie, rows):
            arrived += await self._copy_of(trie, rows[mine], source, memory, groups[mine], movement, tenant, ahead)
        return arrived

    async def _copy_of(
        self,
        trie: Trie,
        rows: Rows,
        source: Tier,
        memory: MemoryTier,
        groups: GroupMask,
        movement: Movement,
        tenant: Tenant,
        ahead: bool,
    ) -> int:
        """As `copy`, blocks of one tenant."""
        arrived = 0
        borders = 1 + np.flatnonzero(np.diff(groups))  # between blocks of which different groups are copied
        for start, end in pairwise([0, *borders.tolist(), len(rows)]):
            for first in range(start, end, _MOVED_AT_ONCE):
                some = rows[first : min(first + _MOVED_AT_ONCE, end)]
                came = await self._copy_alike(trie, some, source, memory, int(groups[start]), movement, tenant, ahead)
                arrived += came
                if movement.dropped or (came < len(some) and isinstance(source, MemoryTier)):
                    return arrived  # nobody wants more, or there is no room for more
        return arrived

    async def _copy_alike(
        self,
        trie: Trie,
        rows: Rows,
        source: Tier,
        target: MemoryTier,
        groups: int,
        movement: Movement,
        tenant: Tenant,
        ahead: bool,
    ) -> int:
        """As `copy`, the same groups of all blocks of one tenant."""
        parts = np.flatnonzero(trie.part_mask & np.uint8(groups)).tolist()
        sizes = [trie.part_bytes[part] for part in parts]
        near = self._near(trie, rows, target, parts)
        taken = await self.allocate(target, sizes, len(rows), movement, tenant=tenant, ahead=ahead, near=near)
        rows = rows[: len(taken)]
        arrived = np.zeros(len(rows), np.bool_)
        try:
            if isinstance(source, MemoryTier):
                old = trie.slots[rows, source.level][:, parts]
                arrived = await self._copy_memory(source, old, target, taken, sizes, movement)
            elif can_move(source, target):
                arrived = await self._reader(source)(trie, rows, parts, taken, target, movement)
            else:
                await self._read_staged(trie, rows, parts, taken, source, target, movement, tenant, arrived)
        finally:
            slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
            slots[:, parts] = taken
            target.free(slots[~arrived])
            self._enter(trie, rows[arrived], source, target, slots[arrived])
            if source is self.tiers.compute and target is self.tiers.shared:
                self.start_checksums(trie, rows[arrived])
        return int(arrived.sum())

    async def _copy_memory(
        self,
        source: MemoryTier,
        old: Slots,
        target: MemoryTier,
        taken: Slots,
        sizes: Sequence[int],
        movement: Movement,
    ) -> Bools:
        """Copies slots [m, parts] to others; which blocks were copied.

        Raises:
            SwapError: a copy failed.
        """
        copies = self._copies.submit(source, old, target, taken, sizes, movement.urgency, deadline_s=movement.due_s)
        results = await movement.run(copies)
        failed = [result for result in results if result is not None and not isinstance(result, TransferDroppedError)]
        if failed:
            raise failed[0]
        return np.array([result is None for result in results], np.bool_)

    def _reader(self, source: Tier) -> Read:
        """What reads blocks from a store."""
        return self.remote.copies.read if self.remote is not None and source is self.tiers.remote else self.disk.read

    def _near(self, trie: Trie, rows: Rows, target: Tier, parts: Sequence[int]) -> list[int]:
        """The slots in `target` of the block before the first of `rows`: what is read together lies together."""
        parent = int(trie.parent[rows[0]]) if len(rows) else -1
        if parent < 0:
            return []
        near: list[int] = trie.slots[parent, target.level][list(parts)].tolist()
        return near

    def _enter(self, trie: Trie, rows: Rows, source: Tier, target: MemoryTier, slots: Slots) -> None:
        if len(rows):
            lacked = (trie.slots[rows, target.level] == NO_SLOT) & (slots != NO_SLOT)
            self._placement.put_lacking(trie, rows, target, slots)
            if not isinstance(source, MemoryTier) and target is self.tiers.shared:
                verified = lacked
                if source is self.tiers.remote and self.tiers.durable is not None:  # whose checksums are the trie's
                    verified &= trie.slots[rows, self.tiers.durable.level] == NO_SLOT
                trie.checksummed[rows] |= verified

    def start_checksums(self, trie: Trie, rows: Rows) -> None:
        """Starts taking the checksums of blocks that have come to the shared tier from memory; see `checksums`."""
        self._checksums.begin(trie, rows)

    async def wait_for_checksums(self) -> None:
        """Waits until no block is held for its checksum's sake."""
        while await self._checksums.wait_for_some():
            pass

    async def _read_staged(
        self,
        trie: Trie,
        rows: Rows,
        parts: Sequence[int],
        taken: Slots,
        source: Tier,
        target: MemoryTier,
        movement: Movement,
        tenant: Tenant,
        arrived: Bools,
    ) -> None:
        """Reads into memory that a file cannot be read into, by way of the shared tier; sets `arrived` [m].

        A pipeline: while some blocks are copied on, others are read.
        """
        sizes = [trie.part_bytes[part] for part in parts]
        shared, read_from = self.tiers.shared, self._reader(source)
        step = piece_items(sum(sizes), len(rows), at_least=_STAGES)
        starts = iter(range(0, len(rows), step))  # the stages share it

        async def stage() -> None:
            for start in starts:
                end = min(start + step, len(rows))
                while start < end and not movement.dropped:
                    staged = await self.allocate(shared, sizes, end - start, movement, tenant=tenant)
                    try:
                        if not len(staged):
                            self.lost["no room in the CPU tier to stage a read"] += end - start
                            return
                        here = np.arange(start, start + len(staged))
                        read = await read_from(trie, rows[here], parts, staged, shared, movement)
                        copied = await self._copy_memory(
                            shared, staged[read], target, taken[here[read]], sizes, movement
                        )
                        arrived[here[read][copied]] = True
                    finally:
                        shared.free(staged)
                    start += len(staged)

        async with asyncio.TaskGroup() as group:  # when one fails, the others end before this raises
            for _ in range(_STAGES):
                group.create_task(stage())

    async def write(
        self, trie: Trie, rows: Rows, source: MemoryTier, urgency: Urgency = Urgency.DEMAND, *, evict: bool = True
    ) -> int:
        """Writes rows, held in `source`, to disk, parents first; returns how many became durable.

        Without `evict` they get what room is free.
        """
        lacking = self.disk.missing(trie, rows)
        piece_bytes = _DURABLE_BYTES if urgency is Urgency.DEMAND else PIECE_BYTES
        written = await self.disk.write(trie, rows, source, Movement(urgency), evict=evict, piece_bytes=piece_bytes)
        if evict and written < lacking:
            for tenant, its in self.use.by_owner(trie, rows):
                if missing := self.disk.missing(trie, its):
                    self.lost[f"not written: {self._placement.why_unwritten(tenant, trie)}"] += missing
        return written

    # -- forgetting ---------------------------------------------------------------------------------------------

    async def forget(self, trie: Trie, rows: Sequence[int]) -> int:
        """Drops different blocks, children before parents, from every tier; skips what is held, kept, pinned or has
        other children.

        It holds the event loop for some 10 us a block: see `background/forgetting.py` for many blocks.

        Returns how many went, when their going is durable.

        Raises:
            StorageError: they are gone from memory, but the disk failed and they come back at the next start.
        """
        await self.wait_for_checksums()
        went, on_disk = self.forget_in_memory(trie, rows)
        await self.disk.removals.remove(trie, on_disk)
        return went

    def forget_in_memory(self, trie: Trie, rows: Sequence[int]) -> tuple[int, list[Identity]]:
        """As `forget`, but those that were on disk are the caller's to remove there: they are returned, too."""
        going = trie.all_removable(rows)
        on_disk = self.disk.records.stored(trie, going)
        if self.tiers.durable is not None and len(on_disk) < len(going):
            self.lost["removed before it was written"] += len(going) - len(on_disk)
        identities = self.disk.records.identities(trie, on_disk)
        self._placement.discard(trie, going)
        return len(going), identities


def _memory(tier: Tier) -> MemoryTier:
    """The tier, where only one that has addresses can be meant."""
    if not isinstance(tier, MemoryTier):
        raise TypeError(f"the {tier.name} tier has no addresses")
    return tier


def _bytes_of_part(tier: MemoryTier, nbytes: int) -> int:
    return tier.footprint((nbytes,))
