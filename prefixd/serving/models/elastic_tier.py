"""Lets the GPU tier grow and shrink with the load: `ElasticSize` decides, `TierResize` acts.

```
requests lack frames (TierShare.need) --+
an allocation would evict (grow) -------+--> look: the device's free memory, the load --> decide --> change, in slices
every quarter of a second --------------+                                                 |
   while there is more than the least                                                     +--> size, target, reason
```

Growing comes before evicting, and only for requests whose turn has come: a prefetch never makes the tier grow. Whoever
waits for frames goes on after the first slice that helps, or after a second at most; blocks are evicted then. Before
each slice the device's free memory is read again: another daemon may be growing, too.

If requests need more than the tier can have now, the dispatchers are told (`TierShare.short`), and whether it is the
device that gives no more (`refused_s`): not while a worker of this daemon loads its model, or an operator resizes the
tier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PrefixdError
from prefixd.base.long_work.steps import in_thread
from prefixd.base.sizes import as_size
from prefixd.cache import TieredCache
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.dispatch.dispatcher import Dispatcher
from prefixd.serving.models.elastic_size import Bounds, Decision, ElasticSize, Load, Why
from prefixd.serving.models.tier_resize import Change, TierResize
from prefixd_swap import FramePool, SwapError

log = logging.getLogger(__name__)

LOOK_S = 0.25
_WAIT_S = 1.0
_RETRY_S = 0.1
_PATIENCE_S = 5.0
"""How long a change waits for frames that it could take; then it looks at the load anew."""


@dataclass(eq=False, slots=True)
class _Ask:
    """A call that waits for the tier to have `frames` frames; `needed`: nothing can be evicted instead."""

    frames: int
    needed: bool
    done: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(frozen=True, slots=True)
class SizeFigures:
    """The tier's bounds and target in bytes, and why its size changed last."""

    least_bytes: int
    most_bytes: int
    target_bytes: int
    reason: str


class ElasticTier:
    """Changes the size of the GPU tier by itself.

    Args:
        cache: has the tier.
        resize: changes its size.
        share: knows the frames that requests have and need.
        dispatchers: of all models.
        clock: seconds.
        device_bytes: returns the free and all bytes of a pool's device; called in a thread.
    """

    def __init__(
        self,
        cache: TieredCache,
        resize: TierResize,
        share: TierShare,
        dispatchers: Sequence[Dispatcher],
        clock: Callable[[], float],
        device_bytes: Callable[[FramePool], tuple[int, int]],
    ) -> None:
        self._cache = cache
        self._resize = resize
        self._share = share
        self._dispatchers = tuple(dispatchers)
        self._clock = clock
        self._device_bytes = device_bytes
        self._size: ElasticSize | None = None
        self._target = 0
        self._why = Why.START
        self._asks: list[_Ask] = []
        self._changed = asyncio.Event()
        self._change: Change | None = None
        self._stuck_until_s = 0.0  # until then frames that an idle tier cannot give back are not looked for again,
        self._stuck_bytes = 0  # unless other bytes than these are held
        self._refused_at = 0  # the most frames that the tier has had since the device refuses more
        self._full_until_s = 0.0  # the device gave too little: until then only the next regular look asks it again
        self._turns = 0
        self._ended = False
        self._task: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self, made: Coroutine[Any, Any, tuple[FramePool, Bounds]]) -> asyncio.Task[None]:
        """Begins when the tier is `made`, with its least frames; the task ends with `stop`, or by a defect."""
        self._task = asyncio.create_task(self._run(made), name="elastic-tier")
        return self._task

    def interrupt(self) -> None:
        """The daemon ends: the tier keeps the size that it has."""
        self._ended = True
        self._changed.set()
        self._answer(False)
        if self._change is not None:
            self._change.cancelled = True

    async def stop(self) -> None:
        """Returns when nothing changes the size any more. The workers have ended."""
        self.interrupt()
        if self._task is not None:
            await asyncio.wait({self._task})

    @property
    def figures(self) -> SizeFigures | None:
        """What `Admin.Stats` shows; None while the tier has a fixed size, or is not there."""
        if self._size is None:
            return None
        frame_bytes, bounds = self._cache.tiers.frames.frame_bytes, self._size.bounds
        sizes = (bounds.least * frame_bytes, bounds.most * frame_bytes, self._target * frame_bytes)
        return SizeFigures(*sizes, self._why.value)

    # -- what is called -----------------------------------------------------------------------------------------

    async def _grow(self, frames: int, *, needed: bool) -> bool:
        """As `prefixd.cache.moving.allocation.Grow`."""
        pool, size = self._cache.tiers.frames, self._size
        if size is None or self._ended or pool.capacity >= size.bounds.most:
            return False
        if not needed and self._clock() < self._full_until_s:
            return False
        ask = _Ask(pool.capacity + frames, needed)
        self._asks.append(ask)
        self._changed.set()
        await asyncio.wait({ask.done}, timeout=_WAIT_S)
        if ask in self._asks:
            self._asks.remove(ask)
        return ask.done.done() and ask.done.result()

    def _note_need(self) -> None:
        if self._clock() >= self._full_until_s:
            self._changed.set()

    async def _limit(self, frames: int) -> int:
        """As `TierResize.limit`."""
        pool, size = self._cache.tiers.frames, self._size
        assert size is not None
        if frames < size.bounds.least:
            least = size.bounds.least * pool.frame_bytes
            raise InvalidArgumentError(
                f"{frames * pool.frame_bytes} bytes are below the tier's least, {least} (gpu.least_bytes); give "
                f"{least} or more, or lower gpu.least_bytes and start the daemon again"
            )
        while self._change is not None and self._change.running:
            self._change.cancelled = True
            await self._change.wait()
        size.set_most(frames)
        pool.let_grow(frames)
        log.info("the gpu tier has at most %s from now on", as_size(frames * pool.frame_bytes))
        return min(frames, pool.capacity)

    # -- looking ------------------------------------------------------------------------------------------------

    async def _run(self, made: Coroutine[Any, Any, tuple[FramePool, Bounds]]) -> None:
        try:
            pool, bounds = await made
        except PrefixdError:
            return  # the workers, which wait for the tier too, report it
        size = self._size = ElasticSize(bounds, self._clock())
        self._target = pool.capacity
        self._share.on_need = self._note_need
        self._resize.limit = self._limit
        self._cache.mover.slots.grow = self._grow
        while not self._ended:
            self._changed.clear()
            self._note_lack(pool, size, refused=await self._look(pool, size))
            try:
                async with asyncio.timeout(None if self._at_rest(pool, size) else LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                if self._share.needed_frames:
                    self._wake()  # a dispatcher whose request lacks frames notes for how long
        self._answer(False)

    def _at_rest(self, pool: FramePool, size: ElasticSize) -> bool:
        """Whether the size is not to change before something happens here."""
        wanted = self._asks or self._share.needed_frames or self._share.short
        return pool.capacity <= size.bounds.least and not wanted and not self._resize.owes_memory

    def _note_lack(self, pool: FramePool, size: ElasticSize, *, refused: bool) -> None:
        """Tells the dispatchers whether requests need more than the tier has. `refused`: the device gives no more."""
        share = self._share
        short = min(share.needed_frames, size.bounds.most) > pool.capacity
        if not (short and refused):
            share.refused_s = None
        elif share.refused_s is None or pool.capacity > self._refused_at:  # what it gives little by little adds up
            share.refused_s, self._refused_at = self._clock(), pool.capacity
        if short != share.short:
            share.short = short
            self._wake()

    def _wake(self) -> None:
        for dispatcher in self._dispatchers:
            dispatcher.wake()

    async def _look(self, pool: FramePool, size: ElasticSize) -> bool:
        """Looks once, decides and acts: returns when the tier has grown, or when it begins to shrink.

        Returns whether the device is the reason if requests still lack frames.
        """
        if self._change is not None and self._change.task is not None and self._change.task.done():
            self._change.task.result()  # raises what no change should
        if self._resize.busy and not (self._change is not None and self._change.running):
            self._answer(False)  # an operator resizes it
            return False
        try:
            load = await self._measure(pool)
        except (ExhaustedError, SwapError, OSError) as error:
            log.warning(
                "the free memory of %s is not known, so the gpu tier keeps its size: %s", pool.memory.device, error
            )
            self._answer(False)
            return not self._resize.loading
        now_s = self._clock()
        decision = size.decide(now_s, load)
        if decision.frames > load.size:
            await self._end_change()
            await self._add(pool, size, decision)
        elif decision.frames < load.size or self._resize.owes_memory:
            self._give_back(decision, now_s)
        else:
            await self._end_change()
            # More than the size where the device lacks memory for requests.
            self._target = max(decision.frames, min(load.required, size.bounds.most))
        if self._asks or max(load.required, load.useful) > pool.capacity:
            self._full_until_s = self._clock() + LOOK_S
            self._answer(False)
        return not self._resize.loading

    async def _measure(self, pool: FramePool) -> Load:
        free_bytes, total_bytes = await in_thread(lambda: self._device_bytes(pool))
        waiting = list(self._asks)
        turns, self._turns = self._turns, self._share.turns
        begins = self._share.begins_frames
        return Load(
            size=pool.capacity,
            held=max(self._share.taken_frames, self._resize.begun_frames, begins),
            required=max([self._share.needed_frames, *(ask.frames for ask in waiting if ask.needed)]),
            useful=max((ask.frames for ask in waiting), default=0),
            free=max(0, free_bytes) // pool.frame_bytes,
            taken=(total_bytes - max(0, free_bytes)) // pool.frame_bytes,
            busy=turns != self._turns or any(each.requests.busy for each in self._dispatchers),
            coming=-(-self._resize.coming_bytes // pool.frame_bytes),
            begins=begins,
        )

    async def _may_add(self, pool: FramePool, frames: int, least_free: int) -> bool:
        """Whether the device keeps `least_free` free frames after so many are created."""
        coming_bytes = self._resize.coming_bytes
        try:
            free_bytes, _ = await in_thread(lambda: self._device_bytes(pool))
        except OSError as error:
            raise ExhaustedError(f"the free memory of {pool.memory.device} is not known: {error}") from error
        return (free_bytes - coming_bytes) // pool.frame_bytes - frames >= least_free

    # -- acting -------------------------------------------------------------------------------------------------

    async def _add(self, pool: FramePool, size: ElasticSize, decision: Decision) -> None:
        before = pool.capacity
        self._target = decision.frames
        bounds = size.bounds
        least_free = bounds.least_free if decision.why is Why.REQUESTS else bounds.reserve

        async def may_add(frames: int) -> bool:
            return await self._may_add(pool, frames, least_free)

        change = self._change = self._resize.begin(
            *(decision.frames, _PATIENCE_S, _RETRY_S, lambda: self._answer(True), may_add)
        )
        if change is None:
            return
        await change.wait()
        if pool.capacity > before:
            self._note(decision, before, pool)
            self._answer(True)
        if change.unfinished:
            log.info("the gpu tier did not get all of %d frames: %s", decision.frames - before, change.unfinished)
            size.refused(self._clock())

    def _give_back(self, decision: Decision, now_s: float) -> None:
        """Begins to shrink, or gives a shrink that is under way another target."""
        self._target = decision.frames
        if self._change is not None and self._change.running:
            self._change.frames = decision.frames
            return
        if not self._resize.can_shrink():
            return  # a worker loads its model
        if decision.why is Why.IDLE and now_s < self._stuck_until_s and self._held_bytes() == self._stuck_bytes:
            return
        self._change = self._resize.begin(decision.frames, _PATIENCE_S, _RETRY_S)
        if (change := self._change) is not None and change.task is not None:
            before, pool = self._cache.tiers.frames.capacity, self._cache.tiers.frames
            change.task.add_done_callback(lambda _: self._shrunk(change, decision, before, pool))

    def _shrunk(self, change: Change, decision: Decision, before: int, pool: FramePool) -> None:
        if pool.capacity < before:
            self._note(decision, before, pool)
        elif decision.why is Why.IDLE and not change.cancelled and self._resize.can_shrink():
            self._stuck_until_s = self._clock() + 10 * _PATIENCE_S
            self._stuck_bytes = self._held_bytes()

    def _held_bytes(self) -> int:
        """Bytes of the tier that tenants hold for as long as they like."""
        use, tier = self._cache.mover.use, self._cache.tiers.compute
        return sum(use.held_bytes(tenant, tier) for tenant in use.tenants)

    async def _end_change(self) -> None:
        if self._change is not None and self._change.running:
            self._change.cancelled = True
            await self._change.wait()

    def _note(self, decision: Decision, before: int, pool: FramePool) -> None:
        assert decision.why is not None
        self._why = decision.why
        sizes = (as_size(before * pool.frame_bytes), as_size(pool.capacity * pool.frame_bytes))
        log.info("the gpu tier has %s instead of %s: %s", sizes[1], sizes[0], decision.why.value)

    def _answer(self, grown: bool) -> None:
        asks, self._asks = self._asks, []
        for ask in asks:
            if not ask.done.done():
                ask.done.set_result(grown)
