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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from prefixd.base.errors import ExhaustedError, PrefixdError, UnavailableError
from prefixd.base.pacer import SLICE_ROWS, Pacer, give_way
from prefixd.cache import NONE, TieredCache
from prefixd.cache.cache import Claim
from prefixd.cache.index.trie import Trie
from prefixd.serving.dispatch.loader import Loader, LoadMode
from prefixd.serving.dispatch.places import (
    ConcurrencyLimit,
    GpuQuotas,
    Places,
    computing_next_block,
    embeds_image,
    keeps_state,
)
from prefixd.serving.dispatch.preemption import Preemption, PreemptionMode
from prefixd.serving.dispatch.prefetcher import Prefetcher
from prefixd.serving.dispatch.recorder import Recorder, refuse, suspects_of
from prefixd.serving.dispatch.state_keeping import StateKeeping, StatePolicy
from prefixd.serving.dispatch.tier_share import TierShare
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.frame_budget import FrameBudget, name_holders
from prefixd.serving.kv_shape import ONE_FRAME
from prefixd.serving.request.first_frames import first_run, state_to_resume, take_first, weigh_images
from prefixd.serving.request.request import Ended, Event, NewTokens, Request, RequestState
from prefixd.worker_protocol.protocol import Cancel, Done, Extend, KvUsage, Start, Step, ToWorker
from prefixd_scheduler import CostModel, LookAhead, QueuedRequest, RequestQueue
from prefixd_swap import FramePool

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_END_S = 5.0
_ENDED_AT_ONCE = 256  # waiting requests, in one callback
_INTERRUPTED_ROWS = 16_384  # of requests whose worker died, in one callback
_REQUEST_ROWS = 64  # what looking at a request costs besides, in rows looked at
_NEAR_ROWS = 16  # and what looking costs at one whose prefix the CPU tier holds already
_HAND_OVER = 4  # what handing a block over costs, in rows looked at
_RETRY_S = 0.02
_ASKED = 0.08  # of what computing a prompt takes, spent on asking a shared store about it
_PATIENCE_S = 30.0
"""For a request that lacks frames while nobody else runs: what holds them may be short, such as a write to disk."""
_QUEUED = (RequestState.WAITING, RequestState.STAGING, RequestState.READY)


class Dispatcher:
    """Runs the waiting requests on the worker.

    Args:
        cache: the cache; its GPU tier is set before the first request is handed over.
        queue: the order.
        cost: learns what loading and computing cost.
        send: gives a message to the worker.
        clock: seconds.
        max_running: requests computed at once.
        look_ahead: requests ahead of their turn whose prefixes are brought up; None for as many as loads take time.
        load: what is loaded of a cached prefix: see `settings.SchedulerSettings.load`.
        preemption: where the KV of a preempted request goes; see `preemption.py`.
        caching: False neither finds nor keeps anything.
        states: which states are kept of a model that has any.
        share: connects the dispatchers of several models, which take frames of one tier.
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
        look_ahead: int | None,
        load: LoadMode = "auto",
        preemption: PreemptionMode = "auto",
        caching: bool = True,
        states: StatePolicy | None = None,
        share: TierShare | None = None,
    ) -> None:
        self.queue = queue
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, Request] = {}
        self.finished = self.resumed = 0
        self.asked_images = self.encoded_images = self.found_images = 0
        """Images of prompts that were handed over, embeddings that the worker has computed of them, and images whose
        keys and values for cross-attention were found in a tier."""
        self.kv = KvUsage()
        self.passes = self.proposed_tokens = self.accepted_tokens = 0
        """Forward passes of the model, tokens that its draft proposed, and those of them that the model chose, too."""
        self.least_frames = ONE_FRAME.least_frames
        """Frames that the smallest request of the worker's model needs; set with the GPU tier."""
        self._cache = cache
        self._mover = cache.mover
        self._tracker = PrefixTracker(cache, queue, caching=caching, ready_s=self._ready_s)
        self._cost = cost
        self._send = send
        self._clock = clock
        self._concurrency = ConcurrencyLimit(max_running, cache.tiers.troubles, self._look)
        self.look_ahead = LookAhead(cost, clock, look_ahead)
        self._caching = caching
        self.states = StateKeeping(cache, states or StatePolicy())
        self.recorder = Recorder(cache, self.states)
        self._budget, self._image_budget = FrameBudget(self._frames_of_parts), FrameBudget(self._frames_of_parts)
        self._share = share or TierShare()
        self._share.join(self)
        self._pacer = Pacer(SLICE_ROWS)
        self._prefetcher = Prefetcher(
            cache,
            self._tracker,
            self._budget,
            cost,
            clock,
            self._pacer,
            self._look,
            look_ahead=self.look_ahead,
            sharers=lambda: self._share.members,
            image_budget=self._image_budget,
            caching=caching,
            load=load,
            backlog_s=self._backlog_s,
        )
        self.preemption = Preemption(cache, self._share, cost, clock, self._look, mode=preemption)
        cache.claims.append(self._claims)
        self._interrupted: dict[int, Request] = {}  # their worker died; they are about to be put back or ended
        self._lacking: tuple[int, float] | None = None  # a request that alone lacks frames, and since when
        self._retry: asyncio.TimerHandle | None = None  # the next look of a model that waits in line
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._weighed: Trie | None = None  # the eviction policy knows what computing takes of its blocks
        self._ready = False
        self._newcomer = False  # of a tenant of which none waited, since a look at the queue
        self._stopping = False
        self._task: asyncio.Task[None] | None = None

    def _backlog_s(self) -> float:
        """Estimated seconds that the worker computes what is left of the prompts that it has."""
        left = (request.prompt_tokens - request.run.computed_tokens for request in self.recorder.computing.values())
        return self._cost.compute_s(sum(tokens for tokens in left if tokens > 0)) or 0.0

    def _ready_s(self, request: Request) -> float:
        return self.loader.ready_s(request)

    @property
    def loader(self) -> Loader:
        """Decides what is loaded."""
        return self._prefetcher.loader

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
        await self._prefetcher.stop()
        await self.preemption.stop()
        error = UnavailableError("the daemon is ending; send the request again when it is back")
        for request in [*self.running.values(), *self._interrupted.values()]:
            request.withdraw(error)
        while self._end_some(error):
            await give_way()

    def abandon(self) -> None:
        """Gives back what withdrawn requests held on the worker, which is gone for good; call `stop` before."""
        for request in [*self.running.values(), *self._interrupted.values()]:
            request.let_go()
        self.running.clear()
        self._interrupted.clear()

    async def end_all(self, error: PrefixdError) -> None:
        """Ends what waits and what runs; their callers get `error`. Returns when the worker has let go, or is slow."""
        while self._end_some(error) or self._interrupted:
            await give_way()
        for request in list(self.running.values()):
            self._end_run(request, error)
        self._look()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle(), _END_S)

    async def idle(self) -> None:
        """Waits until nothing waits or runs."""
        await self._idle.wait()

    # -- the tier's size ----------------------------------------------------------------------------------------

    def frames_changed(self) -> None:
        """The GPU tier has more or fewer frames, or is about to have fewer."""
        self._look()

    def begun_frames(self) -> int:
        """The most frames that a request may come to which runs, or did and was put back: it can end with so many."""
        begun = [*self.running.values(), *self._interrupted.values()]
        begun += [request for request in self.waiting.values() if request.handed_over_s is not None]
        return max((request.most_frames for request in begun), default=0)

    # -- other models -------------------------------------------------------------------------------------------

    @property
    def taken_frames(self) -> int:
        """See `Sharer`."""
        return self._budget.taken + self._image_budget.taken

    @property
    def moving(self) -> bool:
        """See `Sharer`."""
        return self.preemption.moving

    def take_back(self, request: Request) -> None:
        """See `Sharer`."""
        request.preempt()
        log.info("request %s is preempted: the GPU tier has no frame left", request.name)
        self._send(Cancel(request.id))

    def run_ended(self) -> None:
        """See `Sharer`."""
        self.preemption.run_ended()
        self._look()

    async def unstage_all(self) -> None:
        """See `Sharer`."""
        await self._prefetcher.keep_only(())

    def look(self) -> None:
        """See `Sharer`."""
        self._look()

    # -- callers' side ------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queues a request. Raises QueueFullError."""
        newcomer = not self.queue.waiting_of(request.queued.tenant)
        self.queue.push(request.queued)
        self._newcomer |= newcomer
        if request.trie is not self._weighed:
            self._weighed = request.trie
            self._cache.policy.observe_compute_time(request.trie, self._cost.compute_s)
        request.enqueue()
        self._enter(request)
        request.arrived()

    def requests_of(self, tenant: str) -> tuple[int, int]:
        """How many of a tenant's requests (sequences) wait, and how many run."""
        return self.queue.waiting_of(tenant), sum(each.queued.tenant == tenant for each in self.running.values())

    async def look_in_store(self, request: Request) -> None:
        """Has the trie know what a shared store has of a request's prompt, before it is queued.

        Its answer is waited for no longer than a twelfth of what computing the prompt takes.
        """
        remote = self._mover.remote
        if remote is None or not self._caching or not request.usable_blocks:
            return
        compute_s = self._cost.compute_s(request.prompt_tokens)
        wait_s = remote.options.lookup_s if compute_s is None else min(remote.options.lookup_s, _ASKED * compute_s)
        await remote.look(request.trie, request.namespace, request.chain, request.usable_blocks, wait_s)

    def cancel(self, request: Request) -> None:
        """Ends a request that waits or runs; one that has ended already is left alone."""
        if request.id in self.waiting:
            self._withdraw(request, Ended("cancelled"))
        elif request.on_worker:
            self._end_run(request, Ended("cancelled"))
        self._look()

    def _withdraw(self, request: Request, event: Event) -> None:
        self.queue.remove(request.id)
        del self.waiting[request.id]
        self._prefetcher.withdraw(request, event)

    def _end_run(self, request: Request, event: Event) -> None:
        """Has the worker end a request; the first event that its caller is to get stays."""
        if request.state is RequestState.CANCELLING:
            return
        told = request.state is RequestState.PREEMPTING or request.id in self._interrupted
        request.cancel(event)
        if not told:
            self._send(Cancel(request.id))

    def _end_some(self, error: PrefixdError) -> bool:
        """Ends waiting requests, as many as one callback may; returns whether more wait."""
        for request in list(islice(self.waiting.values(), _ENDED_AT_ONCE)):
            self._withdraw(request, error)
        self._look()
        return bool(self.waiting)

    def _claims(self) -> Iterator[Claim]:
        """The frames that only a running request has. What requests hold are holds of their own."""
        for request in [*self.running.values(), *self._interrupted.values()]:
            yield request.trie, request.rows[:0], list(request.footprint.own)

    # -- the worker's side --------------------------------------------------------------------------------------

    def on_ready(self) -> None:
        """The worker takes requests."""
        self._ready = True
        self._look()

    def on_step(self, step: Step) -> None:
        """Results of one forward pass."""
        self.kv = step.kv
        self.passes += step.passes
        self.proposed_tokens += step.proposed_tokens
        self.accepted_tokens += step.accepted_tokens
        searches = [request for request in self.running.values() if request.sampling.beams]
        searched = sum(request.places for request in searches)
        for search in searches:  # it tells of nothing before its end
            self.queue.charge(search.queued.tenant, search.places * step.passes)
        asked = step.computed_tokens - step.proposed_tokens
        if asked > 2 * step.passes * (len(step.updates) + searched):  # mostly prefill: what a cached prefix saves
            self._cost.observe_compute(step.computed_tokens, step.elapsed_s, step.context_tokens)
        for update in step.updates:
            request = self.running.get(update.id)
            if request is None:
                continue
            if update.tokens:
                self.queue.charge(request.queued.tenant, len(update.tokens))
                refuse(self._cache, request)
                request.append(np.array(update.tokens, "<u4").tobytes())
                if request.first_token_s is None:
                    request.first_token_s = self._clock()
                    self.loader.judge(request)
                if request.on_worker:
                    request.events.put_nowait(NewTokens(update.tokens, update.logprobs))
            filled_tokens = update.filled_blocks * request.trie.block_tokens
            # The last token that was sampled is in no memory yet.
            request.run.computed_tokens = request.chain.tokens - 1 if update.tokens else filled_tokens
            self.recorder.record(request, update.filled_blocks)
            if request.image_holds is not None:
                request.footprint.give(request.image_holds.filled())
            self.states.stepped(request, update.kept)
            self.recorder.let_go_of_passed(request)
            self._want_frame(request)
        self._look()

    def on_done(self, done: Done) -> None:
        """A request ended; nothing maps its frames any more."""
        request = self.running.pop(done.id, None)
        if request is None:
            return
        self.recorder.computing.pop(request.id, None)
        request.encoded_images += done.encoded_images
        self.encoded_images += done.encoded_images
        self.states.ended(request, done.tail_blocks)
        if request.state is RequestState.WITHDRAWN:
            request.let_go()
        elif request.state is RequestState.PREEMPTING and done.reason == "cancelled":
            computed = self.preemption.let_go(request)
            self._put_back(request)
            if self._share.running():  # else nobody waits for its frames any more
                self.preemption.make_way(request, computed)
        elif done.reason == "no_memory" and request.state is not RequestState.CANCELLING and self.running:
            self._concurrency.shrink(len(self.running), done.detail)
            self._put_back(request)
        elif done.not_finite and self._may_run_uncached(request):
            log.error("request %s: logits are not finite; it is computed again without the cache", request.name)
            request.suspects, request.uncached = request.run.suspects, True
            self._put_back(request)
        else:
            if done.beams:
                refuse(self._cache, request)
            event = _last_event(request, done)
            if done.beams and request.first_token_s is None:
                request.first_token_s = self._clock()
            self.finished += isinstance(event, Ended)
            request.end(event)
            self._share.run_ended()
        self._look()

    def _may_run_uncached(self, request: Request) -> bool:
        """Whether something else than what a run has computed itself may be the reason for its end."""
        return request.state is not RequestState.CANCELLING and (bool(request.run.suspects) or request.run.forked)

    def on_death(self, why: str, gave_up: bool) -> None:
        """The worker is gone; its requests are run again by the next one, if there is one."""
        self._ready = False
        self.kv = KvUsage()
        self._interrupted.update(self.running)
        self.running.clear()
        self.recorder.computing.clear()
        self._share.leave(self)
        self._share.run_ended()
        self._after_death(why, gave_up)

    def _after_death(self, why: str, gave_up: bool) -> None:
        """Puts back or ends what a dead worker ran, and ends what waits if no other worker comes.

        As much as one callback may; nothing is handed over before all of it is done.
        """
        rows = _INTERRUPTED_ROWS
        while self._interrupted and rows > 0:
            request = self._interrupted.pop(next(iter(self._interrupted)))
            rows -= len(request.rows)
            request.attempts += 1
            if request.state is RequestState.WITHDRAWN:
                request.let_go()
            elif request.state is RequestState.CANCELLING:
                request.end(request.outcome)
            elif gave_up or request.attempts >= _ATTEMPTS:
                request.end(UnavailableError(f"the worker died ({why}); send the request again later"))
            else:
                self._put_back(request)
        left = bool(self._interrupted)
        if gave_up and not left:
            left = self._end_some(UnavailableError(f"there is no worker ({why}); the daemon's log says more"))
        if left:
            asyncio.get_running_loop().call_soon(self._after_death, why, gave_up)
        self._look()

    # -- dispatching --------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            self._advance_loads()
            if self._taking and await self._extend_starved():
                await self._dispatch()
            await asyncio.sleep(0)  # others run even if every dispatch asks for the next one

    @property
    def _taking(self) -> bool:
        """Whether there is a worker to give requests to. It may die whenever we wait."""
        return self._ready and not self._stopping and not self._interrupted

    async def _dispatch(self) -> None:
        self._newcomer = False
        self._tracker.refresh()
        of_all = Places(self._concurrency.limit, self._cache.tenants.calling, self.running.values())
        places = max(0, of_all.free)
        ahead = self.look_ahead.requests(self._concurrency.limit)
        quotas = GpuQuotas(self._mover.use, self._cache.tiers.gpu, self._share.running())
        window = self._window(places, places + ahead, quotas)
        beyond = len(window)  # from this place on the GPU tier has no room
        await self._prefetcher.keep_only(window)
        self._budget.begin_round()
        self._image_budget.begin_round()
        for request, refusal in quotas.never:
            self._withdraw(request, refusal)
        frames = self._cache.tiers.frames.lasting
        left = frames - self._share.taken_frames
        full = lacks = coming = False
        for place, request in enumerate(window):
            if not self._taking:
                break
            demanded = place < places  # the worker would run it now
            if demanded and request.state is RequestState.STAGING:
                self._prefetcher.hurry(request)
            if request.state not in _QUEUED or not self._is_current(request):
                continue  # it was cancelled while others ran, or its prefix is on its way up
            if request.most_frames > frames:  # it fitted when it came, and the tier has shrunk since
                self._withdraw(request, _never_fits(request, self._cache.tiers.frames))
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
            left -= self._budget.weigh(request.trie, request.rows, request.wanted)
            left -= weigh_images(request, self._image_budget, caching=self._caching and not request.uncached)
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
            if request.state is RequestState.READY and may_run and not await self._hand_over(request):
                lacks, beyond = True, place + 1
                await self._prefetcher.unstage_all_but(request)
                self._lacks_frames(request)
                break
            coming = coming or (demanded and request.state is RequestState.STAGING)
            handed_over = request.state is RequestState.RUNNING
            if handed_over:
                of_all.take(request)
                if quotas.left_out:
                    self._look()  # others of its tenant may need less beside it: what they share is held now
                if self._newcomer:  # room was made meanwhile, for a second if need be: it may be another one's turn
                    self._look()
                    beyond = place + 1
                    break
            await self._pacer.worked(_REQUEST_ROWS + (_HAND_OVER * request.blocks if handed_over else request.blocks))
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

            runnable = {each.id: self.waiting[each.id] for each in self.queue.window(places, self._clock(), may_run)}
        admitted = self.queue.window(
            n, self._clock(), lambda queued: queued.id in runnable or quotas.admits(self.waiting[queued.id])
        )
        others = [self.waiting[each.id] for each in admitted if each.id not in runnable]
        return [*runnable.values(), *others][:n]

    async def _bring_near(self, window: list[Request], beyond: int, places: int) -> None:
        """The prefetcher's second stage, of the window from the place `beyond` on."""
        self._prefetcher.begin_near(beyond - places)
        for place, request in enumerate(window[beyond:], beyond):
            if not self._taking:
                break
            if request.state is not RequestState.WAITING or self._prefetcher.keep_near(request):
                continue
            near = self._prefetcher.is_near(request)  # then it is held, and looked at anew when its turn is near
            if near or self._is_current(request):
                if not self._prefetcher.bring_near(request, place + 1 - places):
                    break
                await self._pacer.worked(_NEAR_ROWS if near else _REQUEST_ROWS + request.blocks)
        self._prefetcher.end_near()

    async def _keep_place(self, lacks: bool, coming: bool) -> None:
        """Waits in the line of the models for frames that the next request `lacks`, or for its prefix, which is on its
        way up (`coming`); else leaves the line."""
        if not self._share.shared:
            return
        if lacks and self._taking:
            self._share.wait(self)
            await self._share.clear(self)
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._look_again)
        elif not coming:
            self._share.leave(self)

    def _look_again(self) -> None:
        self._retry = None
        self._look()

    def _is_current(self, request: Request) -> bool:
        """Makes sure of what is cached of a waiting request's prefix; False if another request computes more of it now.

        What was found may have gone or come while others ran, so this is asked right before the request is staged.
        """
        if request.state is not RequestState.WAITING or request.uncached:
            return True
        if self._is_computed(request) or (self._caching and embeds_image(request, self.running.values())):
            return False
        return not (self._tracker.verify(request) and self._is_computed(request))

    def _is_computed(self, request: Request) -> bool:
        if request.kv.state_frames:
            return keeps_state(request, self.running.values())
        other = computing_next_block(request, self.recorder.computing.values())
        if other is not None:
            request.fork_of = other.id
        return other is not None

    async def _hand_over(self, request: Request) -> bool:
        """Gives the request to the worker; False when there are no frames for it."""
        if self._prefetcher.grew(request):
            self._prefetcher.unstage(request)
            self._look()
            return True
        if request.namespace.common is not None and self._caching and request.keeps:
            await request.footprint.make_own_rows(request.namespace, request.chain)
            if request.state is not RequestState.READY or not self._taking:  # cancelled, or the worker died, meanwhile
                self._look()
                return True
        cached, kv, images = len(request.rows), request.kv, request.image_holds
        found_images = 0 if images is None else images.found
        keeps = self._caching and request.keeps
        keep = self.states.chosen(request) if kv.state_frames and keeps else []
        wanted = extra = len(keep) + self.states.keeps_tails if kv.state_frames and keeps else 0
        fresh = None
        if extra and request.most_frames + extra * kv.state_frames <= self._cache.tiers.frames.lasting:
            fresh = await take_first(self._cache, request, 1 + extra)
        if fresh is None:  # it runs all the same, and no state is kept of it
            keep, extra = [], 0
            fresh = await take_first(self._cache, request, 1)
        if fresh is None:
            return False
        gone = request.state is not RequestState.READY or not self._taking  # cancelled, or the worker died, meanwhile
        if gone or request.most_frames > self._cache.tiers.frames.lasting:  # or the tier shrinks below what it may need
            self._cache.tiers.compute.free(fresh.all)
            self._look()
            return True
        self._lacking = None
        self._share.leave(self)
        self.queue.serve(request.id)
        del self.waiting[request.id]
        self.running[request.id] = request
        request.turn = self._share.next_turn()
        run = first_run(self._cache, request, fresh, keep, caching=keeps)
        run.suspects = suspects_of(request)
        run.forked = request.kv.plain and request.fork_of in self.running and not request.uncached
        states, resume = run.states, state_to_resume(self._cache, request)
        beside = request.beside
        self.loader.want(request)
        self._prefetcher.hand_over(request, run, fresh.all)
        self.look_ahead.handed_over(bool(self.waiting))
        self.found_images += found_images
        self.preemption.resumed(request, cached)
        if states is not None:
            self.states.handed_over(request)
            self.states.counters.without_room += wanted > states.extra_states
        self.recorder.retain(request, request.rows, 0)
        if cached < run.computes:
            self.recorder.computing[request.id] = request
        request.handed_over_s = request.handed_over_s or self._clock()
        if not request.resumed:
            self._count(request)
        self._send(
            Start(
                id=request.id,
                tokens=request.token_ids,
                generated=request.generated,
                cached_blocks=cached,
                frames=list(run.frames),
                sampling=request.sampling,
                state=None if states is None else states.frames_for_worker(resume),
                fork_of=request.fork_of if run.forked else -1,
                images=[] if request.images is None else request.images.for_worker(request.namespace),
                image_frames=[] if images is None else images.claim_frames(fresh.of_images),
            )
        )
        if beside is not None:
            self.loader.load_beside(request, beside)
            self._look()
        return True

    def _frames_of_parts(self, sizes: Sequence[int]) -> int:
        tier = self._cache.tiers.gpu
        return tier.footprint(sizes) // tier.frame_bytes

    def _count(self, request: Request) -> None:
        # What turned out damaged or did not fit is not in `rows`, and was no hit.
        tiers = request.hit_tiers[: len(request.rows)]
        found = (np.bincount(tiers, minlength=NONE)[:NONE] * request.trie.block_tokens).tolist()
        request.hit_tokens, request.hit_tiers = found, tiers[:0]
        self._cache.counters.asked_tokens += request.prompt_tokens
        if request.images is not None:
            self.asked_images += len(request.images.images)
        for tier, hits in enumerate(found):
            self._cache.counters.hit_tokens[tier] += hits

    # -- while a request runs -----------------------------------------------------------------------------------

    def _advance_loads(self) -> None:
        """Loads on beside the requests that compute, and tells the worker of what has come when both meet."""
        for request, arrived in self.loader.advance():
            if arrived is not None:
                self._send(arrived)
            self._want_frame(request)

    def _want_frame(self, request: Request) -> None:
        """Asks for the next frames a block ahead of need."""
        if request.sampling.beams:
            return  # it has frames for all of its search
        left = request.sampling.max_tokens - request.generated
        if left > 0 and request.state is RequestState.RUNNING and request.wanted_blocks > request.run.blocks:
            request.starve()

    async def _extend_starved(self) -> bool:
        """Gives frames to those that run and need them; False when one gets none: then no other gets any."""
        for request in self.preemption.in_rank(self.running.values()):
            if not self._starves(request):
                continue  # it has its frames, or ended while the others got theirs
            blocks = request.wanted_blocks - request.run.blocks
            near = request.run.frames[-request.run.slots :]
            tenant = self._mover.use.tenant_of(request.namespace)
            frames = await self._mover.slots.take_frames(blocks, request.kv.block_widths, tenant=tenant, near=near)
            if not self._starves(request):
                if frames:
                    self._cache.tiers.compute.free(frames)
            elif frames is None:
                await self._prefetcher.unstage_all_but(request)
                await self._share.unstage_others(self)
                self._preempt()
                self._lacks_frames(request)
                return False
            else:
                self._lacking = None
                request.extend(frames)
                self._send(Extend(request.id, frames))
        return True

    def _starves(self, request: Request) -> bool:
        return request.state is RequestState.STARVED and request.id in self.running

    def _preempt(self) -> None:
        """Frees frames by taking a request back from the worker, unless frames are about to be free."""
        request = self.preemption.choose(self._share.running())
        if request is not None:
            self._share.take_back(request)

    def _lacks_frames(self, request: Request) -> None:
        """Ends a request that has lacked frames for long though nobody else runs: none will become free for it."""
        others = [other for other in self._share.running() if other is not request]
        if others or self._share.moving or request.state not in (RequestState.READY, RequestState.STARVED):
            self._lacking = None
        elif self._lacking is None or self._lacking[0] != request.id:
            self._lacking = request.id, self._clock()
        elif self._clock() - self._lacking[1] >= _PATIENCE_S:
            self._lacking = None
            named = name_holders(self._cache, owners=len(self._cache.tenants) == 1)  # names that tenants have chosen
            error = ExhaustedError(
                f"the gpu tier had no frame for the request for {_PATIENCE_S:g} s, though no other runs: "
                f"{named}; unpin blocks, end who holds them, or make the tiers larger"
            )
            if request.on_worker:
                self._end_run(request, error)
            else:
                self._withdraw(request, error)

    # -- after --------------------------------------------------------------------------------------------------

    def _put_back(self, request: Request) -> None:
        request.put_back()
        self.resumed += 1
        self.queue.readmit(request.queued)
        self._enter(request)

    def _enter(self, request: Request) -> None:
        self.waiting[request.id] = request
        self._tracker.add(request)
        self._look()

    def _look(self) -> None:
        if self.waiting or self.running or self._interrupted:
            self._idle.clear()
        else:
            self._idle.set()
        self._wake.set()


def _never_fits(request: Request, pool: FramePool) -> ExhaustedError:
    tokens, frame_bytes = request.most_blocks * request.trie.block_tokens, pool.frame_bytes
    return ExhaustedError(
        f"prompt and output, up to {tokens} tokens, need up to {request.most_frames * frame_bytes} bytes of the GPU "
        f"tier, which was resized to {pool.lasting * frame_bytes}; shorten the prompt, lower max_tokens or resize the "
        "tier"
    )


def _last_event(request: Request, done: Done) -> Event:
    """What the caller is told of a run that has ended and is not repeated."""
    if request.state is RequestState.CANCELLING and (
        done.reason == "no_memory" or isinstance(request.outcome, Exception)
    ):
        return request.outcome
    if done.reason == "no_memory":
        return ExhaustedError(f"the worker has no memory for the request: {done.detail}")
    if done.reason == "error":
        return UnavailableError(f"the worker could not run the request: {done.detail}")
    return Ended(done.reason, done.beams)
