"""Handles the worker's messages about requests: the results of a step, the end of a run; and the worker's death."""

from __future__ import annotations

import asyncio
import logging

import numpy as np

from prefixd.base.errors import ExhaustedError, UnavailableError
from prefixd.observability.request_record import StageName, Wait
from prefixd.serving.dispatch.block_recorder import Recorder
from prefixd.serving.dispatch.capacity.concurrency import ConcurrencyLimit
from prefixd.serving.dispatch.capacity.frame_supply import FrameSupply
from prefixd.serving.dispatch.capacity.preemption import Preemption
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.endings import Endings
from prefixd.serving.dispatch.staging.loader import Loader
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended, Event, NewTokens
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Done, KvUsage, Step, Update

log = logging.getLogger(__name__)

_ATTEMPTS = 3
_INTERRUPTED_ROWS = 16_384  # of requests whose worker died, in one callback


class WorkerResults:
    """Passes generated tokens to callers and filled blocks to the cache, and puts interrupted requests back.

    Args:
        context: the dispatcher's.
        tracker: watches the requests that wait.
        loader: judges its choice once a request has its first token.
        recorder: enters filled blocks into the cache.
        preemption: frees the frames of preempted requests.
        concurrency: lowered when the worker has no memory for a request.
        supply: gives running requests frames.
        endings: ends waiting requests if no other worker comes.

    Attributes:
        kv: the worker's memory after the last step.
    """

    def __init__(
        self,
        context: DispatchContext,
        tracker: PrefixTracker,
        loader: Loader,
        recorder: Recorder,
        preemption: Preemption,
        concurrency: ConcurrencyLimit,
        supply: FrameSupply,
        endings: Endings,
    ) -> None:
        self.kv = KvUsage()
        self._context = context
        self._requests = context.requests
        self._counters = context.counters
        self._tracker = tracker
        self._loader = loader
        self._recorder = recorder
        self._preemption = preemption
        self._concurrency = concurrency
        self._supply = supply
        self._endings = endings
        self._stepped_s = context.clock()

    # -- a step -------------------------------------------------------------------------------------------------

    def on_step(self, step: Step) -> None:
        """Results of one forward pass."""
        self.kv = step.kv
        self._counters.passes += step.passes
        self._counters.read_at_once += step.read_at_once
        self._counters.proposed_tokens += step.proposed_tokens
        self._counters.accepted_tokens += step.accepted_tokens
        self._charge_searches(step)
        continued, model = 0, ""
        for update in step.updates:
            request = self._requests.running.get(update.id)
            if request is not None and self._update(request, update):
                continued, model = continued + 1, request.record.model
        self._note_time_between_tokens(continued, model)
        self._requests.wake()

    def _note_time_between_tokens(self, requests: int, model: str) -> None:
        """Measures the time since the step before, which brought the same requests tokens: once a step, not a token."""
        now_s, before_s = self._context.clock(), self._stepped_s
        self._stepped_s = now_s
        if requests:
            timings = self._context.cache.measurements.timings
            timings.between_tokens_s.observe(now_s - before_s, model, times=requests)

    def _charge_searches(self, step: Step) -> None:
        """Charges beam searches, which report no token before their end; observes the time of a prefill pass."""
        running, queue = self._requests.running, self._requests.queue
        searches = [request for request in running.values() if request.sampling.beam_search is not None]
        searched = sum(request.places for request in searches)
        for search in searches:
            queue.charge(search.queued.tenant, search.places * step.passes)
        if self._observe_encoding(step):
            return
        asked = step.computed_tokens - step.proposed_tokens
        if asked <= 2 * step.passes * (len(step.updates) + searched):
            return  # mostly decoding, which a cached prefix does not save
        if not any(each.id in running and running[each.id].run.by_layers for each in step.updates):
            # A pass that has waited for layers says nothing of computing.
            self._context.cost.observe_compute(step.computed_tokens, step.elapsed_s, step.context_tokens)

    def _observe_encoding(self, step: Step) -> bool:
        """Observes the time of embedding images; False for a step without, or before any computing was observed."""
        images, blocks = self._embedded(step)
        compute_s = self._context.cost.compute_s(step.computed_tokens, step.context_tokens) if images else None
        if compute_s is None:
            return False
        self._context.cost.observe_encode(images, blocks, max(0.0, step.elapsed_s - compute_s))
        return True

    def _embedded(self, step: Step) -> tuple[int, int]:
        """The number of images whose embedding was computed in a step, and of their blocks."""
        found = []
        for update in step.updates:
            request = self._requests.running.get(update.id) if update.images else None
            if request is not None and (kv := request.image_kv) is not None:
                found += [kv.blocks[digest] for digest in {kv.digests[image] for image in update.images}]
        return len(found), sum(found)

    def _update(self, request: Request, update: Update) -> bool:
        """Passes on what a step has brought a request; returns whether it has brought tokens that are not its first."""
        continued = False
        if update.tokens:
            self._requests.queue.charge(request.queued.tenant, len(update.tokens))
            self._refuse_suspects(request)
            request.append(np.array(update.tokens, "<u4").tobytes())
            if request.phase is not None and request.phase.name is StageName.PREFILL:
                self._first_token_of_run(request)
            else:
                continued = True
            if request.on_worker:
                request.events.put_nowait(NewTokens(update.tokens, update.logprobs))
        filled_tokens = update.filled_blocks * request.trie.block_tokens
        # The KV of the last sampled token is not computed yet.
        run = request.run
        run.by_layers = False
        run.computed_tokens = request.chain.tokens - 1 if update.tokens else filled_tokens
        self._recorder.record_step(request, run, update.filled_blocks, update.kept, update.images)
        self._supply.note_need(request)
        return continued

    def _first_token_of_run(self, request: Request) -> None:
        now_s, record = self._context.clock(), request.record
        request.enter_phase(StageName.DECODE, now_s)
        if request.first_token_s is None:
            request.first_token_s = now_s
            record.first_token_s = record.first_token_s or now_s
            self._loader.planner.judge(request)

    # -- the end of a run ---------------------------------------------------------------------------------------

    def on_done(self, done: Done) -> None:
        """A run has ended; the worker maps none of its frames any more."""
        running = self._requests.running
        request = running.pop(done.id, None)
        if request is None:
            return
        request.encoded_images += done.encoded_images
        self._counters.encoded_images += done.encoded_images
        self._recorder.end(request, done.tail_blocks)
        if request.state is RequestState.WITHDRAWN:
            request.let_go()
        elif request.state is RequestState.PREEMPTING and done.reason == "cancelled":
            self._preempted(request)
        elif done.reason == "no_memory" and request.state is not RequestState.CANCELLING and running:
            self._concurrency.shrink(len(running), done.detail)
            request.record.restarts += 1
            self._put_back(request)
        elif done.not_finite and _may_run_uncached(request):
            log.error(
                "request %s: logits are not finite; it is computed again without the cache",
                request.name,
                extra={"request_id": request.name},
            )
            request.suspects, request.uncached = request.run.suspects, True
            self._put_back(request)
        else:
            self._finish(request, done)
        self._requests.wake()

    def _preempted(self, request: Request) -> None:
        """The worker has let go of a request that runs again."""
        request.record.preempted += not request.run.load_failed
        if request.run.load_failed:  # no other request waits for its frames
            self._put_back(request)
            return
        computed = self._preemption.release(request)
        self._put_back(request)
        if self._context.share.running():  # else no running request waits for its frames
            self._preemption.make_way(request, computed)

    def _finish(self, request: Request, done: Done) -> None:
        if done.beams:
            self._refuse_suspects(request)
            if request.first_token_s is None:
                request.first_token_s = self._context.clock()
                request.record.first_token_s = request.first_token_s
        request.enter_phase(None, self._context.clock())
        event = _last_event(request, done)
        self._counters.finished += isinstance(event, Ended)
        request.end(event)
        if isinstance(event, Ended):
            self._context.cache.prompts.tell_answered(
                *(request.namespace, request.chain, request.prompt_tokens, request.generated, request.queued.arrival_s)
            )
        self._context.share.run_ended()

    def _refuse_suspects(self, request: Request) -> None:
        """A request got tokens without the cached blocks that it used before: these were damaged, and are refused."""
        if request.suspects:
            suspects, request.suspects = request.suspects, []
            for suspect in suspects:
                self._context.cache.refused.refuse(suspect.trie, suspect.row, suspect.generation)

    def _put_back(self, request: Request) -> None:
        request.put_back()
        now_s, parked = self._context.clock(), request.record.preempted and self._requests.taking
        request.enter_phase(StageName.QUEUE, now_s, resumed=request.resumed)
        request.record.wait_for(Wait.PREEMPTED if parked else Wait.WORKER, now_s)
        self._counters.resumed += 1
        self._tracker.add(request)
        self._requests.queue.readmit(request.queued)
        self._requests.enter(request)

    # -- the end of the worker ----------------------------------------------------------------------------------

    def on_death(self, why: str, gave_up: bool) -> None:
        """The worker is gone. The next worker, if there is one, runs its requests again."""
        self.kv = KvUsage()
        self._requests.ready = False
        self._requests.interrupt()
        self._recorder.computing.clear()
        self._context.share.leave(self._context.member)
        self._context.share.need(self._context.member, 0)  # without a worker, no frame would help
        self._context.share.run_ended()
        self._after_death(why, gave_up)

    def _after_death(self, why: str, gave_up: bool) -> None:
        """Puts back or ends the requests of a dead worker, and ends the waiting ones if no other worker comes.

        Handles one slice of requests per callback; dispatch pauses until the last.
        """
        rows, interrupted = _INTERRUPTED_ROWS, self._requests.interrupted
        while interrupted and rows > 0:
            request = interrupted.pop(next(iter(interrupted)))
            rows -= len(request.rows)
            request.attempts += 1
            request.record.restarts += 1
            if request.state is RequestState.WITHDRAWN:
                request.let_go()
            elif request.state is RequestState.CANCELLING:
                request.end(request.outcome)
            elif gave_up or request.attempts >= _ATTEMPTS:
                request.end(UnavailableError(f"the worker died ({why}); send the request again later"))
            else:
                self._put_back(request)
        left = bool(interrupted)
        if gave_up and not left:
            error = UnavailableError(f"there is no worker ({why}); the daemon's log says more")
            left = self._endings.end_some_waiting(error)
        if left:
            asyncio.get_running_loop().call_soon(self._after_death, why, gave_up)
        self._requests.wake()


def _may_run_uncached(request: Request) -> bool:
    """Whether blocks that a run did not compute itself may be the reason for logits that are not finite."""
    return request.state is not RequestState.CANCELLING and (bool(request.run.suspects) or request.run.forked)


def _last_event(request: Request, done: Done) -> Event:
    """The last event of a request whose run has ended and is not repeated."""
    if request.state is RequestState.CANCELLING and (
        done.reason == "no_memory" or isinstance(request.outcome, Exception)
    ):
        return request.outcome
    if done.reason == "no_memory":
        return ExhaustedError(f"the worker has no memory for the request: {done.detail}")
    if done.reason == "error":
        return UnavailableError(f"the worker could not run the request: {done.detail}")
    return Ended(done.reason, done.beams)
