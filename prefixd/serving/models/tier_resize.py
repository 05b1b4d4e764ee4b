"""Growing and shrinking the GPU tier while requests run, in slices: the memory itself goes back to the device.

```
grow    create (thread)   tell the worker    admit                        a slice: its frames can be allocated
shrink  make room, allocate   withdraw   the worker lets go   destroy (thread)   forget
```

A slice is done as a whole or not at all, even if the caller is cancelled or the worker dies meanwhile: a dead worker
maps nothing, and its successor is handed the frames that exist then. Between two slices other tasks run, and the resize
can be ended; the tier keeps the size that it has reached.

**Which frames are freed.** Room is made as for a prefetch: cached blocks go down the tiers, or are evicted; requests
that wait for blocks have precedence. Running requests keep their frames, and get more while there are any, by
preemption if need be (`preemption.py`). From the beginning on, the dispatcher counts on the smaller tier, so no new
request takes frames that became free. If a request that runs, or has run, may need more frames than the smaller tier
has, the tier stays that large until the request has ended. If no slice is done for `wait_s` seconds (because of such a
request, of others that hold frames, or of a slow tier below), the resize ends, and names the holders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

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
class _Job:
    """A resize under way: to `frames` frames, with `wait_s` for each slice."""

    frames: int
    wait_s: float
    deadline_s: float
    unfinished: str = ""
    cancelled: bool = False


class TierResize:
    """Resizes the compute tier; one resize at a time.

    Args:
        cache: the cache.
        workers: of all models; they map the tier's memory.
        dispatchers: of all models; they give the tier's frames to requests.
        clock: seconds.
    """

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
        self._job: _Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._withdrawn: list[FrameId] = []  # withdrawn frames whose memory is not given back yet

    async def resize(self, nbytes: int, wait_s: float) -> AsyncGenerator[ResizeProgress, None]:
        """Resizes the tier to at most `nbytes`; yields the progress, for the last time when the resize is done.

        Closing the generator ends the resize after the slice under way.

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
        if self._begun:
            going = "" if self._job is None else f" to {self._job.frames * frame_bytes} bytes"
            raise PreconditionError(f"the gpu tier is being resized{going} now; wait for its end, or end it")
        self._begun = True
        try:
            await _check_fits(pool, frames)
            job = self._job = _Job(frames, wait_s, self._clock() + wait_s)
            self._task = asyncio.create_task(self._run(tier, job), name="tier-resize")
        except BaseException:
            self._begun = False
            raise
        counters = self._cache.tiers.counters[tier.level]
        evicted, demoted = counters.evicted, counters.demoted
        progress = ResizeProgress(pool.capacity * frame_bytes, frames * frame_bytes, pool.capacity * frame_bytes)
        try:
            while not progress.done:
                await asyncio.wait({self._task}, timeout=_PROGRESS_S)
                progress.nbytes = pool.capacity * frame_bytes
                progress.evicted_blocks = counters.evicted - evicted
                progress.demoted_blocks = counters.demoted - demoted
                if self._task.done():
                    self._task.result()
                    progress.done, progress.unfinished = True, job.unfinished
                yield progress
        finally:
            job.cancelled = True

    async def stop(self) -> None:
        """Ends a resize under way. The workers have ended; the tier's memory is given back next."""
        self._stopping = True
        if self._task is not None:
            await asyncio.wait({self._task})

    def interrupt(self) -> None:
        """The daemon ends: no further slice begins."""
        self._stopping = True

    # -- inside -------------------------------------------------------------------------------------------------

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

    async def _run(self, tier: GpuTier, job: _Job) -> None:
        pool = tier.pool
        before = pool.capacity
        log.info("resizing the gpu tier from %d to %d frames", before, job.frames)
        try:
            if self._withdrawn:
                async with self._changing_frames():
                    await self._give_back(pool)
            await (self._grow(tier, job) if job.frames > before else self._shrink(tier, job))
        except (PrefixdError, SwapError) as error:
            job.unfinished = str(error)
        finally:
            pool.plan(None)
            self._frames_changed()
            self._begun = False
        if pool.capacity != job.frames and not job.unfinished:
            job.unfinished = "it was ended"
        log.info(
            "the gpu tier has %d frames, before %d%s",
            *(pool.capacity, before, f"; not all was done: {job.unfinished}" if job.unfinished else ""),
        )

    def _may_continue(self, job: _Job) -> bool:
        return not (job.cancelled or self._stopping)

    async def _grow(self, tier: GpuTier, job: _Job) -> None:
        pool = tier.pool
        while pool.capacity < job.frames:
            await self._wait_for_workers()
            if not self._may_continue(job):
                return
            async with self._changing_frames():
                count = min(job.frames - pool.capacity, _slice_frames(pool))
                new = await in_thread(lambda count=count: pool.create(count))  # type: ignore[misc]
                for worker in self._workers:
                    await worker.grow(pool, new)
                tier.admit(new)
            self._frames_changed()

    async def _shrink(self, tier: GpuTier, job: _Job) -> None:
        pool = tier.pool
        while pool.capacity > job.frames:
            await self._wait_for_workers()
            if not self._may_continue(job):
                return
            keep = max(job.frames, self._begun_frames())
            pool.plan(keep)
            self._frames_changed()
            frames = await self._take(tier, min(pool.capacity - keep, _slice_frames(pool)), job)
            if frames:
                tier.withdraw(frames)
                self._withdrawn += frames
                async with self._changing_frames():
                    await self._give_back(pool)
                job.deadline_s = self._clock() + job.wait_s
            elif self._clock() >= job.deadline_s:
                job.unfinished = self._describe_holders()
                return
            else:
                await asyncio.sleep(_RETRY_S)

    async def _take(self, tier: GpuTier, count: int, job: _Job) -> list[FrameId]:
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

        taking = self._cache.mover.spawn(take())
        while not taking.done():
            await asyncio.wait({taking}, timeout=_RETRY_S)
            if not taking.done() and (self._clock() > job.deadline_s or not self._may_continue(job)):
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

    async def _wait_for_workers(self) -> None:
        """Waits until each worker is ready, or given up."""
        for worker in self._workers:
            await worker.settled()

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

    def _begun_frames(self) -> int:
        return max(dispatcher.requests.begun_frames() for dispatcher in self._dispatchers)

    def _describe_holders(self) -> str:
        text = f"{name_holders(self._cache)}; resize again when they have ended, or cancel them"
        if running := sum(len(each.running) for each in self._dispatchers):
            needed = self._begun_frames()
            text = f"{running} requests run, of which the largest may come to need {needed} frames; {text}"
        return text


def _slice_frames(pool: FramePool) -> int:
    return max(1, min(_SLICE_FRAMES, _SLICE_BYTES // pool.frame_bytes))


async def _check_fits(pool: FramePool, frames: int) -> None:
    """Raises ExhaustedError if the device does not have the memory that `frames` frames take."""
    frame_bytes, memory = pool.frame_bytes, pool.memory
    lacking = (frames - pool.capacity) * frame_bytes
    if lacking <= 0:
        return
    available = await in_thread(memory.available_bytes)
    most = min(pool.most, pool.capacity + available // frame_bytes) * frame_bytes
    if frames * frame_bytes > most:
        raise ExhaustedError(
            f"{frames * frame_bytes} bytes are {lacking} more than the gpu tier has, and {memory.device} has "
            f"{available} bytes free; give at most {most}"
        )
