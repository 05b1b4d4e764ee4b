"""Loads the cached prefixes of staged requests, as chosen by `LoadPlanner`.

`PieceLoad` loads the front of a prefix before the request runs, `TailLoad` its back while the request runs,
`LayerLoad` the last layers while the request computes the first ones.

A load moves in pieces. If it falls so far behind that computing the rest is faster, it is given up; the beginning that
has arrived is used. A prompt's images are loaded before its prefix; the worker embeds those that are given up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakSet

import numpy as np

from prefixd.base.tiers import Tier
from prefixd.cache import Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.rules import GroupMask
from prefixd.observability.actor import acting
from prefixd.observability.request_record import StageName, Value
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.staging.load_planner import LoadPlanner
from prefixd.serving.images.image_kv import ImageHolds
from prefixd.serving.loading.layer_load import LayerLoad
from prefixd.serving.loading.load_choice import LoadClaims, LoadMeter
from prefixd.serving.loading.piece_load import PieceLoad, piece_blocks
from prefixd.serving.loading.tail_load import TailLoad, TailPlan
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Arrived, Cancel, Layers
from prefixd_swap import SwapError
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

Piece = tuple[Rows, GroupMask | None]
"""Blocks, and the KV groups of each to bring; None: all."""

_RETRY_S = 0.02
_SETBACKS = 8
_LEAST_WAIT_S = 0.002


class Loader:
    """Loads the chosen parts of the prefixes of staged requests.

    Args:
        context: the dispatcher's.
        staged: the staged requests, by id; a withdrawn one is taken out when its load ends.
        unstage: ends the hold of a request, which goes on waiting.
        backlog_s: estimated seconds until the worker has computed the prompts that it has.

    Attributes:
        planner: decides what is loaded.
        counters: the decisions, and the time that they lost.
        claims: blocks that are on their way to the GPU tier.
    """

    def __init__(
        self,
        context: DispatchContext,
        staged: dict[int, Request],
        unstage: Callable[[Request], None],
        backlog_s: Callable[[], float],
    ) -> None:
        self.planner = LoadPlanner(context, backlog_s, self._queued_bytes)
        self.counters = self.planner.counters
        self.claims = LoadClaims()
        self._cache = context.cache
        self._staged = staged
        self._budget = context.budget
        self._cost = context.cost
        self._clock = context.clock
        self._meter = LoadMeter(context.clock)
        self._wake = context.wake
        self._unstage = unstage
        self._mode = context.options.load
        self._under_way: WeakSet[PieceLoad] = WeakSet()
        self._context = context
        self._copies: dict[int, asyncio.Task[None]] = {}
        self._by_layers: set[asyncio.Task[None]] = set()
        self._loads: dict[int, PieceLoad] = {}
        self.beside: dict[int, Request] = {}
        """Running requests beside which a part of their prefixes is loaded."""

    async def stop(self) -> None:
        """Waits for the copies under way."""
        await asyncio.gather(*self._copies.values(), *self._by_layers, return_exceptions=True)

    # -- before the request runs ------------------------------------------------------------------------------------

    def start(self, request: Request, urgency: Urgency, due_s: float | None = None) -> None:
        """Starts to bring up the blocks that a STAGING request lacks. `due_s`: when its turn comes."""
        with acting(request.record.id):
            self._start(request, urgency, due_s)

    def _start(self, request: Request, urgency: Urgency, due_s: float | None) -> None:
        self._note_begin(request, urgency)
        if urgency is Urgency.DEMAND and (layers := self._layer_load(request)) is not None:
            request.footprint.by_layers = layers
            task = asyncio.create_task(self._bring_layers(request, layers))
            self._by_layers.add(task)
            task.add_done_callback(self._by_layers.discard)
            return
        self._copies[request.id] = asyncio.create_task(self._bring(request, urgency, due_s))

    def _note_begin(self, request: Request, urgency: Urgency) -> None:
        """Begins the stage LOAD of a request's record."""
        trie, rows = request.trie, request.rows
        lacking = trie.lacking(rows, self._cache.tiers.compute.level, request.wanted)
        request.load_stage = request.record.begin(
            StageName.LOAD,
            self._clock(),
            tier=Tier(int(trie.distances(rows).max(initial=0))).label,
            blocks=int(np.count_nonzero(lacking)),
            bytes=int(trie.group_bytes[lacking].sum()),
            urgency="demand" if urgency is Urgency.DEMAND else "prefetch",
        )

    def _note_end(self, request: Request, outcome: str, **attributes: Value) -> None:
        stage, request.load_stage = request.load_stage, None
        if stage is not None:
            stage.end(self._clock(), outcome=outcome, **attributes)

    def hurry(self, request: Request) -> None:
        """The turn of a request has come while its prefix is on its way: makes the load urgent."""
        self.planner.note_turn(request)
        if (load := self._loads.get(request.id)) is not None:
            load.hurry()

    async def _bring(self, request: Request, urgency: Urgency, due_s: float | None) -> None:
        there, late = 0, False
        try:
            compute = self._cache.tiers.compute
            if (images := request.image_holds) is not None:
                urgency = await self._bring_images(request, images, urgency, due_s)
            trie, rows, wanted = request.trie, request.rows, request.wanted
            step, pieces = piece_blocks(self.planner.load_s(request), len(rows)), list[Piece]()
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                own = None if wanted is None else wanted[part]
                if trie.lacking(rows[part], compute.level, own).any():
                    pieces.append((rows[part], own))
            compute_s = partial(self.planner.compute_s, request)
            late, _ = await self._bring_pieces(request, trie, pieces, urgency, due_s, compute_s)
            lacking = trie.lacking(rows, compute.level, wanted) != 0
            there = int(lacking.argmax()) if lacking.any() else len(rows)
        except SwapError as error:
            log.error(
                "the prefix of request %s could not be brought up: %s",
                request.name,
                error,
                extra={"request_id": request.name},
            )
        finally:
            self._arrived(request, there, late)

    async def _bring_images(
        self, request: Request, images: ImageHolds, urgency: Urgency, due_s: float | None
    ) -> Urgency:
        """Loads a request's images; if that falls behind, the worker embeds those that have not come. Returns how
        urgent the request is then."""
        pieces: list[Piece] = [(rows, None) for rows in images.lacking]
        encode_s = partial(self.planner.encode_s, images)
        late, urgency = await self._bring_pieces(request, images.kv.trie, pieces, urgency, due_s, encode_s)
        if late:
            self.counters.abandoned += 1
            log.info(
                "the load of images for request %s fell behind: the worker embeds them",
                request.name,
                extra={"request_id": request.name},
            )
            images.release_missing()
        return urgency

    async def _bring_pieces(
        self,
        request: Request,
        trie: Trie,
        pieces: Sequence[Piece],
        urgency: Urgency,
        due_s: float | None,
        compute_s: Callable[[], float | None],
    ) -> tuple[bool, Urgency]:
        """Loads pieces until all have come, one has failed, or the request is withdrawn; gives them up if computing the
        rest, which takes `compute_s`, is faster. Returns whether it has, and how urgent the request is then."""
        changed, late = asyncio.Event(), False
        load = self._loads[request.id] = self._load(request, urgency, changed.set, trie)
        load.due_s = due_s
        try:
            for rows, wanted in pieces:
                load.begin(rows, wanted)
            while load.under_way and not late and request.state is not RequestState.WITHDRAWN:
                left_s = None if self._mode == "always" else load.behind_in_s(compute_s())
                late = left_s is not None and left_s <= 0
                if not late:
                    changed.clear()
                    await _wait(changed, left_s)
        finally:
            load.drop(late=late)
            del self._loads[request.id]
        return late, load.urgency

    def _load(
        self, request: Request, urgency: Urgency, changed: Callable[[], None], trie: Trie | None = None
    ) -> PieceLoad:
        """A load of blocks of `trie`, by default of the prompt's."""
        name, trie = f"request {request.name}", request.trie if trie is None else trie
        args = (self._cache, self._cost, self._meter, self.claims, self._clock, name, trie, urgency, changed)
        load = PieceLoad(*args, self._queued_bytes)
        self._under_way.add(load)
        return load

    def _queued_bytes(self) -> int:
        """Bytes that all loads have on their way: they share one path."""
        return sum(load.claimed_bytes for load in self._under_way)

    def _arrived(self, request: Request, there: int, given_up: bool) -> None:
        """A copy has ended, and the first `there` blocks of the prefix are in the GPU tier."""
        del self._copies[request.id]
        if request.state is RequestState.WITHDRAWN:
            self._note_end(request, "withdrawn")
            del self._staged[request.id]
            request.let_go()
            self._wake()
        elif there == len(request.rows) and (request.image_holds is None or request.image_holds.complete):
            self._note_end(request, "complete")
            request.staged()
            self._wake()
        elif given_up:
            self._note_end(request, "given_up", arrived_blocks=there)
            self.counters.abandoned += 1
            log.info(
                "the load for request %s fell behind: %d blocks are used",
                request.name,
                there,
                extra={"request_id": request.name},
            )
            self._cut(request, there)
        else:
            self._set_back(request, there)

    def _set_back(self, request: Request, there: int) -> None:
        """A prefix came up in part: a block was damaged, or frames were short for a moment.

        It is looked up and staged again. After 8 such setbacks the missing blocks are computed.
        """
        failed = {} if there >= len(request.rows) else {"block_key": request.trie.key(int(request.rows[there])).hex()}
        self._note_end(request, "failed", arrived_blocks=there, **failed)
        request.setbacks += 1
        if request.setbacks < _SETBACKS:
            self._unstage(request)
            asyncio.get_running_loop().call_later(_RETRY_S, self._wake)
        else:
            self._cut(request, there)

    def _cut(self, request: Request, there: int) -> None:
        """The request uses the first `there` blocks and computes the rest."""
        request.footprint.shorten(there)
        while (blocks := request.uncut(len(request.rows))) < len(request.rows):
            request.footprint.shorten(blocks)
        if request.image_holds is not None:
            request.image_holds.release_missing()
        request.cut, request.beside = True, None
        request.staged()
        self._wake()

    # -- layer by layer ---------------------------------------------------------------------------------------------

    def _layer_load(self, request: Request) -> LayerLoad | None:
        """The load of what a STAGING request lacks, layer by layer; None if it comes in whole blocks."""
        if self._context.requests.running:  # beside others the worker waits for all layers before it begins
            return None
        return self.planner.layer_load(request, lambda: self._have_slots(request))

    def _have_slots(self, request: Request) -> None:
        """The blocks of a request have slots, and their layers come: it may run."""
        if request.state is RequestState.STAGING:
            request.staged()
            self._wake()

    async def _bring_layers(self, request: Request, layers: LayerLoad) -> None:
        load = self._load(request, Urgency.DEMAND, layers.changed.set)
        self._loads[request.id] = load
        try:
            load.begin(layers.rows, layers.wanted, layers)
            while load.under_way and not layers.ended and request.state is not RequestState.WITHDRAWN:
                layers.changed.clear()
                await layers.changed.wait()
        finally:
            came = not (load.under_way or load.failed)
            load.drop()
            if self._loads.get(request.id) is load:  # else it is staged again already
                del self._loads[request.id]
            self._end_layers(request, layers, came)

    def _end_layers(self, request: Request, layers: LayerLoad, came: bool) -> None:
        """A load layer by layer has ended."""
        if layers.ended:
            return
        self._note_end(request, "complete" if came else "failed")
        if request.state is RequestState.WITHDRAWN:
            if self._staged.pop(request.id, None) is not None:  # else the worker still has it
                request.let_go()
                self._wake()
        elif came:
            layers.complete()
            self._have_slots(request)
        else:
            request.whole_loads = True
            if request.id in self._staged:
                self._unstage(request)
                self._wake()
            elif request.state in (RequestState.RUNNING, RequestState.STARVED):
                log.info(
                    "request %s runs again: the last layers of its prefix did not come",
                    request.name,
                    extra={"request_id": request.name},
                )
                request.run.load_failed = True
                request.preempt()
                self._context.send(Cancel(request.id))

    def hand_over(self, request: Request) -> None:
        """The worker has got a request's `Start`: tells it which layers have come, if they still come."""
        layers = request.footprint.by_layers
        if layers is not None and layers.under_way:
            request.run.by_layers = True
            self._context.counters.layerwise_loads += 1
            layers.run(lambda count: self._context.send(Layers(request.id, count)), request.footprint.extend)

    # -- while it runs ----------------------------------------------------------------------------------------------

    def load_beside(self, request: Request, plan: TailPlan) -> None:
        """Starts to load the back of a prefix whose front the request, just handed over, computes."""
        first = len(request.rows)
        load = self._load(request, Urgency.DEMAND, self._wake)
        name = f"request {request.name}"
        args = (self._cache, self._budget, self._cost, name, request.trie, plan, first, load, self._wake)
        request.footprint.begin_tail(TailLoad(*args))
        self.beside[request.id] = request
        rows = plan.rows
        request.load_stage = request.record.begin(
            StageName.LOAD,
            self._clock(),
            tier=Tier(int(plan.tiers.max(initial=0))).label,
            blocks=len(rows),
            bytes=int(request.trie.group_bytes[request.trie.lacking(rows, self._cache.tiers.compute.level)].sum()),
            urgency="demand",
            beside=True,
        )

    def advance(self) -> list[tuple[Request, Arrived | None]]:
        """Continues the loads beside running requests. Returns these requests, each with the message for the worker if
        its run and its load have met, else with None."""
        advanced: list[tuple[Request, Arrived | None]] = []
        for request in list(self.beside.values()):
            tail = request.tail
            if tail is None or tail.joined:
                del self.beside[request.id]
            elif request.state in (RequestState.RUNNING, RequestState.STARVED):
                meet = tail.advance(request.run.blocks, request.filled_blocks)
                advanced.append((request, self._join(request, tail) if meet else None))
        return advanced

    def _join(self, request: Request, tail: TailLoad) -> Arrived | None:
        rows = tail.arrived
        self._note_end(request, "given_up" if tail.abandoned else "complete", arrived_blocks=len(rows))
        self.counters.abandoned += tail.abandoned
        if not len(rows):
            request.footprint.end_tail()
            return None
        tail.joined = True
        tiers = request.tiers_at_arrival(tail.plan.tiers[-len(rows) :], request.run.blocks)
        frames = request.trie.slots[rows, self._cache.tiers.compute.level, : request.run.slots].ravel().tolist()
        arrived = Arrived(request.id, request.run.blocks, frames)
        request.run.frames += frames
        if request.resumed:  # its hits were counted when it ran first
            return arrived
        who = request.record.tenant, request.record.model
        for tier, tokens in enumerate(self._cache.counters.find(who, tiers, request.trie.block_tokens)):
            if request.hit_tokens is not None:
                request.hit_tokens[tier] += tokens
        return arrived


async def _wait(changed: asyncio.Event, timeout_s: float | None) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(changed.wait(), None if timeout_s is None else max(timeout_s, _LEAST_WAIT_S))
