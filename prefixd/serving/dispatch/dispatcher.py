"""The dispatcher of one model: puts its parts together, and runs their rounds (`DispatchWindow`).

No callback here holds the event loop for long. The cost of a round depends on its window, not on how many requests wait
or how long the running ones are (`RequestQueue`, `PrefixTracker`, `FrameBudget`), and a round lets other tasks run in
between (`Pacer`). Work on all requests is done a slice at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

from prefixd.base.errors import PrefixdError, UnavailableError
from prefixd.base.long_work.pacer import give_way
from prefixd.cache import TieredCache
from prefixd.cache.cache import Claim
from prefixd.cache.index.trie import Trie
from prefixd.cache.placement.lacked_blocks import note_missing
from prefixd.observability.request_record import StageName, Wait
from prefixd.serving.dispatch.block_recorder import Recorder
from prefixd.serving.dispatch.capacity.concurrency import ConcurrencyLimit
from prefixd.serving.dispatch.capacity.frame_supply import FrameSupply
from prefixd.serving.dispatch.capacity.preemption import Preemption
from prefixd.serving.dispatch.capacity.tier_share import TierShare
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.endings import Endings
from prefixd.serving.dispatch.hand_over import HandOver
from prefixd.serving.dispatch.model_requests import Requests
from prefixd.serving.dispatch.options import DispatchOptions
from prefixd.serving.dispatch.staging.prefetcher import Prefetcher
from prefixd.serving.dispatch.staging.window import DispatchWindow
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.dispatch.worker_results import WorkerResults
from prefixd.serving.kv_shape import ONE_FRAME
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Cancel, ToWorker
from prefixd_scheduler import CostModel, RequestQueue

log = logging.getLogger(__name__)

_END_S = 5.0
_LOOKUP_SHARE = 0.08  # a shared store may take this share of the time of computing the prompt to answer


class Dispatcher:
    """Runs the waiting requests of one model on its worker.

    Args:
        cache: the cache; its GPU tier is set before the first request is handed over.
        queue: the order.
        cost: learns what loading and computing cost.
        send: gives a message to the worker.
        clock: seconds.
        options: the settings.
        share: connects the dispatchers of several models, which take frames of one tier.

    Attributes:
        requests: the requests that wait and those that run.
        queue: the order of the waiting requests.
        waiting: the waiting requests, by id.
        running: the requests that the worker has, by id.
        context: shared by the parts.
        counters: events since the start.
        least_frames: frames that the smallest request of the worker's model needs; set with the GPU tier.
        results: handles the worker's messages.
        recorder: enters computed blocks into the cache.
        preemption: takes frames of running requests.
        loader: decides what is loaded.
    """

    def __init__(
        self,
        cache: TieredCache,
        queue: RequestQueue,
        cost: CostModel,
        send: Callable[[ToWorker], None],
        clock: Callable[[], float],
        options: DispatchOptions,
        share: TierShare | None = None,
    ) -> None:
        self.requests = Requests(queue)
        self.queue, self.waiting, self.running = queue, self.requests.waiting, self.requests.running
        share = share or TierShare()
        self.context = context = DispatchContext(cache, self.requests, cost, send, clock, options, share, self)
        self.counters = context.counters
        self.least_frames = ONE_FRAME.least_frames
        self._cache = cache
        self._share = share
        share.join(self)
        cache.claims.append(self._claims)
        self.recorder = Recorder(context)
        self._tracker = PrefixTracker(
            cache, queue, caching=options.caching, ready_s=lambda each: self.loader.planner.ready_s(each)
        )
        self._prefetcher = Prefetcher(context, self._tracker, self.recorder.backlog_s)
        self.loader = self._prefetcher.loader
        self.preemption = Preemption(context)
        self._concurrency = ConcurrencyLimit(options.max_running, cache.tiers.troubles, self.requests.wake)
        self._endings = Endings(context, self._prefetcher)
        self._supply = FrameSupply(context, self._prefetcher, self.preemption, self._endings)
        self._window = DispatchWindow(
            context,
            self._tracker,
            self._prefetcher,
            self.recorder,
            self.preemption,
            self._concurrency,
            self._supply,
            HandOver(context, self._prefetcher, self.recorder, self.preemption),
            self._endings,
        )
        self.results = WorkerResults(
            context,
            self._tracker,
            self.loader,
            self.recorder,
            self.preemption,
            self._concurrency,
            self._supply,
            self._endings,
        )
        self.on_step, self.on_done, self.on_death = self.results.on_step, self.results.on_done, self.results.on_death
        self._weighed: Trie | None = None  # the eviction policy knows how long computing this trie's blocks takes
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
        self._stopping = True  # the task is not cancelled: it may wait for a copy, whose memory is freed next
        self.requests.ready = False
        self.requests.wake()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await self._prefetcher.stop()
        await self.preemption.stop()
        error = UnavailableError("the daemon is ending; send the request again when it is back")
        for request in self.requests.begun:
            request.withdraw(error)
        while self._endings.end_some_waiting(error):
            await give_way()

    def abandon(self) -> None:
        """Gives back what withdrawn requests held on the worker, which is gone for good; call `stop` before."""
        for request in self.requests.begun:
            request.let_go()
        self.requests.running.clear()
        self.requests.interrupted.clear()

    async def end_all(self, error: PrefixdError) -> None:
        """Ends all waiting and running requests; their callers get `error`.

        Returns when the worker has let go of them, or after 5 s.
        """
        while self._endings.end_some_waiting(error) or self.requests.interrupted:
            await give_way()
        for request in list(self.requests.running.values()):
            self._endings.end_run(request, error)
        self.requests.wake()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), _END_S)

    async def idle(self) -> None:
        """Waits until no request waits or runs."""
        await self.requests.wait_idle()

    # -- the worker -----------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """The worker accepts requests from now on."""
        self._supply.note_ready()
        now_s = self.context.clock()
        for request in self.requests.waiting.values():
            request.record.wait_for(Wait.BEHIND, now_s)
        self.requests.ready = not self._stopping
        self.requests.wake()

    # -- other models -------------------------------------------------------------------------------------------
    # As `Sharer` says.

    @property
    def taken_frames(self) -> int:
        """Frames that its requests have and keep."""
        return self.context.budget.taken + self.context.image_budget.taken

    @property
    def moving(self) -> bool:
        """Whether blocks of its preempted requests are on their way out of the tier."""
        return self.preemption.moving

    def take_back(self, request: Request) -> None:
        """Has its worker give up a running request's frames, to run again later."""
        request.preempt()
        self._note_preempted(request)
        log.info(
            "request %s is preempted: the GPU tier has no frame left", request.name, extra={"request_id": request.name}
        )
        self.context.send(Cancel(request.id))

    def run_ended(self) -> None:
        """A run of any model has ended: preempted requests may run again."""
        self.preemption.run_ended()
        self.requests.wake()

    async def unstage_all(self) -> None:
        """Ends the holds of waiting requests."""
        await self._prefetcher.keep_only(())

    def wake(self) -> None:
        """Frames may have become free, or this model is first in line."""
        self.requests.wake()

    # -- callers' side ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFullError."""
        tenant = request.queued.tenant
        self.queue.check_room(tenant)
        self._window.newcomer |= not self.queue.waiting_of(tenant)
        if request.trie is not self._weighed:
            self._weighed = request.trie
            self._cache.policy.observe_compute_time(request.trie, self.context.cost.compute_s)
        request.enqueue()
        self._tracker.add(request)
        request.arrived()
        self._note_arrival(request)
        self.queue.push(request.queued)
        self.requests.enter(request)

    def _note_preempted(self, request: Request) -> None:
        """Notes in a request's record for which other requests it gives its memory up: those that lack frames."""
        for other in self._share.running():
            if other.state is RequestState.STARVED:
                tenant = other.queued.tenant
                request.record.note_preempted_for(f"request {other.name} of tenant {tenant}")
                break

    def _note_arrival(self, request: Request) -> None:
        """Notes in the call's record what its prompt lacks, and what was wrong, when its first sequence comes."""
        request.enter_phase(StageName.QUEUE, self.context.clock())
        record = request.record
        if request.fork_of < 0:
            found, blocks = len(request.found), request.usable_blocks
            record.missing = note_missing(request.namespace, request.chain, found, blocks)
            record.degraded = tuple(trouble.part for trouble in self._cache.tiers.troubles)
            record.wait_for(Wait.BEHIND if self.requests.taking else Wait.WORKER, self.context.clock())
            record.uncached = request.uncached or not self.context.caching

    def requests_of(self, tenant: str) -> tuple[int, int]:
        """How many of a tenant's requests (sequences) wait, and how many run."""
        return self.requests.of_tenant(tenant)

    async def ask_store(self, request: Request) -> None:
        """Asks a shared store which blocks of a request's prompt it has, before the request is queued; they are in the
        trie then.

        Waits for the answer at most 8% of the time that computing the prompt takes.
        """
        remote = self._cache.mover.remote
        if remote is None or not self.context.caching or not request.usable_blocks:
            return
        compute_s = self.context.cost.compute_s(request.prompt_tokens)
        wait_s = None if compute_s is None else min(remote.lookups.lookup_s, _LOOKUP_SHARE * compute_s)
        await remote.lookups.look_up(request.trie, request.namespace, request.chain, request.usable_blocks, wait_s)

    def cancel(self, request: Request) -> None:
        """Ends a request that waits or runs; does nothing if it has ended already."""
        self._endings.cancel(request)

    def _claims(self) -> Iterator[Claim]:
        """Frames that belong to running requests alone. Cached blocks that requests use are counted by their holds."""
        for request in self.requests.begun:
            yield request.trie, request.rows[:0], list(request.footprint.own)

    # -- dispatching --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            taking = await self.requests.wait_for_change()
            if self.loader.beside:
                self._advance_loads()
            if taking and (not self.running or await self._supply.extend_starved()):
                await self._window.dispatch()
            await asyncio.sleep(0)  # other tasks run even if every dispatch wakes the next one

    def _advance_loads(self) -> None:
        """Continues the loads beside running requests, and tells the worker where a load and its run have met."""
        for request, arrived in self.loader.advance():
            if arrived is not None:
                self.context.send(arrived)
            self._supply.note_need(request)
