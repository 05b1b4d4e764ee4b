"""Gives a request to the worker: its run begins with its cached prefix and with frames for what it computes first."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache import TieredCache
from prefixd.cache.index.trie import NO_SLOT, Rows
from prefixd.cache.prompt_listeners import Lookup
from prefixd.observability.actor import acting
from prefixd.observability.request_record import StageName
from prefixd.serving.dispatch.block_recorder import Recorder
from prefixd.serving.dispatch.capacity.preemption import Preemption
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.staging.prefetcher import Prefetcher
from prefixd.serving.images.image_kv import ImageHolds
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.serving.request.worker_run import Run, RunStates, Suspect
from prefixd.worker_protocol.protocol import Expect, Start


class HandOver:
    """Hands requests that are READY over to the worker.

    Args:
        context: the dispatcher's.
        prefetcher: has staged the requests.
        recorder: enters what they compute into the cache.
        preemption: counts what preempted requests compute again.
    """

    def __init__(
        self, context: DispatchContext, prefetcher: Prefetcher, recorder: Recorder, preemption: Preemption
    ) -> None:
        self._context = context
        self._cache = context.cache
        self._requests = context.requests
        self._prefetcher = prefetcher
        self._loader = prefetcher.loader
        self._recorder = recorder
        self._states = recorder.states
        self._preemption = preemption

    async def hand_over(self, request: Request) -> bool:
        """Gives a request to the worker, unless it has ended or has to be staged again because more of its prefix is
        cached by now. Returns False if there are no frames for it."""
        with acting(request.record.id):
            return await self._hand_over(request)

    async def _hand_over(self, request: Request) -> bool:
        if self._prefetcher.grew(request):
            self._prefetcher.unstage(request)
            self._requests.wake()
            return True
        if not self._may_start(request):
            return True  # the load of its last layers has failed: it is staged again
        keeps = self._context.caching and request.keeps
        if request.namespace.common is not None and keeps:
            await request.footprint.make_own_rows(request.namespace, request.chain)
            if not self._may_start(request):
                self._requests.wake()
                return True
        if request.image_holds is not None:
            request.image_holds.need(len(request.rows) * request.trie.block_tokens)
        keep = self._states.choose(request) if request.kv.state_frames and keeps else []
        wanted = len(keep) + self._states.keeps_tails if request.kv.state_frames and keeps else 0
        fresh = None
        most = request.most_frames + wanted * request.kv.state_frames
        if wanted and await self._cache.mover.slots.has_frames(most):
            fresh = await take_first_frames(self._cache, request, 1 + wanted)
        if fresh is None:  # it runs all the same, and none of its states is kept
            keep = []
            fresh = await take_first_frames(self._cache, request, 1)
        if fresh is None:
            return False
        # Meanwhile it was cancelled, the worker died, or the tier shrinks below the frames that it may need.
        if not self._may_start(request) or request.most_frames > self._cache.tiers.frames.lasting:
            self._cache.tiers.compute.free(fresh.all)
            self._requests.wake()
            return True
        run = make_run(self._cache, request, fresh, keep, caching=keeps)
        self._start(request, run, fresh)
        if run.states is not None:
            self._states.counters.without_room += wanted > run.states.extra_states
        return True

    def expect(self, request: Request) -> None:
        """Tells the worker the frames of a READY request that waits for a place; again only when they have changed."""
        if not request.kv.mapped_ahead or not len(request.rows) or not self._requests.taking:
            return
        frames = held_frames(self._cache, request)
        if not np.array_equal(frames, request.expected_frames):
            request.expected_frames = frames
            self._context.send(Expect(frames.tolist()))

    def _may_start(self, request: Request) -> bool:
        if request.state is not RequestState.READY or not self._requests.taking:
            return False
        layers = request.footprint.by_layers
        return layers is None or not layers.failed

    def _start(self, request: Request, run: Run, fresh: FirstFrames) -> None:
        context, rows, images = self._context, request.rows, request.image_holds
        context.share.leave(context.member)
        self._requests.start(request)
        request.turn = context.share.next_turn()
        run.suspects = _suspects_of(request, rows, images)
        run.forked = request.kv.plain and request.fork_of in self._requests.running and not request.uncached
        context.counters.found_images += 0 if images is None else images.found
        beside = request.beside
        self._loader.planner.note_turn(request)
        self._prefetcher.hand_over(request, run, fresh.all)
        context.look_ahead.handed_over(bool(self._requests.waiting))
        self._preemption.resumed(request, len(rows))
        if run.states is not None:
            self._states.count_resumed(request)
        self._recorder.begin(request)
        now_s, record = context.clock(), request.record
        request.handed_over_s = request.handed_over_s or now_s
        record.handed_over_s = record.handed_over_s or now_s
        if not request.resumed:
            self._count_hits(request, len(rows))
            record.altered_blocks = max(record.altered_blocks, request.trie.count_decoded(rows))
            if len(rows):
                request.trie.hits[rows[-1]] += 1
        computed = request.chain.tokens - len(rows) * request.trie.block_tokens
        request.enter_phase(StageName.PREFILL, now_s, computed_tokens=computed)
        record.wait_for(None, now_s)
        context.send(
            Start(
                id=request.id,
                tokens=request.token_ids,
                generated=request.generated,
                cached_blocks=len(rows),
                loading=request.footprint.by_layers is not None and request.footprint.by_layers.under_way,
                frames=list(run.frames),
                sampling=request.sampling,
                state=None if run.states is None else run.states.frames_for_worker(),
                fork_of=request.fork_of if run.forked else -1,
                images=[] if request.images is None else request.images.for_worker(request.namespace),
                image_frames=[] if images is None else images.claim_frames(fresh.of_images),
            )
        )
        self._loader.hand_over(request)
        if beside is not None:
            self._loader.load_beside(request, beside)
            self._requests.wake()

    def _count_hits(self, request: Request, blocks: int) -> None:
        # A block that was damaged or did not fit is not in `rows`, so it is no hit.
        tiers, counters = request.hit_tiers[:blocks], self._cache.counters
        who = request.record.tenant, request.record.model
        counters.ask(who, request.prompt_tokens)
        found = counters.find(who, tiers, request.trie.block_tokens)
        request.hit_tokens, request.hit_tiers = found, tiers[:0]
        if (
            request.record.hit_tokens is None
        ):  # of the call's first sequence that runs; a load beside the run adds to it
            request.record.hit_tokens = found
        self._cache.prompts.tell_asked(
            request.namespace,
            request.chain,
            Lookup(request.prompt_tokens, request.prompt_tokens // request.trie.block_tokens, blocks),
        )
        if request.images is not None:
            self._context.counters.asked_images += len(request.images.images)


@dataclass(frozen=True, slots=True)
class FirstFrames:
    """The frames that a run gets at its start.

    Attributes:
        of_images: for the images that the worker computes.
        of_blocks: for the first blocks behind the cached ones.
        of_states: for the run's own state, then for the states that are kept.
    """

    of_images: list[int]
    of_blocks: list[int]
    of_states: list[int]

    @property
    def all(self) -> list[int]:
        """All of them."""
        return [*self.of_images, *self.of_blocks, *self.of_states]


async def take_first_frames(cache: TieredCache, request: Request, states: int) -> FirstFrames | None:
    """Takes the first frames of a READY request, among them those of `states` states; None if too few are free."""
    kv, images = request.kv, request.image_holds
    tenant = cache.mover.use.tenant_of(request.namespace)
    rows = request.rows
    near = request.trie.slots[rows[-1:], cache.tiers.compute.level, : len(kv.block_widths)].ravel().tolist()
    wants = [
        (0, ()) if images is None else (images.missing_blocks, (images.kv.width,)),
        (request.first_blocks - len(rows), kv.block_widths),
        (states, kv.state_widths),
    ]
    beside = [count * sum(widths) for count, widths in wants]
    taken: list[list[int]] = []
    with cache.mover.working():  # until this returns, no owner counts these frames
        try:
            for number, (count, widths) in enumerate(wants):
                hint = near if number == 1 else ()
                frames = await cache.mover.slots.take_frames(
                    *(count, widths), tenant=tenant, near=hint, beside=sum(beside[number + 1 :])
                )
                if frames is None:
                    break
                taken.append(frames)
        finally:
            if len(taken) < len(wants):
                cache.tiers.compute.free(itertools.chain(*taken))
    return FirstFrames(*taken) if len(taken) == len(wants) else None


def held_frames(cache: TieredCache, request: Request) -> npt.NDArray[np.int64]:
    """The frames of a READY request's cached blocks, block by block; -1 for those that it does not hold."""
    trie, parts, wanted = request.trie, len(request.kv.block_widths), request.wanted
    held = trie.slots[request.rows, cache.tiers.compute.level, :parts]
    if wanted is not None:
        held = np.where((wanted[:, None] & trie.part_mask[:parts]) != 0, held, NO_SLOT)
    frames = held.astype(np.int64)
    if (layers := request.footprint.by_layers) is not None:
        layers.place(frames)
    return frames.ravel()


def make_run(cache: TieredCache, request: Request, fresh: FirstFrames, keep: list[int], *, caching: bool) -> Run:
    """The run of a READY request with these frames.

    Its cached blocks keep the frames that the request holds. -1 stands for those that it does not hold: they may be
    evicted while it runs.

    keep: for each state that is kept, the number of blocks before it.
    """
    widths = request.kv.block_widths
    states = _make_run_states(request, fresh.of_states, keep)
    if states is not None:
        last = request.trie.slots[request.rows[-1:], cache.tiers.compute.level]
        states.resume = last[:, len(widths) :].ravel().tolist()
    frames = [*held_frames(cache, request).tolist(), *fresh.of_blocks]
    return Run(frames, request.usable_blocks if caching else 0, caching, widths, states)


def _make_run_states(request: Request, slots: list[int], keep: list[int]) -> RunStates | None:
    """Distributes slots among a run's states: its own, those to be kept, and the tail if a state's slots are left."""
    kv = request.kv
    if not kv.state_frames:
        return None
    size = len(kv.state_widths)
    states = [slots[start : start + size] for start in range(0, len(slots), size)]
    own, kept, tail = states[0], states[1 : 1 + len(keep)], states[1 + len(keep) :]
    return RunStates(own, dict(zip(keep, kept, strict=True)), tail[0] if tail else [], frames=kv.state_frames)


def _suspects_of(request: Request, rows: Rows, images: ImageHolds | None) -> list[Suspect]:
    """The first block of each prefix that a request holds, or will load, when it is handed over.

    No token can be chosen from logits that are not finite. If the run used cached blocks, or copied from another run,
    these may be damaged: the request runs again without the cache and leaves nothing there. If it gets a token then,
    the blocks were damaged, and are refused (`RefusedBlocks`). If not, the model is at fault, and the blocks stay.
    """
    behind = () if request.beside is None else request.beside.rows[:1].tolist()
    found = [(request.trie, row) for row in rows[:1].tolist() or behind]
    if images is not None:
        found += [(images.kv.trie, row) for row in images.first_rows]
    return [Suspect(trie, row, int(trie.generation[row])) for trie, row in found]
