"""From the queue to the worker: look ahead, hand over what is ready, record what comes back.

`_dispatch` takes the next requests in the policy's order, as many as the GPU tier has frames for, and has the
prefetcher stage them. A request that leaves that window loses its hold, not its blocks.

No callback here holds the event loop for long: a dispatch costs what its window costs, however many requests wait and
however long the running ones are (`RequestQueue`, `PrefixTracker`, `FrameBudget`), and lets other tasks run in between
(`Pacer`). What concerns all requests at once is done a slice at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np

from prefixd.base.errors import ExhaustedError, PrefixdError, UnavailableError
from prefixd.base.pacer import give_way
from prefixd.cache import TieredCache
from prefixd.cache.cache import Claim
from prefixd.cache.index.trie import Trie
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.endings import Endings
from prefixd.serving.dispatch.frame_supply import FrameSupply
from prefixd.serving.dispatch.hand_over import HandOver
from prefixd.serving.dispatch.options import DispatchOptions
from prefixd.serving.dispatch.places import (
    ConcurrencyLimit,
    GpuQuotas,
    Places,
    computing_next_block,
    embeds_image,
    keeps_state,
)
from prefixd.serving.dispatch.preemption import Preemption
from prefixd.serving.dispatch.prefetcher import Prefetcher
from prefixd.serving.dispatch.recorder import Recorder
from prefixd.serving.dispatch.requests import Requests
from prefixd.serving.dispatch.tier_share import TierShare
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.dispatch.worker_results import WorkerResults
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.images.image_kv import NO_ROWS
from prefixd.serving.kv_shape import ONE_FRAME
from prefixd.serving.request.request import Request, RequestState
from prefixd.worker_protocol.protocol import Cancel, Done, Step, ToWorker
from prefixd_scheduler import CostModel, QueuedRequest, RequestQueue
from prefixd_swap import FramePool

log = logging.getLogger(__name__)

_END_S = 5.0
_REQUEST_ROWS = 64  # what looking at a request costs besides, in rows looked at
_NEAR_ROWS = 16  # and what looking costs at one whose prefix the CPU tier holds already
_HAND_OVER = 4  # what handing a block over costs, in rows looked at
_RETRY_S = 0.02
_ASKED = 0.08  # of what computing a prompt takes, spent on asking a shared store about it
_QUEUED = (RequestState.WAITING, RequestState.STAGING, RequestState.READY)


class Dispatcher:
    """Runs the waiting requests on the worker.

    Args:
        cache: the cache; its GPU tier is set before the first request is handed over.
        queue: the order.
        cost: learns what loading and computing cost.
        send: gives a message to the worker.
        clock: seconds.
        options: the settings.
        share: connects the dispatchers of several models, which take frames of one tier.

    Attributes:
        requests: those that wait and those that run.
        context: what the parts share.
        counters: what happened since the start.
        least_frames: frames that the smallest request of the worker's model needs; set with the GPU tier.
        results: takes what the worker says.
        recorder: enters what runs compute into the cache.
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
        share = share or TierShare()
        self.context = context = DispatchContext(cache, self.requests, cost, send, clock, options, share, self)
        self.counters = context.counters
        self.least_frames = ONE_FRAME.least_frames
        self._cache = cache
        self._share = share
        share.join(self, (context.budget, context.image_budget))
        cache.claims.append(self._claims)
        self.recorder = Recorder(context)
        self._tracker = PrefixTracker(
            cache, queue, caching=options.caching, ready_s=lambda each: self.loader.ready_s(each)
        )
        self._prefetcher = Prefetcher(context, self._tracker, self.recorder.backlog_s)
        self.loader = self._prefetcher.loader
        self.preemption = Preemption(context)
        self._concurrency = ConcurrencyLimit(options.max_running, cache.tiers.troubles, self.requests.look)
        self._endings = Endings(context, self._prefetcher)
        self._supply = FrameSupply(context, self._prefetcher, self.preemption, self._endings)
        self._hand_over = HandOver(context, self._prefetcher, self.recorder, self.preemption)
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
        self._retry: asyncio.TimerHandle | None = None  # the next look of a model that waits in line
        self._weighed: Trie | None = None  # the eviction policy knows what computing takes of its blocks
        self._newcomer = False  # of a tenant of which none waited, since a look at the queue
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    @property
    def queue(self) -> RequestQueue:
        """The order of the requests that wait."""
        return self.requests.queue

    @property
    def waiting(self) -> dict[int, Request]:
        """Requests that wait, by id."""
        return self.requests.waiting

    @property
    def running(self) -> dict[int, Request]:
        """Requests that the worker has, by id."""
        return self.requests.running

    # -- life ---------------------------------------------------------------------------------------------------

    def start(self) -> asyncio.Task[None]:
        """Starts dispatching in the background; the task ends only with `stop`, or by a defect."""
        self._task = asyncio.create_task(self._run(), name="dispatcher")
        return self._task

    async def stop(self) -> None:
        """Stops dispatching and fails what waits or runs."""
        self._concurrency.close()
        self._stopping = True  # not cancelled: it may be waiting for a copy, whose memory goes next
        self.requests.ready = False
        self.requests.look()
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
        """Ends what waits and what runs; their callers get `error`. Returns when the worker has let go, or is slow."""
        while self._endings.end_some_waiting(error) or self.requests.interrupted:
            await give_way()
        for request in list(self.requests.running.values()):
            self._endings.end_run(request, error)
        self.requests.look()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), _END_S)

    async def idle(self) -> None:
        """Waits until no request waits or runs."""
        await self.requests.wait_idle()

    # -- the worker -----------------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """The worker takes requests."""
        self.requests.ready = not self._stopping
        self.requests.look()

    def on_step(self, step: Step) -> None:
        """Results of one forward pass."""
        self.results.on_step(step)

    def on_done(self, done: Done) -> None:
        """A request ended; nothing maps its frames any more."""
        self.results.on_done(done)

    def on_death(self, why: str, gave_up: bool) -> None:
        """The worker is gone; its requests are run again by the next one, if there is one."""
        self.results.on_death(why, gave_up)

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
        log.info("request %s is preempted: the GPU tier has no frame left", request.name)
        self.context.send(Cancel(request.id))

    def run_ended(self) -> None:
        """A run has ended, of whichever model: requests that were preempted may run again."""
        self.preemption.run_ended()
        self.requests.look()

    async def unstage_all(self) -> None:
        """Ends the holds of waiting requests."""
        await self._prefetcher.keep_only(())

    def look(self) -> None:
        """Frames may have become free, or its turn has come."""
        self.requests.look()

    # -- callers' side ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFullError."""
        tenant = request.queued.tenant
        self.queue.check_room(tenant)
        self._newcomer |= not self.queue.waiting_of(tenant)
        if request.trie is not self._weighed:
            self._weighed = request.trie
            self._cache.policy.observe_compute_time(request.trie, self.context.cost.compute_s)
        request.enqueue()
        self._tracker.add(request)
        request.arrived()
        self.queue.push(request.queued)
        self.requests.enter(request)

    def requests_of(self, tenant: str) -> tuple[int, int]:
        """How many of a tenant's requests (sequences) wait, and how many run."""
        return self.requests.of_tenant(tenant)

    async def look_in_store(self, request: Request) -> None:
        """Has the trie know what a shared store has of a request's prompt, before it is queued.

        Its answer is waited for no longer than a twelfth of what computing the prompt takes.
        """
        remote = self._cache.mover.remote
        if remote is None or not self.context.caching or not request.usable_blocks:
            return
        compute_s = self.context.cost.compute_s(request.prompt_tokens)
        wait_s = remote.options.lookup_s if compute_s is None else min(remote.options.lookup_s, _ASKED * compute_s)
        await remote.look(request.trie, request.namespace, request.chain, request.usable_blocks, wait_s)

    def cancel(self, request: Request) -> None:
        """Ends a request that waits or runs; one that has ended already is left alone."""
        self._endings.cancel(request)

    def _claims(self) -> Iterator[Claim]:
        """The frames that only a running request has. What requests hold are holds of their own."""
        for request in self.requests.begun:
            yield request.trie, request.rows[:0], list(request.footprint.own)

    # -- dispatching --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            await self.requests.wait_for_change()
            self._advance_loads()
            if self.requests.taking and await self._supply.extend_starved():
                await self._dispatch()
            await asyncio.sleep(0)  # others run even if every dispatch asks for the next one

    async def _dispatch(self) -> None:
        self._newcomer = False
        if not self.waiting:
            self._share.leave(self)
            return
        self._tracker.refresh()
        of_all = Places(self._concurrency.limit, self._cache.tenants.calling, self.running.values())
        places = max(0, of_all.free)
        ahead = self.context.look_ahead.requests(self._concurrency.limit)
        quotas = GpuQuotas(self._cache.mover.use, self._cache.tiers.gpu, self._share.running())
        window = self._window(places, places + ahead, quotas)
        beyond = len(window)  # from this place on the GPU tier has no room
        await self._prefetcher.keep_only(window)
        self.context.budget.begin_round()
        self.context.image_budget.begin_round()
        for request, refusal in quotas.never:
            self._endings.end_waiting(request, refusal)
        frames = self._cache.tiers.frames.lasting
        left = frames - self._share.taken_frames
        full = lacks = coming = False
        for place, request in enumerate(window):
            if not self.requests.taking:
                break
            demanded = place < places  # the worker would run it now
            if demanded and request.state is RequestState.STAGING:
                self._prefetcher.hurry(request)
            if request.state not in _QUEUED or not self._is_current(request):
                continue  # it was cancelled while others ran, or its prefix is on its way up
            if request.most_frames > frames:  # it fitted when it came, and the tier has shrunk since
                self._endings.end_waiting(request, _never_fits(request, self._cache.tiers.frames))
                continue
            if self.preemption.waits(request, self._share.running()):
                beyond = place
                await self._prefetcher.unstage_ready(window[place:])
                break
            if not self._share.may_hand_over(self):
                lacks, beyond = demanded, place
                await self._prefetcher.unstage_ready(window[place:])
                break
            left -= request.first_frames
            left -= self.context.budget.weigh(request.trie, request.rows, request.wanted)
            left -= _weigh_images(
                request, self.context.image_budget, caching=self.context.caching and not request.uncached
            )
            if left < 0:
                lacks, beyond = demanded, place
                await self._prefetcher.unstage_ready(window[place:])
                break
            if request.state is RequestState.WAITING and (demanded or self._prefetcher.may_bring_ahead(request)):
                self._prefetcher.stage(request, demanded=demanded, places=place + 1 - places)
            # Who is next waits for as many places as it takes: others, which take fewer, do not pass it for ever. But
            # where the free places are kept for other tenants, those pass.
            kept_waiting = of_all.keeps_waiting(request)
            full = full or not (kept_waiting or of_all.has_for(request))
            may_run = not (full or kept_waiting)
            if request.state is RequestState.READY and may_run and not await self._hand_over.hand_over(request):
                lacks, beyond = True, place + 1
                await self._prefetcher.unstage_all_but(request)
                self._supply.note_lack(request)
                break
            coming = coming or (demanded and request.state is RequestState.STAGING)
            handed_over = request.state is RequestState.RUNNING
            if handed_over:
                self._supply.note_success()
                of_all.take(request)
                if quotas.left_out:
                    self.requests.look()  # others of its tenant may need less beside it: what they share is held now
                if self._newcomer:  # room was made meanwhile, for a second if need be: it may be another one's turn
                    self.requests.look()
                    beyond = place + 1
                    break
            await self.context.pacer.worked(
                _REQUEST_ROWS + (_HAND_OVER * request.blocks if handed_over else request.blocks)
            )
        await self._keep_place(lacks, coming)
        await self._bring_near(window if ahead else [], beyond, places)

    def _window(self, places: int, n: int, quotas: GpuQuotas) -> list[Request]:
        """The next `n` requests, where `places` are free: first those that could run in them now.

        Of a tenant whose requests wait because places are kept for others, many may come before the others' first one.
        """
        runnable: dict[int, Request] = {}
        if self._cache.tenants.calling > 1 and places:
            trial = Places(self._concurrency.limit, self._cache.tenants.calling, self.running.values())

            def may_run(queued: QueuedRequest) -> bool:
                request = self.waiting[queued.id]
                if trial.keeps_waiting(request) or not quotas.admits(request):
                    return False
                trial.take(request)
                return True

            runnable = {
                each.id: self.waiting[each.id] for each in self.queue.window(places, self.context.clock(), may_run)
            }
        admitted = self.queue.window(
            n, self.context.clock(), lambda queued: queued.id in runnable or quotas.admits(self.waiting[queued.id])
        )
        others = [self.waiting[each.id] for each in admitted if each.id not in runnable]
        return [*runnable.values(), *others][:n]

    async def _bring_near(self, window: list[Request], beyond: int, places: int) -> None:
        """The prefetcher's second stage, of the window from the place `beyond` on."""
        if beyond >= len(window) and not self._prefetcher.any_near:
            return
        self._prefetcher.begin_near(beyond - places)
        for place, request in enumerate(window[beyond:], beyond):
            if not self.requests.taking:
                break
            if request.state is not RequestState.WAITING or self._prefetcher.keep_near(request):
                continue
            near = self._prefetcher.is_near(request)  # then it is held, and looked at anew when its turn is near
            if near or self._is_current(request):
                if not self._prefetcher.bring_near(request, place + 1 - places):
                    break
                await self.context.pacer.worked(_NEAR_ROWS if near else _REQUEST_ROWS + request.blocks)
        self._prefetcher.end_near()

    async def _keep_place(self, lacks: bool, coming: bool) -> None:
        """Waits in the line of the models for frames that the next request `lacks`, or for its prefix, which is on its
        way up (`coming`); else leaves the line."""
        if not self._share.shared:
            return
        if lacks and self.requests.taking:
            self._share.wait(self)
            await self._share.clear(self)
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._look_again)
        elif not coming:
            self._share.leave(self)

    def _look_again(self) -> None:
        self._retry = None
        self.requests.look()

    def _is_current(self, request: Request) -> bool:
        """Makes sure of what is cached of a waiting request's prefix; False if another request computes more of it now.

        What was found may have gone or come while others ran, so this is asked right before the request is staged.
        """
        if request.state is not RequestState.WAITING or request.uncached:
            return True
        if self._is_computed(request) or (self.context.caching and embeds_image(request, self.running.values())):
            return False
        return not (self._tracker.verify(request) and self._is_computed(request))

    def _is_computed(self, request: Request) -> bool:
        if request.kv.state_frames:
            return keeps_state(request, self.running.values())
        other = computing_next_block(request, self.recorder.computing.values())
        if other is not None:
            request.fork_of = other.id
        return other is not None

    def _advance_loads(self) -> None:
        """Loads on beside the requests that compute, and tells the worker of what has come when both meet."""
        for request, arrived in self.loader.advance():
            if arrived is not None:
                self.context.send(arrived)
            self._supply.want(request)


def _weigh_images(request: Request, budget: FrameBudget, *, caching: bool) -> int:
    """How many more frames a queued request takes for its images, besides those taken or weighed in this round."""
    kv, holds = request.image_kv, request.image_holds
    if kv is None:
        return 0
    if holds is not None:
        return holds.missing_blocks * kv.width + budget.weigh(kv.trie, holds.held)
    found = [kv.find(digest) if caching else NO_ROWS for digest in kv.chains]
    missing = sum(kv.size for rows in found if not len(rows))
    return missing + budget.weigh(kv.trie, np.concatenate([NO_ROWS, *found]))


def _never_fits(request: Request, pool: FramePool) -> ExhaustedError:
    tokens, frame_bytes = request.most_blocks * request.trie.block_tokens, pool.frame_bytes
    return ExhaustedError(
        f"prompt and output, up to {tokens} tokens, need up to {request.most_frames * frame_bytes} bytes of the GPU "
        f"tier, which was resized to {pool.lasting * frame_bytes}; shorten the prompt, lower max_tokens or resize the "
        "tier"
    )
