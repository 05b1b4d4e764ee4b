"""Which running request gives its frames to others, where its KV goes, and when it runs again.

vTensor (Algorithm 1, section 6): when a decoding request needs a chunk and there is none, the request of the lowest
priority is preempted and released.

**Who.** Running requests, of all models, have a rank. Within a tenant: a lower priority number before a higher one, and
among equals the one handed over earlier first. Between tenants: the first request of each tenant before all others, by
the time of hand-over; then the others, by the sum of their own frames and of those before them in their tenant's rank.
So a priority takes nothing from another tenant, and the tenant whose requests have most frames gives way. The request
that is last in rank gives way, even if it is the one that lacks the frame.

**Where its KV goes.** Down the tiers ("swap"), or nowhere ("recompute"). Only blocks count that the request computed
and no other holds; a prefix that it found, or shares with another request, stays. A swap works like every eviction
(`Room.send_down`). Recompute drops copies, leaves first; a block that has a copy further down is still loaded later.
The last block, which is not full, is computed again in either case: a tier takes full blocks only.

**When it runs again.** When a run has ended since, or no request runs, or there are frames for all tokens that it and
the running requests may still generate. Until then it waits, and so do all requests behind it in the queue.

**Why all requests end.** The first in rank never gives way while others run. A resumed request is handed over anew, so
it is behind all others of its priority; only a request of a higher priority goes in front of the running ones. So a
request gives way again only after a run has ended or a request of a higher priority was handed over: the requests that
ran when it was resumed have frames enough. Therefore two requests cannot preempt each other in turn, and the requests
of the highest priority end, then those of the next: with n others of its priority and none above, a request gives way
n + 1 times at most. (A request that runs alone starts over when it has blocks twice; then it has them once.) With
several tenants this holds for the first request of each: a request that is handed over later goes before it only if it
has the same tenant and a higher priority. When it has ended, the next request of its tenant is the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.cache import Trie
from prefixd.cache.index.trie import NO_SLOT, Rows
from prefixd.observability.eviction_journal import Reason, because
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.loading.load_choice import LoadMeter
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd_scheduler import Distance
from prefixd_swap import SwapError

log = logging.getLogger(__name__)

_MOVED_AT_ONCE = 256  # blocks; a few milliseconds on the event loop. Their frames are free before the next ones move.
_LEAVING = (RequestState.PREEMPTING, RequestState.CANCELLING)


@dataclass(slots=True)
class PreemptionCounters:
    """Counters since the start; documented at `SchedulerStats` in `admin.proto`."""

    preempted: int = 0
    swapped: int = 0
    recomputed: int = 0
    swapped_blocks: int = 0
    recomputed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of a trie, children before parents. The rows' generations show which blocks have gone meanwhile."""

    request: str
    trie: Trie
    rows: Rows
    generations: npt.NDArray[np.int32]

    def next(self, start: int) -> Rows:
        """The rows of the next 256 blocks from `start` on that are still there."""
        part = slice(start, start + _MOVED_AT_ONCE)
        rows = self.rows[part]
        same: Rows = rows[self.trie.generation[rows] == self.generations[part]]
        return same


class Preemption:
    """Takes the frames of running requests, by rank; see the top of this file.

    Args:
        context: the dispatcher's.
    """

    def __init__(self, context: DispatchContext) -> None:
        self.counters = PreemptionCounters()
        self._cache = context.cache
        self._share = context.share
        self._cost = context.cost
        self._meter = LoadMeter(context.clock)
        self._wake = context.wake
        self._mode = context.options.preemption
        self._tasks: set[asyncio.Task[None]] = set()
        self._parked: set[int] = set()  # ids of the requests that were preempted since the last end of a run

    @property
    def moving(self) -> bool:
        """Whether blocks of preempted requests are on their way out of the tier."""
        return bool(self._tasks)

    async def stop(self) -> None:
        """Waits for the copies under way."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- who --------------------------------------------------------------------------------------------------------

    @staticmethod
    def in_rank(running: Iterable[Request]) -> list[Request]:
        """Running requests by rank, the first to get frames first. They are given in the order of hand-over."""
        of_tenant: dict[Hashable, list[Request]] = {}
        for request in sorted(running, key=lambda request: request.queued.priority):
            of_tenant.setdefault(request.queued.tenant, []).append(request)
        others: list[tuple[int, int, Request]] = []
        for own in of_tenant.values():
            frames = list(accumulate(request.run.block_frames_taken for request in own))
            others += list(zip(frames, range(len(own)), own, strict=True))[1:]
        firsts = sorted((own[0] for own in of_tenant.values()), key=lambda request: request.turn)
        return [*firsts, *(request for _, _, request in sorted(others, key=lambda other: other[:2]))]

    def choose(self, running: Iterable[Request]) -> Request | None:
        """The request that gives way now. None if frames are about to be free, or if preempting would free none."""
        ranked = self.in_rank(running)
        if not ranked or self._share.moving or any(request.state in _LEAVING for request in ranked):
            return None
        last = ranked[-1]
        # A request that runs alone fits, unless it filled blocks that another had recorded: it has these twice then.
        twice = not last.footprint.own.isdisjoint(last.run.frame_ids(0, len(last.rows)))
        return last if len(ranked) > 1 or twice else None

    # -- where its KV goes ------------------------------------------------------------------------------------------

    def release(self, request: Request) -> Rows:
        """Called when the worker has let go of a PREEMPTING request, before it is put back.

        Returns the blocks in its frames that it has computed, in this run or an earlier one.
        """
        self.counters.preempted += 1
        request.lost_tokens = request.run.computed_tokens
        first, rows = request.others_blocks or 0, request.rows
        frame_ids, width = request.run.frame_ids(first, len(rows)), request.run.slots
        rows = rows[first:]
        frames = np.array(frame_ids, np.int64).reshape(len(rows), width)
        # If another request recorded a block first, the block is in the frame of that request.
        slots = request.trie.slots[rows, self._cache.tiers.compute.level, :width]
        computed: Rows = rows[((slots == frames) & (frames != NO_SLOT)).any(axis=1)]
        return computed

    def make_way(self, request: Request, computed: Rows) -> None:
        """Frees the frames of a request that was put back, so that other running requests get them.

        computed: the blocks that `release` returned.
        """
        self._parked.add(request.id)
        trie, level = request.trie, self._cache.tiers.compute.level
        rows = computed[~trie.held(computed, level)][::-1]
        blocks = _Blocks(request.name, trie, rows, trie.generation[rows])
        alone = rows[trie.last_copies(rows, level)]
        only_here = len(alone)
        below = self._cache.tiers.below(self._cache.tiers.compute)
        distance = Distance.NONE if below is None else Distance(below.level)
        swaps = len(rows) > 0 and self._swaps(trie, alone, distance)
        log.info(
            "request %s gave way to others: %d blocks of its own, %d without another copy, are %s",
            *(request.name, len(rows), only_here, "swapped" if swaps else "dropped"),
            extra={"request_id": request.name},
        )
        if swaps:
            self.counters.swapped += 1
            self._spawn(request.name, self._swap(blocks, distance))
        else:
            self.counters.recomputed += 1
            self._spawn(request.name, self._drop(blocks))

    def _swaps(self, trie: Trie, only_here: Rows, distance: Distance) -> bool:
        """Whether to swap. Blocks that have a copy below are loaded again either way, so they do not count."""
        if self._mode == "auto":
            nbytes = int(trie.group_bytes[trie.wanted(only_here, self._cache.tiers.compute.level)].sum())
            return self._cost.swap_pays(len(only_here) * trie.block_tokens, nbytes, distance)
        return self._mode == "swap" and distance is not Distance.NONE

    def _spawn(self, request: str, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._end_move, request))

    def _end_move(self, request: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake()
        if not task.cancelled() and (error := task.exception()) is not None:
            what = "the blocks of the preempted request %s were not all moved"
            log.error(what, request, exc_info=error, extra={"request_id": request})

    async def _swap(self, blocks: _Blocks, distance: Distance) -> None:
        trie = blocks.trie
        for start in range(0, len(blocks.rows), _MOVED_AT_ONCE):
            mark = self._meter.begin()
            copied = nbytes = 0
            rows = blocks.rows[:0]
            try:
                rows = blocks.next(start)
                nbytes = int(trie.group_bytes[trie.wanted(rows, self._cache.tiers.compute.level)].sum())
                copied = await self._cache.mover.send_down("preemption", trie, rows, self._cache.tiers.compute)
            except SwapError as error:  # the blocks that are left are evicted like any others
                log.error(
                    "blocks of the preempted request %s could not be copied down: %s",
                    *(blocks.request, error),
                    extra={"request_id": blocks.request},
                )
                return
            finally:
                elapsed_s = self._meter.end(mark)
                if copied:
                    self._cost.observe_store(distance, nbytes * copied // len(rows), elapsed_s)
            self.counters.swapped_blocks += copied
            self._wake()

    async def _drop(self, blocks: _Blocks) -> None:
        placement, compute = self._cache.placement, self._cache.tiers.compute
        for start in range(0, len(blocks.rows), _MOVED_AT_ONCE):
            with because(Reason.PREEMPTION):
                placement.drop(blocks.trie, blocks.next(start), compute, expendable=True)
            self._wake()
            await give_way()

    # -- when it runs again -----------------------------------------------------------------------------------------

    def run_ended(self) -> None:
        """A run has ended for good, or all runs with their worker: preempted requests may run again."""
        self._parked.clear()

    def must_wait(self, request: Request) -> bool:
        """True if a request that is next may not run yet, because it was preempted."""
        if request.id not in self._parked or not (running := self._share.running()):
            return False
        growth = sum(other.growth_frames for other in running)
        return self._share.taken_frames + growth + request.most_frames > self._cache.tiers.frames.lasting

    def resumed(self, request: Request, cached_blocks: int) -> None:
        """Counts the tokens that a preempted request computes again. It is handed over with `cached_blocks` blocks."""
        if request.others_blocks is None or cached_blocks < request.others_blocks:
            request.others_blocks = cached_blocks
        self.counters.recomputed_tokens += max(0, request.lost_tokens - cached_blocks * request.trie.block_tokens)
        request.lost_tokens = 0
