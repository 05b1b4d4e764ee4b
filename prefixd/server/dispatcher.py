"""From the queue to the worker: look ahead, hand over what is ready, record what comes back.

`_dispatch` takes the next requests in the policy's order, as many as the GPU tier has frames for, and has the
prefetcher stage them. A request that leaves that window loses its hold, not its blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from prefixd.cache import CPU, DISK, GPU, TieredCache
from prefixd.cache.cache import Claim
from prefixd.errors import ExhaustedError, PrefixdError, UnavailableError
from prefixd.server.concurrency_limit import ConcurrencyLimit
from prefixd.server.prefetcher import Prefetcher
from prefixd.server.request import Ended, NewTokens, Request
from prefixd.server.tracker import PrefixTracker
from prefixd.worker.protocol import Cancel, Done, Extend, Start, Step, ToWorker
from prefixd_scheduler import CostModel, RequestQueue

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_END_S = 5.0


class Dispatcher:
    """Runs the waiting requests on the worker.

    Args:
        cache: the cache; its GPU tier is set before the first request is handed over.
        queue: the order.
        cost: learns what loading and computing cost.
        send: gives a message to the worker.
        clock: seconds.
        max_running: requests computed at once.
        look_ahead: requests ahead of their turn whose prefixes are brought up.
        recompute_if_slower: compute a cached prefix again where loading it would take longer.
        caching: False neither finds nor keeps anything.
    """

    def __init__(
        self,
        cache: TieredCache,
        queue: RequestQueue,
        cost: CostModel,
        send: Callable[[ToWorker], None],
        clock: Callable[[], float],
        *,
        max_running: int,
        look_ahead: int,
        recompute_if_slower: bool = True,
        caching: bool = True,
    ) -> None:
        self.queue = queue
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.finished = self.preempted = self.resumed = 0
        self._cache = cache
        self._mover = cache.mover
        self._tracker = PrefixTracker(cache)
        self._cost = cost
        self._send = send
        self._clock = clock
        self._concurrency = ConcurrencyLimit(max_running, cache.tiers.troubles, self._look)
        self._look_ahead = look_ahead
        self._caching = caching
        self._prefetcher = Prefetcher(
            cache,
            self._tracker if caching else None,
            cost,
            clock,
            self._look,
            recompute_if_slower=recompute_if_slower,
        )
        self._withdrawn: set[Request] = set()  # cancelled while their prefix was being brought up
        cache.claims.append(self._claims)
        self._computing: Counter[bytes] = Counter()  # keys of prompt blocks that running requests are computing
        self._starved: dict[int, Request] = {}  # running requests that wait for a frame
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._ready = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> asyncio.Task[None]:
        """Starts dispatching in the background; the task ends only with `stop`, or by a defect."""
        self._task = asyncio.create_task(self._run(), name="dispatcher")
        return self._task

    async def stop(self) -> None:
        """Stops dispatching and fails what waits or runs."""
        self._concurrency.close()
        self._stopping = True  # not cancelled: it may be waiting for a copy, whose memory goes next
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(r.staging for r in self.waiting.values() if r.staging), return_exceptions=True)
        error = UnavailableError("the daemon is ending; send the request again when it is back")
        for request in [*self.waiting.values(), *self.running.values()]:
            request.events.put_nowait(error)
        for request in list(self.waiting.values()):
            self._prefetcher.unstage(request)

    def abandon(self) -> None:
        """Gives back what running requests held; their worker is gone for good."""
        for request in self.running.values():
            self._give_back(request)
        self.running.clear()

    async def end_all(self, error: PrefixdError) -> None:
        """Ends what waits and what runs; their callers get `error`. Returns when the worker has let go, or is slow."""
        for request in list(self.waiting.values()):
            self._withdraw(request)
            request.events.put_nowait(error)
        for request in self.running.values():
            request.failure = error
            self.cancel(request)
        self._look()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), _END_S)

    async def idle(self) -> None:
        """Waits until nothing waits or runs."""
        await self._idle.wait()

    # -- callers' side ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFullError."""
        self.queue.push(request.queued)
        self._enter(request)

    def cancel(self, request: Request) -> None:
        """Ends a request that waits or runs; one that has ended already is left alone."""
        request.cancelled = True
        if request.id in self.running:
            self._send(Cancel(request.id))
        elif request.id in self.waiting:
            self._withdraw(request)
            request.events.put_nowait(Ended("cancelled"))
        self._look()

    def _withdraw(self, request: Request) -> None:
        self.queue.remove(request.id)
        del self.waiting[request.id]
        if request.staging is not None and not request.staging.done():
            self._withdrawn.add(request)
            request.staging.add_done_callback(lambda _: self._let_go(request))
        else:
            self._prefetcher.unstage(request)

    def _let_go(self, request: Request) -> None:
        self._withdrawn.discard(request)
        self._prefetcher.unstage(request)

    def _claims(self) -> Iterator[Claim]:
        """What every request holds in the GPU tier, and the frames that only it has."""
        for request in [*self.waiting.values(), *self._withdrawn]:
            if request.staged:
                yield request.trie, request.rows, []
        for request in self.running.values():
            yield request.trie, request.rows, list(request.own)

    # -- the worker's side --------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """The worker takes requests."""
        self._ready = True
        self._look()

    def on_step(self, step: Step) -> None:
        """Results of one forward pass."""
        if step.computed_tokens > 2 * len(step.updates):  # mostly prefill: what a cached prefix saves
            self._cost.observe_compute(step.computed_tokens, step.elapsed_s)
        for update in step.updates:
            request = self.running.get(update.id)
            if request is None:
                continue
            if update.tokens:
                request.chain.append(np.array(update.tokens, "<u4").tobytes())
                if request.first_token_s is None:
                    request.first_token_s = self._clock()
                request.events.put_nowait(NewTokens(update.tokens))
            self._record(request, update.filled_blocks)
            self._want_frames(request)
        self._look()

    def on_done(self, done: Done) -> None:
        """A request ended; nothing maps its frames any more."""
        request = self.running.pop(done.id, None)
        if request is None:
            return
        self._give_back(request)
        if request.preempted and done.reason == "cancelled" and not request.cancelled:
            self.preempted += 1
            self._put_back(request)
        elif request.failure is not None:
            request.events.put_nowait(request.failure)
        elif done.reason == "no_memory" and not request.cancelled and self.running:
            self._concurrency.shrink(len(self.running), done.detail)
            self._put_back(request)
        elif done.reason == "no_memory":
            request.events.put_nowait(ExhaustedError(f"the worker has no memory for the request: {done.detail}"))
        elif done.reason == "error":
            request.events.put_nowait(UnavailableError(f"the worker could not run the request: {done.detail}"))
        else:
            self.finished += 1
            request.events.put_nowait(Ended(done.reason))
        self._look()

    def on_death(self, why: str, gave_up: bool) -> None:
        """The worker is gone; its requests are run again by the next one, if there is one."""
        self._ready = False
        interrupted, self.running = list(self.running.values()), {}
        self._starved.clear()
        for request in interrupted:
            self._give_back(request)
            request.attempts += 1
            if request.failure is not None:
                request.events.put_nowait(request.failure)
            elif request.cancelled:
                request.events.put_nowait(Ended("cancelled"))
            elif gave_up or request.attempts >= _ATTEMPTS:
                request.events.put_nowait(UnavailableError(f"the worker died ({why}); send the request again later"))
            else:
                self._put_back(request)
        if gave_up:
            for request in list(self.waiting.values()):
                self._withdraw(request)
                request.events.put_nowait(UnavailableError(f"there is no worker ({why}); the daemon's log says more"))
        self._look()

    # -- dispatching --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            if self._taking:
                await self._extend_starved()
                await self._dispatch()

    @property
    def _taking(self) -> bool:
        """Whether there is a worker to give requests to. It may die whenever we wait."""
        return self._ready and not self._stopping

    async def _dispatch(self) -> None:
        if self._caching:
            self._tracker.refresh(self.waiting.values())
        places = max(0, self._concurrency.limit - len(self.running))
        window = [self.waiting[q.id] for q in self.queue.window(places + self._look_ahead, self._clock())]
        inside = set(map(id, window))
        for request in self.waiting.values():
            if request.ready and id(request) not in inside:
                self._prefetcher.unstage(request)
        held: set[int] = set()
        counted: set[int] = set()  # rows whose frames are spoken for
        for request in self.running.values():
            held.update(request.frames, request.trie.slots[request.rows, GPU, 0].tolist())
            counted.update(request.rows.tolist())
        budget = self._cache.tiers.frames.capacity - len(held)
        for request in self.waiting.values():
            if request.staged and not request.ready:  # a copy under way keeps its frames, in the window or not
                budget -= len(set(request.rows.tolist()) - counted)
                counted.update(request.rows.tolist())
        for place, request in enumerate(window):
            if not self._taking:
                break
            if request.id not in self.waiting:
                continue  # cancelled while we waited for frames
            if not request.staged and request.next_key in self._computing:
                continue  # its prefix is on its way up: another request computes it now
            rows = set(request.rows.tolist())
            fresh = self._blocks(request) - len(rows)
            budget -= fresh + len(rows - counted)
            counted |= rows
            if budget < 0:
                for later in window[place:]:
                    if later.ready:
                        self._prefetcher.unstage(later)
                break
            if not request.staged:
                self._prefetcher.stage(request)
            if request.ready and len(self.running) < self._concurrency.limit and not await self._hand_over(request):
                self._prefetcher.unstage_all_but(request, self.waiting.values())
                break

    async def _hand_over(self, request: Request) -> bool:
        """Gives the request to the worker; False when there are no frames for it."""
        trie = request.trie
        if self._prefetcher.grew(request):
            self._prefetcher.unstage(request)
            self._look()
            return True
        fresh = await self._mover.take_frames(self._blocks(request) - len(request.rows))
        if fresh is None:
            return False
        if request.id not in self.waiting or not self._taking:  # cancelled, or the worker died while we waited
            self._cache.tiers.release(GPU, fresh)
            return True
        self.queue.remove(request.id)
        del self.waiting[request.id]
        self.running[request.id] = request
        request.staged = False
        request.preempted = request.extending = False
        request.handed_over_s = request.handed_over_s or self._clock()
        request.recorded = len(request.rows)
        request.recording = self._caching
        request.own = set(fresh)
        request.frames = [*trie.slots[request.rows, GPU, 0].tolist(), *fresh]
        if not request.resumed:
            self._count(request)
        request.claimed = range(request.recorded, request.usable_blocks if self._caching else 0)
        self._computing.update(request.chain.key(block) for block in request.claimed)
        self._send(
            Start(
                id=request.id,
                tokens=request.chain.token_ids,
                generated=request.generated,
                cached_blocks=len(request.rows),
                frames=request.frames,
                sampling=request.sampling,
            )
        )
        return True

    def _count(self, request: Request) -> None:
        found = request.hit_tokens or [0, 0, 0]
        surplus = sum(found) - len(request.rows) * request.trie.block_tokens
        for tier in (DISK, CPU, GPU):  # what turned out damaged or did not fit was no hit
            less = min(max(surplus, 0), found[tier])
            found[tier] -= less
            surplus -= less
        request.hit_tokens = found
        self._cache.counters.asked_tokens += request.prompt_tokens
        for tier, hits in enumerate(found):
            self._cache.counters.hit_tokens[tier] += hits

    # -- while a request runs -----------------------------------------------------------------------------------

    def _record(self, request: Request, filled: int) -> None:
        """Enters the blocks that were filled into the trie; they stay after the request ends."""
        while request.recording and request.recorded < filled:
            block = request.recorded
            parent = int(request.rows[-1]) if len(request.rows) else request.namespace.root
            result = self._cache.record(request.namespace, parent, request.chain, block, request.frames[block])
            if result is None:
                request.recording = False
                return
            row, taken = result
            request.rows = np.append(request.rows, row)
            self._computed(request, block)
            request.recorded += 1
            if taken:
                request.own.discard(request.frames[block])

    def _computed(self, request: Request, block: int) -> None:
        if block not in request.claimed:
            return
        key = request.chain.key(block)
        if self._computing[key] <= 1:
            del self._computing[key]
        else:
            self._computing[key] -= 1

    def _want_frames(self, request: Request) -> None:
        """Asks for the next frame a block ahead of need."""
        left = request.sampling.max_tokens - request.generated
        if left > 0 and not request.extending:
            room = len(request.frames) * request.trie.block_tokens - request.chain.tokens
            if room < min(left, request.trie.block_tokens):
                request.extending = True
                self._starved[request.id] = request

    async def _extend_starved(self) -> None:
        for request in list(self._starved.values()):
            frames = await self._mover.take_frames(1)
            if request.id not in self.running:
                self._starved.pop(request.id, None)
                if frames:
                    self._cache.tiers.release(GPU, frames)
                continue
            if frames is None:
                self._prefetcher.unstage_all_but(request, self.waiting.values())
                self._preempt()
                return
            del self._starved[request.id]
            request.extending = False
            request.frames += frames
            request.own.update(frames)
            self._send(Extend(request.id, frames))

    def _preempt(self) -> None:
        """Frees frames by taking back the request that was handed over last; its blocks stay cached."""
        if any(request.preempted for request in self.running.values()):
            return
        youngest = next(reversed(self.running.values()))
        # Alone it fits, unless it filled blocks that another had recorded: it then has them twice until it starts over.
        if len(self.running) > 1 or not youngest.own.isdisjoint(youngest.frames[: youngest.recorded]):
            youngest.preempted = True
            log.info("request %s is preempted: the GPU tier has no frame left", youngest.name)
            self._send(Cancel(youngest.id))

    # -- after --------------------------------------------------------------------------------------------------

    def _give_back(self, request: Request) -> None:
        """Ends what a run held: its own frames are free, its blocks evictable."""
        self._starved.pop(request.id, None)
        for block in request.claimed[request.recorded - request.claimed.start :] if request.claimed else ():
            self._computed(request, block)
        self._cache.tiers.release(GPU, request.own)
        self._cache.unhold(request.trie, request.rows, GPU)
        request.own = set()
        request.frames = []
        request.forget_rows()

    def _put_back(self, request: Request) -> None:
        request.resumed += 1
        self.resumed += 1
        request.preempted = False
        self.queue.readmit(request.queued)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        self.waiting[request.id] = request
        if self._caching:
            self._tracker.look_up(request)
        self._look()

    def _blocks(self, request: Request) -> int:
        """Frames to start with: everything known, and the first token that will be generated."""
        return -(-(request.chain.tokens + 1) // request.trie.block_tokens)

    def _look(self) -> None:
        if self.waiting or self.running:
            self._idle.clear()
        else:
            self._idle.set()
        self._wake.set()
