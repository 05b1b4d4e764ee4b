"""What becomes of a staged request's cached prefix: loaded, computed again, or both at once.

The decision is `plan_load`'s, by what loading and computing have taken (paper `prefix_cache_long_term_memory`, X). What
is loaded before the request runs, from the front of the prefix on, is loaded here; what is loaded from its back while
the request runs, in `tail_load`.

A load moves in pieces. One that falls so far behind that computing what is left is faster is given up for what has not
arrived; the beginning that has arrived is used.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from weakref import WeakSet

import numpy as np

from prefixd.cache import NONE
from prefixd.cache.index.trie import Rows
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.loading.load_choice import LoadChoice, LoadClaims, LoadCounters, LoadMeter
from prefixd.serving.loading.piece_load import PieceLoad, piece_blocks
from prefixd.serving.loading.tail_load import TailLoad, TailPlan
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd.worker_protocol.protocol import Arrived
from prefixd_scheduler import LOADED_FROM, Distance, LoadPlan, Stretch, plan_load
from prefixd_swap import SwapError
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_RETRY_S = 0.02
_SETBACKS = 8
_LEAST_WAIT_S = 0.002


class Loader:
    """Decides what is loaded of the requests that are staged, and carries it out.

    Args:
        context: the dispatcher's.
        staged: the requests that are staged, by id; one that was withdrawn is taken out when its load ends.
        unstage: ends the hold of a request that waits on.
        backlog_s: how long the worker computes what was handed over before.

    Attributes:
        counters: what was decided, and how well.
        claims: blocks that are on their way to the GPU tier.
    """

    def __init__(
        self,
        context: DispatchContext,
        staged: dict[int, Request],
        unstage: Callable[[Request], None],
        backlog_s: Callable[[], float],
    ) -> None:
        self.counters = LoadCounters()
        self.claims = LoadClaims()
        self._cache = context.cache
        self._mover = context.cache.mover
        self._staged = staged
        self._budget = context.budget
        self._cost = context.cost
        self._clock = context.clock
        self._meter = LoadMeter(context.clock)
        self._look = context.look
        self._unstage = unstage
        self._mode = context.options.load
        self._backlog_s = backlog_s
        self._under_way: WeakSet[PieceLoad] = WeakSet()
        self._copies: dict[int, asyncio.Task[None]] = {}
        self._loads: dict[int, PieceLoad] = {}
        self.beside: dict[int, Request] = {}
        """Running requests beside which a part of their prefixes is loaded."""

    async def stop(self) -> None:
        """Waits for the copies under way."""
        await asyncio.gather(*self._copies.values(), return_exceptions=True)

    # -- what to do -----------------------------------------------------------------------------------------------

    def choose(self, request: Request, *, demanded: bool, turn_s: float) -> Rows:
        """The part of what was `found` that a request loads before it runs; sets `cut` and `beside` accordingly.

        Args:
            request: waits.
            demanded: it could run at once.
            turn_s: in so many seconds its turn comes.
        """
        trie, rows = request.trie, request.found
        request.beside = request.choice = None
        if not trie.lacking(rows, self._cache.tiers.compute.level, request.wanted).any():  # nothing to load
            request.cut = False
            return rows
        request.choice = LoadChoice(tuple(self._stretches(request)), self._clock())
        if demanded:
            self.want(request)
        if self._mode == "always":
            chosen = rows
        elif self._mode == "never":
            chosen = request.usable(rows, trie.there[rows, self._cache.tiers.compute.level])
        elif trie.has_rules or request.image_kv is not None:
            chosen = self._worth_loading(request, turn_s + self._backlog_s())
        else:
            chosen = self._planned(request, request.choice.stretches, demanded, turn_s)
        request.cut = len(chosen) < len(rows)
        return chosen

    def ready_s(self, request: Request) -> float:
        """Estimated seconds of loading and computing until a waiting request's first token; infinite while unknown.

        What lies in a tier from which no load was observed counts as at hand: a cache is there to be loaded from.
        """
        plan = self._plan(request, tuple(self._stretches(request)), at_once=False, wait_s=0.0, to_carry_out=False)
        if plan.first_token_s is not None:
            return plan.first_token_s
        cached_tokens = len(request.found) * request.trie.block_tokens
        compute_s = self._cost.compute_s(request.chain.tokens - cached_tokens, cached_tokens)
        return math.inf if compute_s is None else compute_s

    def _planned(self, request: Request, stretches: Sequence[Stretch], demanded: bool, turn_s: float) -> Rows:
        """As `plan_load` says, which knows no windows and states."""
        rows, block_tokens = request.found, request.trie.block_tokens
        at_once = demanded and len(request.kv.groups) == 1 and not request.sampling.beams and request.images is None
        wait_s = turn_s + self._backlog_s()
        plan = self._plan(request, stretches, at_once=at_once, wait_s=wait_s, to_carry_out=True)
        blocks = request.uncut((plan.ready_tokens + plan.front_tokens) // block_tokens)
        if plan.computed_tokens and plan.loaded_tokens:
            behind = rows[blocks : plan.used_tokens // block_tokens]
            share = plan.computed_tokens / (plan.computed_tokens + plan.loaded_tokens)
            request.beside = TailPlan(behind, request.trie.nearest[behind], share)
        return rows[:blocks]

    def want(self, request: Request) -> None:
        """A request could run now, or runs."""
        if request.choice is not None:
            request.choice.want(self._clock(), self._backlog_s())

    def judge(self, request: Request) -> None:
        """A request has its first token: what was decided for it can be judged."""
        choice, request.choice = request.choice, None
        if choice is not None and choice.is_one:
            tokens, block_tokens, beside = request.prompt_tokens, request.trie.block_tokens, request.beside is not None
            self.counters.judge(
                choice, self._cost, self._clock(), tokens, block_tokens, cut=request.cut and not beside, beside=beside
            )

    def _plan(
        self, request: Request, stretches: Sequence[Stretch], *, at_once: bool, wait_s: float, to_carry_out: bool
    ) -> LoadPlan:
        return plan_load(
            self._cost,
            stretches,
            request.chain.tokens,
            request.trie.block_tokens,
            both_at_once=at_once,
            queued_bytes=dict.fromkeys(LOADED_FROM, self._queued_bytes() if to_carry_out else 0),
            wait_s=wait_s,
            to_carry_out=to_carry_out,
        )

    def _stretches(self, request: Request) -> Iterator[Stretch]:
        """What was found, each stretch farther away than the one before; what is nearer amid it counts no bytes."""
        trie, rows = request.trie, request.found
        distances = np.maximum.accumulate(trie.distances(rows))
        needed = trie.needed(len(rows)) if trie.has_rules else None
        lacking = trie.lacking(rows, self._cache.tiers.compute.level, needed)
        for distance in np.unique(distances).tolist():
            here = distances == distance
            nbytes = int(trie.group_bytes[lacking[here]].sum())
            yield Stretch(Distance(distance), int(here.sum()) * trie.block_tokens, nbytes)

    def _worth_loading(self, request: Request, wait_s: float) -> Rows:
        """The prefix up to the first tier that is slower to load from than to compute, which begins in `wait_s`."""
        trie, rows = request.trie, request.found
        needed, nearer = trie.needed(len(rows)), np.zeros(len(rows), np.uint8)
        for distance in LOADED_FROM:
            nearer |= trie.there[rows, distance - 1]
            loaded = needed & ~nearer & trie.there[rows, distance]
            if loaded.any():
                kept = request.usable(rows, nearer)
                nbytes, tokens = int(trie.group_bytes[loaded].sum()), (len(rows) - len(kept)) * trie.block_tokens
                load_s = self._cost.load_s(nbytes, distance, self._queued_bytes())
                compute_s = self._cost.compute_s(tokens, len(kept) * trie.block_tokens)
                slower = load_s is not None and compute_s is not None and load_s > wait_s + compute_s
                if slower and not self._cost.probes(distance):
                    return kept
        return rows

    # -- before the request runs ------------------------------------------------------------------------------------

    def start(self, request: Request, urgency: Urgency, due_s: float | None = None) -> None:
        """Starts bringing up what a request that is STAGING lacks; `due_s` when its turn comes."""
        self._copies[request.id] = asyncio.create_task(self._bring(request, urgency, due_s))

    def hurry(self, request: Request) -> None:
        """A request whose prefix is on its way could run now."""
        self.want(request)
        if (load := self._loads.get(request.id)) is not None:
            load.hurry()

    async def _bring(self, request: Request, urgency: Urgency, due_s: float | None) -> None:
        changed = asyncio.Event()
        load = self._load(request, urgency, changed.set)
        load.due_s = due_s
        self._loads[request.id] = load
        there, late = 0, False
        try:
            compute = self._cache.tiers.compute
            if (images := request.image_holds) is not None:
                await self._mover.bring(images.kv.trie, images.held, compute, urgency=urgency, due_s=due_s)
            rows, wanted = request.rows, request.wanted
            step = piece_blocks(self._load_s(request), len(rows))
            for start in range(0, len(rows), step):
                part = slice(start, start + step)
                if request.trie.lacking(rows[part], compute.level, None if wanted is None else wanted[part]).any():
                    load.begin(rows[part], None if wanted is None else wanted[part])
            while load.under_way and not late and request.state is not RequestState.WITHDRAWN:
                left_s = None if self._mode == "always" else load.behind_in_s(self._compute_s(request))
                late = left_s is not None and left_s <= 0
                if not late:
                    changed.clear()
                    await _wait(changed, left_s)
            lacking = request.trie.lacking(rows, compute.level, wanted) != 0
            there = int(lacking.argmax()) if lacking.any() else len(rows)
        except SwapError as error:
            log.error("the prefix of request %s could not be brought up: %s", request.name, error)
        finally:
            load.drop(late=late)
            del self._loads[request.id]
            self._arrived(request, there, late)

    def _load(self, request: Request, urgency: Urgency, changed: Callable[[], None]) -> PieceLoad:
        name = f"request {request.name}"
        args = (self._cache, self._cost, self._meter, self.claims, self._clock, name, request.trie, urgency, changed)
        load = PieceLoad(*args, self._queued_bytes)
        self._under_way.add(load)
        return load

    def _load_s(self, request: Request) -> float | None:
        """What loading takes of what a request lacks."""
        trie, rows = request.trie, request.rows
        lacking = trie.lacking(rows, self._cache.tiers.compute.level, request.wanted)
        far = int(trie.distances(rows[lacking != 0]).max(initial=0))
        return self._cost.load_s(int(trie.group_bytes[lacking].sum()), Distance(far))

    def _compute_s(self, request: Request) -> float | None:
        """What computing takes of what a request lacks, from its first missing block on."""
        trie, rows = request.trie, request.rows
        lacking = trie.lacking(rows, self._cache.tiers.compute.level, request.wanted) != 0
        there = int(lacking.argmax()) if lacking.any() else len(rows)
        compute_s = self._cost.compute_s((len(rows) - there) * trie.block_tokens, there * trie.block_tokens)
        return None if compute_s is None else compute_s + self._backlog_s()

    def _queued_bytes(self) -> int:
        """Bytes that all loads have on their way; they share what they come by."""
        return sum(load.claimed_bytes for load in self._under_way)

    def _arrived(self, request: Request, there: int, given_up: bool) -> None:
        """A copy has ended, and so many blocks of the prefix are in the GPU tier."""
        del self._copies[request.id]
        if request.state is RequestState.WITHDRAWN:
            del self._staged[request.id]
            request.let_go()
            self._look()
        elif there == len(request.rows) and (request.image_holds is None or request.image_holds.complete):
            request.staged()
            self._look()
        elif given_up:
            self.counters.abandoned += 1
            log.info("the load for request %s fell behind: %d blocks are used", request.name, there)
            self._cut(request, there)
        else:
            self._set_back(request, there)

    def _set_back(self, request: Request, there: int) -> None:
        """A prefix came up in part: a block was damaged, or frames were short for the moment.

        It is looked up and staged again. When that does not help either, what is missing is computed.
        """
        request.setbacks += 1
        if request.setbacks < _SETBACKS:
            self._unstage(request)
            asyncio.get_running_loop().call_later(_RETRY_S, self._look)
        else:
            self._cut(request, there)

    def _cut(self, request: Request, there: int) -> None:
        """The request makes do with the first `there` blocks and computes the rest."""
        request.footprint.shorten(there)
        while (blocks := request.uncut(len(request.rows))) < len(request.rows):
            request.footprint.shorten(blocks)
        if request.image_holds is not None:
            request.image_holds.let_go_of_missing()
        request.cut, request.beside = True, None
        request.staged()
        self._look()

    # -- while it runs ----------------------------------------------------------------------------------------------

    def load_beside(self, request: Request, plan: TailPlan) -> None:
        """A request was handed over that computes the front of its prefix: starts loading the back."""
        first = len(request.rows)
        load = self._load(request, Urgency.DEMAND, self._look)
        name = f"request {request.name}"
        args = (self._cache, self._budget, self._cost, name, request.trie, plan, first, load, self._look)
        request.footprint.begin_tail(TailLoad(*args))
        self.beside[request.id] = request

    def advance(self) -> list[tuple[Request, Arrived | None]]:
        """Loads on beside the requests that compute. Returns these, each with what its worker is to be told when what
        it computes and what was loaded meet."""
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
        self.counters.abandoned += tail.abandoned
        if not len(rows):
            request.footprint.end_tail()
            return None
        tail.joined = True
        tiers = request.tiers_at_arrival(tail.plan.tiers[-len(rows) :], request.run.blocks)
        frames = request.trie.slots[rows, self._cache.tiers.compute.level, : request.run.slots].ravel().tolist()
        arrived = Arrived(request.id, request.run.blocks, frames)
        request.run.frames += frames
        if request.resumed:  # what was found of its prompt was counted when it ran first
            return arrived
        hits = np.bincount(tiers, minlength=NONE)[:NONE]
        for tier, blocks in enumerate(hits.tolist()):
            tokens = blocks * request.trie.block_tokens
            self._cache.counters.hit_tokens[tier] += tokens
            if request.hit_tokens is not None:
                request.hit_tokens[tier] += tokens
        return arrived


async def _wait(changed: asyncio.Event, timeout_s: float | None) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(changed.wait(), None if timeout_s is None else max(timeout_s, _LEAST_WAIT_S))
