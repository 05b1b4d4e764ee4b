"""Growing and shrinking the GPU tier while requests run, in slices: the memory itself goes back to the device.

```
grow    create (thread)   tell the worker    admit                        a slice: its frames can be allocated
shrink  make room, allocate   withdraw   the worker lets go   destroy (thread)   forget
```

A slice is done as a whole or not at all, even if the caller is cancelled or the worker dies meanwhile: a dead worker
maps nothing, and its successor is handed the frames that exist then. Between two slices other tasks run, and the resize
can be ended; the tier keeps the size that it has reached.

**A worker that loads its model** reads no message, maybe for minutes. Growing does not wait for it: it is given the new
frames before its first request, and the memory that it is about to take is left to it. No frame is taken away
meanwhile; while a worker is being started, before it is handed the frames, this does not wait either.

**Which frames are freed.** Room is made as for a prefetch: cached blocks go down the tiers, or are evicted; requests
that wait for blocks have precedence. Running requests keep their frames, and get more while there are any, by
preemption if need be (`preemption.py`). From the beginning on, the dispatcher counts on the smaller tier, so no new
request takes frames that became free. If a request that runs, or has run, may need more frames than the smaller tier
has, the tier stays that large until the request has ended. If no slice is done for `wait_s` seconds (because of such a
request, of others that hold frames, of a slow tier below, or of a worker that loads), the resize ends, and says why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from prefixd.base.errors import (
    ExhaustedError,
    InvalidArgumentError,
    PreconditionError,
    PrefixdError,
    UnavailableError,
)
from prefixd.base.long_work.steps import in_thread
from prefixd.base.tenancy.tenants import check_guarantees
from prefixd.cache import TieredCache
from prefixd.cache.moving.allocation import Claim
from prefixd.cache.placement.movement import Movement
from prefixd.observability.actor import DaemonTask, acting
from prefixd.observability.eviction_journal import Reason, because
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.frame_budget import name_holders
from prefixd.serving.models.worker_process import WorkerProcess
from prefixd_swap import FrameId, FramePool, SwapError
from prefixd_swap.tiers import GpuTier
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_SLICE_BYTES = 64 << 20
_SLICE_FRAMES = 1024  # some milliseconds of accounting on the event loop
_RETRY_S = 0.02
_PROGRESS_S = 0.1


@dataclass(slots=True)
class ResizeProgress:
    """The progress of a resize.

    Attributes:
        before_bytes: the tier's size at its start.
        target_bytes: the requested size, in whole frames.
        nbytes: the tier's size now.
        evicted_blocks: copies that left the tier since its start, for any reason.
        demoted_blocks: of these, copies that were written a tier down before.
        unfinished: why it ended before the target was reached; empty if it reached it.
        done: whether it has ended.
    """

    before_bytes: int
    target_bytes: int
    nbytes: int
    evicted_blocks: int = 0
    demoted_blocks: int = 0
    unfinished: str = ""
    done: bool = False


@dataclass(slots=True)
class Change:
    """A change of the tier's size that is under way, or has ended.

    Attributes:
        frames: the size to reach; the caller may change it meanwhile, on the same side of the present size.
        wait_s: it ends when no slice was done for so long.
        retry_s: pause before it looks again for frames that can go.
        on_slice: called after each slice that makes the tier larger.
        may_add: called before each such slice with its frames; False ends the change.
        by_itself: no operator asked for it; whoever began it logs what came of it.
        deadline_s: when it ends, unless a slice is done before.
        unfinished: why it ended before `frames` was reached; empty if it reached it.
        cancelled: set by the caller to end it after the slice under way.
        task: runs it.
    """

    frames: int
    wait_s: float
    retry_s: float
    on_slice: Callable[[], None]
    may_add: Callable[[int], Awaitable[bool]]
    deadline_s: float
    by_itself: bool = False
    unfinished: str = ""
    cancelled: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.task is not None and not self.task.done()

    async def wait(self) -> None:
        """Returns when it has ended."""
        if self.task is not None:
            await asyncio.wait({self.task})


class TierResize:
    """Resizes the compute tier; one change at a time.

    Args:
        cache: the cache.
        workers: of all models; they map the tier's memory.
        dispatchers: of all models; they give the tier's frames to requests.
        clock: seconds.

    Attributes:
        limit: of a tier that changes its size by itself: makes the frames of a resize its most, when no change is under
            way any more; returns to which size to change now. Raises InvalidArgumentError. None: the size is fixed.
    """

    limit: Callable[[int], Awaitable[int]] | None = None

    def __init__(
        self,
        cache: TieredCache,
        workers: Sequence[WorkerProcess],
        dispatchers: Sequence[Dispatcher],
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._workers = tuple(workers)
        self._dispatchers = tuple(dispatchers)
        self._clock = clock
        self._stopping = False
        self._begun = False
        self._change: Change | None = None
        self._withdrawn: list[FrameId] = []  # withdrawn frames whose memory is not given back yet

    async def resize(self, nbytes: int, wait_s: float) -> AsyncGenerator[ResizeProgress, None]:
        """Resizes the tier to at most `nbytes`; yields the progress, for the last time when the resize is done.

        Closing the generator ends the resize after the slice under way. If the tier changes its size by itself,
        `nbytes` is the most that it has from now on, and it only becomes smaller here.

        Args:
            nbytes: the new size; as many whole frames as fit.
            wait_s: how long to wait while no slice is done.

        Raises:
            InvalidArgumentError: the smallest request, or the tenants' guarantees, would not fit into the tier.
            ExhaustedError: the device does not have enough memory.
            PreconditionError: a resize is under way; or there is no tier, because the model is being loaded or its
                worker was given up.
            UnavailableError: the daemon ends.
        """
        tier = self._tier()
        pool = tier.pool
        frame_bytes = pool.frame_bytes
        frames, least = nbytes // frame_bytes, max(each.least_frames for each in self._dispatchers)
        if frames < least:
            raise InvalidArgumentError(
                f"{nbytes} bytes hold {frames} frames of {frame_bytes} bytes; a request needs at least {least}: "
                f"give {least * frame_bytes} or more"
            )
        try:
            check_guarantees({each.name: each.quota for each in self._cache.tenants}, tier.name, nbytes)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None
        if self._begun and not (self._change is not None and self._change.by_itself):
            self._refuse_second(frame_bytes)
        if self.limit is not None:
            if frames > pool.most:
                raise ExhaustedError(
                    f"{nbytes} bytes are more than the gpu tier can ever have; give at most {pool.most * frame_bytes}"
                )
            frames = await self.limit(frames)
        if self._begun:
            self._refuse_second(frame_bytes)
        self._begun = True
        try:
            await _check_fits(pool, frames, self.coming_bytes)
            log.info("resizing the gpu tier from %d to %d frames", pool.capacity, frames)
            change = self._start(tier, frames, wait_s, _RETRY_S)
        except BaseException:
            self._begun = False
            raise
        counters = self._cache.tiers.counters[tier.level]
        evicted, demoted = counters.evicted, counters.demoted
        progress = ResizeProgress(pool.capacity * frame_bytes, frames * frame_bytes, pool.capacity * frame_bytes)
        assert change.task is not None
        try:
            while not progress.done:
                await asyncio.wait({change.task}, timeout=_PROGRESS_S)
                progress.nbytes = pool.capacity * frame_bytes
                progress.evicted_blocks = counters.evicted - evicted
                progress.demoted_blocks = counters.demoted - demoted
                if change.task.done():
                    change.task.result()
                    progress.done, progress.unfinished = True, change.unfinished
                yield progress
        finally:
            change.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether a change is under way."""
        return self._begun

    @property
    def loading(self) -> bool:
        """Whether a worker is being started, or loads its model."""
        return any(worker.loads for worker in self._workers)

    @property
    def coming_bytes(self) -> int:
        """Bytes of the device that workers which load are about to take (`WorkerProcess.coming_bytes`)."""
        return sum(worker.coming_bytes for worker in self._workers)

    def can_shrink(self) -> bool:
        """Whether all workers can let go of frames (`WorkerProcess.may_shrink`)."""
        return all(worker.may_shrink for worker in self._workers)

    @property
    def owes_memory(self) -> bool:
        """Whether giving back the memory of frames that have left the tier has failed."""
        return bool(self._withdrawn)

    def begin(
        self,
        frames: int,
        wait_s: float,
        retry_s: float,
        on_slice: Callable[[], None] = lambda: None,
        may_add: Callable[[int], Awaitable[bool]] | None = None,
    ) -> Change | None:
        """Begins to change the tier to `frames` frames; None if a change is under way, or the daemon ends."""
        compute = self._cache.tiers.compute
        if self._begun or self._stopping or not isinstance(compute, GpuTier):
            return None
        self._begun = True
        change = self._start(compute, frames, wait_s, retry_s, on_slice, may_add)
        change.by_itself = True
        return change

    @property
    def begun_frames(self) -> int:
        """The most frames that a request which runs, or has run, may come to need."""
        return max(dispatcher.requests.begun_frames() for dispatcher in self._dispatchers)

    async def stop(self) -> None:
        """Ends a resize under way. The workers have ended; the tier's memory is given back next."""
        self._stopping = True
        if self._change is not None:
            await self._change.wait()

    def interrupt(self) -> None:
        """The daemon ends: no further slice begins."""
        self._stopping = True

    # -- inside -------------------------------------------------------------------------------------------------

    def _refuse_second(self, frame_bytes: int) -> NoReturn:
        going = "" if self._change is None else f" to {self._change.frames * frame_bytes} bytes"
        raise PreconditionError(f"the gpu tier is being resized{going} now; wait for its end, or end it")

    def _tier(self) -> GpuTier:
        if self._stopping:
            raise UnavailableError("the daemon is ending; resize the gpu tier when it is back")
        compute = self._cache.tiers.compute
        if not isinstance(compute, GpuTier):
            if all(worker.failure for worker in self._workers):
                raise PreconditionError(
                    f"there is no gpu tier: the worker was given up: {self._workers[0].failure}; "
                    "start the daemon again when that is mended"
                )
            raise PreconditionError("the gpu tier is not there yet: the model is being loaded; try again soon")
        return compute

    def _start(
        self,
        tier: GpuTier,
        frames: int,
        wait_s: float,
        retry_s: float,
        on_slice: Callable[[], None] = lambda: None,
        may_add: Callable[[int], Awaitable[bool]] | None = None,
    ) -> Change:
        deadline_s = self._clock() + wait_s
        change = self._change = Change(frames, wait_s, retry_s, on_slice, may_add or _always, deadline_s)
        change.task = asyncio.create_task(self._run(tier, change), name="tier-resize")
        return change

    async def _run(self, tier: GpuTier, change: Change) -> None:
        pool = tier.pool
        before = pool.capacity
        try:
            await (self._grow(tier, change) if change.frames > before else self._shrink(tier, change))
        except (PrefixdError, SwapError) as error:
            change.unfinished = str(error)
        finally:
            pool.plan(None)
            self._frames_changed()
            self._begun = False
        if pool.capacity != change.frames and not change.unfinished:
            change.unfinished = "it was ended"
        log.log(
            logging.DEBUG if change.by_itself else logging.INFO,
            "the gpu tier has %d frames, before %d%s",
            *(pool.capacity, before, f"; not all was done: {change.unfinished}" if change.unfinished else ""),
        )

    def _may_continue(self, change: Change) -> bool:
        return not (change.cancelled or self._stopping)

    async def _grow(self, tier: GpuTier, change: Change) -> None:
        pool = tier.pool
        if self._withdrawn:
            await self._shrink_slice(tier, change)
        while pool.capacity < change.frames and self._may_continue(change):
            count = min(change.frames - pool.capacity, _slice_frames(pool))
            if not await change.may_add(count):
                change.unfinished = f"others took memory of {pool.memory.device} meanwhile"
                return
            async with self._changing_frames():
                new = await in_thread(lambda count=count: pool.create(count))  # type: ignore[misc]
                for worker in self._workers:
                    await worker.grow(pool, new)
                tier.admit(new)
            self._frames_changed()
            change.on_slice()

    async def _shrink(self, tier: GpuTier, change: Change) -> None:
        while (self._withdrawn or tier.pool.capacity > change.frames) and self._may_continue(change):
            if await self._shrink_slice(tier, change):
                change.deadline_s = self._clock() + change.wait_s
            elif self._clock() >= change.deadline_s:
                change.unfinished = self._describe_loading() or self._describe_holders()
                return
            else:
                await asyncio.sleep(change.retry_s)

    async def _shrink_slice(self, tier: GpuTier, change: Change) -> bool:
        """Gives memory back to the device: of frames that have left the tier, or of some that leave it now.

        Returns whether it did. If a worker cannot let go of frames now, none leaves the tier.
        """
        pool = tier.pool
        if not self.can_shrink():
            self._keep_all(pool)
            return False
        if not self._withdrawn:
            keep = max(change.frames, self.begun_frames)
            pool.plan(keep)
            self._frames_changed()
            with self._cache.mover.working():  # no other structure has the frames until they are withdrawn
                frames = await self._take(tier, min(pool.capacity - keep, _slice_frames(pool)), change)
                if not self.can_shrink():  # a worker has died, and the next one was handed the frames and loads
                    tier.free(frames)
                elif frames:
                    tier.withdraw(frames)
                    self._withdrawn += frames
        if not self._withdrawn:
            return False
        async with self._changing_frames():
            if not self.can_shrink():
                return False
            await self._give_back(pool)
        return True

    def _keep_all(self, pool: FramePool) -> None:
        """Requests may have all frames until the tier can shrink."""
        if pool.lasting < pool.capacity:
            pool.plan(None)
            self._frames_changed()

    async def _take(self, tier: GpuTier, count: int, change: Change) -> list[FrameId]:
        """Takes up to `count` frames, which no request has any more.

        Takes none if making room lasts until the deadline, or if the resize is ended; copies under way then go on.
        """
        room = Movement(Urgency.PREFETCH)
        room.join(Urgency.PREFETCH)

        async def take() -> list[FrameId]:
            try:
                slots = await self._cache.mover.slots.allocate(tier, (tier.frame_bytes,), count, Claim(room))
            except SwapError as error:
                if not room.dropped:
                    raise
                log.error("blocks that were to leave the gpu tier could not be copied down: %s", error)
                return []
            if room.dropped:
                tier.free(slots)
                return []
            return [FrameId(frame) for frame in slots.ravel().tolist()]

        task = DaemonTask.ELASTIC_TIER if change.by_itself else DaemonTask.TIER_RESIZE
        with acting(task), because(Reason.RESIZE):
            taking = self._cache.mover.spawn(take())
        while not taking.done():
            await asyncio.wait({taking}, timeout=_RETRY_S)
            if not taking.done() and (self._clock() > change.deadline_s or not self._may_continue(change)):
                room.leave()
                return []
        return taking.result()

    async def _give_back(self, pool: FramePool) -> None:
        """Gives the memory of withdrawn frames back to the device."""
        frames = list(self._withdrawn)
        for worker in self._workers:
            await worker.shrink(frames)
        await in_thread(lambda: pool.destroy(frames))
        pool.forget(frames)
        self._withdrawn.clear()

    @asynccontextmanager
    async def _changing_frames(self) -> AsyncGenerator[None]:
        """Held during a change of the tier's frames: no worker is handed the frames meanwhile."""
        async with AsyncExitStack() as stack:
            for worker in self._workers:
                await stack.enter_async_context(worker.changing_frames())
            yield

    def _frames_changed(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.wake()

    def _describe_loading(self) -> str:
        loading = ", ".join(worker.part for worker in self._workers if not worker.may_shrink)
        return (
            f"the {loading} loads its model, and lets go of no frame until then; resize again later" if loading else ""
        )

    def _describe_holders(self) -> str:
        text = f"{name_holders(self._cache)}; resize again when they have ended, or cancel them"
        if running := sum(len(each.running) for each in self._dispatchers):
            needed = self.begun_frames
            text = f"{running} requests run, of which the largest may come to need {needed} frames; {text}"
        return text


def _slice_frames(pool: FramePool) -> int:
    return max(1, min(_SLICE_FRAMES, _SLICE_BYTES // pool.frame_bytes))


async def _always(_: int) -> bool:
    return True


async def _check_fits(pool: FramePool, frames: int, coming_bytes: int) -> None:
    """Raises ExhaustedError if the device does not have the memory that `frames` frames take, beside `coming_bytes`."""
    frame_bytes, memory = pool.frame_bytes, pool.memory
    lacking = (frames - pool.capacity) * frame_bytes
    if lacking <= 0:
        return
    available = max(0, await in_thread(memory.available_bytes) - coming_bytes)
    most = min(pool.most, pool.capacity + available // frame_bytes) * frame_bytes
    if frames * frame_bytes > most:
        beside = f" beside {coming_bytes} for models that are being loaded" if coming_bytes else ""
        raise ExhaustedError(
            f"{frames * frame_bytes} bytes are {lacking} more than the gpu tier has, and {memory.device} has "
            f"{available} bytes free{beside}; give at most {most}"
        )
