"""The window: the next requests in the policy's order, as many as the GPU tier has frames for, and some behind them.

A round stages the requests of the window and hands over those that are ready. A request that leaves the window loses
its hold; its blocks stay cached.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from prefixd.base.errors import ExhaustedError
from prefixd.observability.request_record import Wait
from prefixd.serving.dispatch.block_recorder import Recorder
from prefixd.serving.dispatch.capacity.concurrency import ConcurrencyLimit
from prefixd.serving.dispatch.capacity.frame_supply import FrameSupply
from prefixd.serving.dispatch.capacity.passed import PassedRequests
from prefixd.serving.dispatch.capacity.places import GpuQuotas, Places
from prefixd.serving.dispatch.capacity.preemption import Preemption
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.endings import Endings
from prefixd.serving.dispatch.hand_over import HandOver
from prefixd.serving.dispatch.staging.computed_by_others import computing_next_block, embeds_image, keeps_state
from prefixd.serving.dispatch.staging.prefetcher import Prefetcher
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.images.image_kv import NO_ROWS
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd_scheduler import QueuedRequest
from prefixd_swap import FramePool

# Costs for the pacer, in rows looked at:
_REQUEST_ROWS = 64  # of a request, besides its rows
_NEAR_ROWS = 16  # of a request whose prefix the CPU tier holds already
_HAND_OVER_ROWS = 4  # of each block that is handed over
_RETRY_S = 0.02
_QUEUED = (RequestState.WAITING, RequestState.STAGING, RequestState.READY)


@dataclass(slots=True)
class _Round:
    """One pass over the window.

    Attributes:
        window: the requests, the next one first.
        places: how many of them could run now.
        running: the places taken, and those kept for other tenants.
        quotas: how many bytes the tenants' runs may need.
        left: frames that no request has.
        beyond: index in the window from which on the GPU tier has no room.
        full: a request waits for more places than are free; those behind it wait, too.
        lacks: the next request lacks frames.
        coming: the prefix of the next request is on its way up.
        needed: frames of the tier with which a request that lacks some could run now; 0: none lacks any.
    """

    window: list[Request]
    places: int
    running: Places
    quotas: GpuQuotas
    left: int
    beyond: int
    full: bool = False
    lacks: bool = False
    coming: bool = False
    needed: int = 0


class DispatchWindow:
    """Stages the requests that are next and hands them over.

    Args:
        context: the dispatcher's.
        tracker: watches the cached prefixes of waiting requests.
        prefetcher: brings the prefixes up.
        recorder: knows which requests compute blocks of their prompts.
        preemption: decides which preempted requests have to wait.
        concurrency: limits how many requests run at once.
        supply: ends a request that lacks frames though no other runs.
        hand_over: gives a request to the worker.
        endings: ends requests that never fit.

    Attributes:
        newcomer: since the last round began, a tenant with no waiting request has queued one.
    """

    def __init__(
        self,
        context: DispatchContext,
        tracker: PrefixTracker,
        prefetcher: Prefetcher,
        recorder: Recorder,
        preemption: Preemption,
        concurrency: ConcurrencyLimit,
        supply: FrameSupply,
        hand_over: HandOver,
        endings: Endings,
    ) -> None:
        self.newcomer = False
        self._context = context
        self._cache = context.cache
        self._requests = context.requests
        self._share = context.share
        self._tracker = tracker
        self._prefetcher = prefetcher
        self._recorder = recorder
        self._preemption = preemption
        self._concurrency = concurrency
        self._supply = supply
        self._hand_over = hand_over
        self._endings = endings
        self._passed = PassedRequests(context, tracker, supply)
        self._retry: asyncio.TimerHandle | None = None  # the next look of a model that waits in line

    async def dispatch(self) -> None:
        """One round: stages requests while there is room, hands over the ready ones, and brings the prefixes of the
        requests behind them to the CPU tier."""
        self.newcomer = False
        if not self._requests.waiting:
            self._share.leave(self._context.member)
            self._share.need(self._context.member, 0)
            return
        self._tracker.refresh()
        tenants = self._cache.tenants.calling
        running = Places(self._concurrency.limit, tenants, self._requests.running.values())
        places = max(0, running.free)
        ahead = self._context.look_ahead.requests(self._concurrency.limit)
        quotas = GpuQuotas(self._cache.mover.use, self._cache.tiers.gpu, self._share.running())
        self._passed.begin_round(quotas)
        window = self._choose(places, places + ahead, quotas)
        await self._prefetcher.keep_only(window)
        self._context.budget.begin_round()
        self._context.image_budget.begin_round()
        for request, refusal in quotas.never:
            self._endings.end_waiting(request, refusal)
        left = self._cache.tiers.frames.lasting - self._share.taken_frames
        current = _Round(window, places, running, quotas, left, len(window))
        for place, request in enumerate(window):
            if not self._requests.taking or not await self._serve(current, place, request):
                break
        if self._requests.taking:  # else the worker has died meanwhile, and no frame would help
            lacking, begins = self._passed.end_round()
            needed = max(current.needed, quotas.needed_frames if places else 0, lacking)
            self._share.need(self._context.member, needed, begins)
        await self._keep_place(current)
        await self._bring_near(window if ahead else [], current.beyond, places)

    async def _serve(self, current: _Round, place: int, request: Request) -> bool:
        """Stages a request of the window, or hands it over; False when the round ends with it."""
        demanded = place < current.places  # the worker would run it now
        if demanded and request.state is RequestState.STAGING:
            self._prefetcher.hurry(request)
        if request.state not in _QUEUED or not self._is_current(request):
            request.record.wait_for(Wait.OTHER, self._context.clock())
            return True  # it was cancelled meanwhile, or another request computes its prefix now
        frames = self._cache.tiers.frames
        if request.most_frames > frames.attainable:  # it fitted when it came; the tier has shrunk since
            self._endings.end_waiting(request, _never_fits(request, frames))
            return True
        if self._preemption.must_wait(request):
            request.record.wait_for(Wait.PREEMPTED, self._context.clock())
            current.beyond = place
            await self._prefetcher.unstage_ready(current.window[place:])
            return False
        may_hand_over = self._share.may_hand_over(self._context.member)
        current.left -= self._weigh(request) if may_hand_over else 0
        too_small = request.most_frames > frames.lasting  # the tier grows before the request may run
        if not may_hand_over or current.left < 0 or too_small:
            current.lacks, current.beyond = demanded, place
            request.record.wait_for(Wait.MEMORY if demanded else Wait.PLACES, self._context.clock())
            if may_hand_over and demanded:
                current.needed = max(request.most_frames, frames.lasting - current.left)
            await self._prefetcher.unstage_ready(current.window[place:])
            return False
        if request.state is RequestState.WAITING and (demanded or self._prefetcher.may_bring_ahead(request)):
            self._prefetcher.stage(request, demanded=demanded, places=place + 1 - current.places)
        # The next request waits until the places that it needs are free; requests that need fewer do not pass it. If
        # the free places are kept for other tenants, requests of these pass it.
        must_wait = current.running.must_wait(request)
        current.full = current.full or not (must_wait or current.running.has_room_for(request))
        may_run = not (current.full or must_wait)
        self._note_wait(current, request, demanded=demanded, must_wait=must_wait)
        if request.state is RequestState.READY and may_run and not await self._hand_over.hand_over(request):
            current.lacks, current.beyond = True, place + 1
            request.record.wait_for(Wait.MEMORY, self._context.clock())
            await self._prefetcher.unstage_all_but(request)
            self._supply.note_lack(request)
            return False
        if request.state is RequestState.READY and not may_run:
            self._hand_over.expect(request)
        current.coming = current.coming or (demanded and request.state is RequestState.STAGING)
        handed_over = request.state is RequestState.RUNNING
        if handed_over:
            self._supply.note_success()
            current.running.add(request)
            if current.quotas.left_out:
                self._requests.wake()  # others of its tenant may need less now: the blocks that they share are held
            if self.newcomer:  # making room may have taken a second: it may be another tenant's turn now
                self._requests.wake()
                current.beyond = place + 1
                return False
        blocks = request.blocks
        await self._context.pacer.worked(_REQUEST_ROWS + (_HAND_OVER_ROWS * blocks if handed_over else blocks))
        return True

    def _note_wait(self, current: _Round, request: Request, *, demanded: bool, must_wait: bool) -> None:
        """Notes in a request's record why it is not handed over now, if it is not."""
        reason = Wait.LOAD
        if must_wait and current.running.has_room_for(request):
            reason = Wait.TENANT
        elif must_wait or current.full or not demanded:
            reason = Wait.PLACES
        request.record.wait_for(reason, self._context.clock())

    def _weigh(self, request: Request) -> int:
        """Frames that a waiting request takes beyond those taken or weighed in this round."""
        frames = request.first_frames + self._context.budget.weigh(request.trie, request.rows, request.wanted)
        caching = self._context.caching and not request.uncached
        return frames + _weigh_images(request, self._context.image_budget, caching=caching)

    def _choose(self, places: int, n: int, quotas: GpuQuotas) -> list[Request]:
        """The next `n` requests, first those that could run now in the `places` that are free.

        In the queue's order, many requests of a tenant that has to leave places to others may come before the first
        request of another tenant.
        """
        queue, waiting, now_s = self._requests.queue, self._requests.waiting, self._context.clock()
        passes = self._passed.passes
        tenants = self._cache.tenants.calling
        runnable: dict[int, Request] = {}
        if tenants > 1 and places:
            trial = Places(self._concurrency.limit, tenants, self._requests.running.values())

            def may_run(queued: QueuedRequest) -> bool:
                request = waiting[queued.id]
                if trial.must_wait(request) or not quotas.admits(request):
                    return False
                trial.add(request)
                return True

            runnable = {each.id: waiting[each.id] for each in queue.window(places, now_s, may_run, passes)}

        def admits(queued: QueuedRequest) -> bool:
            if queued.id in runnable or quotas.admits(waiting[queued.id]):
                return True
            waiting[queued.id].record.wait_for(Wait.TENANT, now_s)
            return False

        admitted = queue.window(n, now_s, admits, passes)
        others = [waiting[each.id] for each in admitted if each.id not in runnable]
        return [*runnable.values(), *others][:n]

    async def _bring_near(self, window: list[Request], beyond: int, places: int) -> None:
        """The prefetcher's second stage, of the window from the place `beyond` on."""
        stage, until_turn_s = self._prefetcher.cpu_stage, self._context.look_ahead.until_turn_s
        if beyond >= len(window) and not len(stage):
            return
        stage.begin_round(until_turn_s(beyond - places))
        for place, request in enumerate(window[beyond:], beyond):
            if not self._requests.taking:
                break
            if request.state is not RequestState.WAITING or stage.keep(request):
                continue
            near = request in stage  # its prefix is held already, and verified when its turn is near
            if near or self._is_current(request):
                due_s = self._context.clock() + until_turn_s(place + 1 - places)
                if not stage.add(request, due_s=due_s, may_read=self._prefetcher.may_bring_ahead(request)):
                    break
                await self._context.pacer.worked(_NEAR_ROWS if near else _REQUEST_ROWS + request.blocks)
        stage.end_round()

    async def _keep_place(self, current: _Round) -> None:
        """Enters the models' line if the next request lacks frames; leaves the line unless its prefix is on its way
        up."""
        if not self._share.shared:
            return
        member = self._context.member
        if current.lacks and self._requests.taking:
            self._share.wait(member)
            await self._share.clear(member)
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._wake_again)
        elif not current.coming:
            self._share.leave(member)

    def _wake_again(self) -> None:
        self._retry = None
        self._requests.wake()

    def _is_current(self, request: Request) -> bool:
        """Verifies the cached prefix of a waiting request; False if another request computes more of it now.

        Blocks may have come or gone while other tasks ran, so this is called right before the request is staged.
        """
        if request.state is not RequestState.WAITING or request.uncached:
            return True
        if self._is_being_computed(request) or (
            request.image_kv is not None
            and self._context.caching
            and embeds_image(request, self._requests.running.values())
        ):
            return False
        return not (self._tracker.verify(request) and self._is_being_computed(request))

    def _is_being_computed(self, request: Request) -> bool:
        if request.kv.state_frames:
            return keeps_state(request, self._requests.running.values())
        if not self._recorder.computing:
            return False
        other = computing_next_block(request, self._recorder.computing.values())
        if other is not None:
            request.fork_of = other.id
        return other is not None


def _weigh_images(request: Request, budget: FrameBudget, *, caching: bool) -> int:
    """Frames that a queued request takes for its images, beyond those taken or weighed in this round."""
    kv, holds = request.image_kv, request.image_holds
    if kv is None:
        return 0
    if holds is not None:
        return holds.missing_blocks * kv.width + budget.weigh(kv.trie, holds.held)
    needed = kv.needed(len(request.rows) * request.trie.block_tokens)
    found = {digest: kv.find(digest) if caching else NO_ROWS for digest in needed}
    missing = sum(kv.size(digest) for digest, rows in found.items() if not len(rows))
    return missing + budget.weigh(kv.trie, np.concatenate([NO_ROWS, *found.values()]))


def _never_fits(request: Request, pool: FramePool) -> ExhaustedError:
    tokens, frame_bytes = request.most_blocks * request.trie.block_tokens, pool.frame_bytes
    return ExhaustedError(
        f"prompt and output, up to {tokens} tokens, need up to {request.most_frames * frame_bytes} bytes of the GPU "
        f"tier, which was resized to {pool.lasting * frame_bytes}; shorten the prompt, lower max_tokens or resize the "
        "tier"
    )
