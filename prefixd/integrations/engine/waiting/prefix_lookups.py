"""The scheduler's half, reading: what prefixd has of each waiting request, and the leases of what is to be loaded.

Nothing here waits for the daemon longer than `patience_s` a step: questions are asked in the link's thread, and the
engine is told to ask again while an answer is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.client import AsyncLease, ClientError, MatchResult, NamespaceSpec, Tier
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.engine.link import Link, LinkDown
from prefixd.integrations.engine.waiting.ready import plan_prefix
from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import CostModel, Distance, LookAhead

_FRESH_S = 1.0  # for so long an answer stands
_RENEWALS = 4  # old answers that are asked for again at a time, however many wait: a step must not pay for hundreds
_LEASE_S = 30.0
_LEASES = 32
_LEASED_SLICES = 2
"""With the last lease they are fewer than three: a quarter of the daemon's memory is left for loads, which hold slices
of their own."""
_ROOM_S = 1.0  # so long after a request's turn its lease may find no room
_ROOM_PAUSE_S = 0.02
_BYTES_PER_S = 100e6
_PATIENCE = 0.1
_LEAST_PATIENCE_S = 0.02
"""A lease may be late by so much of what computing its tokens takes, and by so many seconds in any case."""
_COMPLAINT_S = 60.0  # a daemon that refuses is quoted no more often

_DISTANCES = {
    Tier.GPU: Distance.CPU,
    Tier.CPU: Distance.CPU,
    Tier.DISK: Distance.DISK,
    Tier.REMOTE: Distance.REMOTE,
}
"""By tier of the daemon. What lies in the daemon's own GPU tier comes to an engine through the CPU tier."""


@dataclass(slots=True)
class Lookup:
    """What is known of one request's prefix."""

    spec: NamespaceSpec
    tokens: npt.NDArray[np.uint32] = field(repr=False)
    """The prompt's token ids, as many as the daemon is asked about."""
    seen: SeenPrefix | None = None
    seen_s: float = -float("inf")
    asked_s: float = -float("inf")
    """When the last question was asked."""
    asking: Future[SeenPrefix] | None = None
    found: MatchResult | None = None
    """The first answer, by which the daemon has counted the prompt as asked for."""
    leasing: Future[AsyncLease] | None = None
    lease: AsyncLease | None = None
    leased_blocks: int = 0
    """How many the lease has, or may have, that is there or asked for."""
    end_block: int = 0
    """Up to this block the prefix is loaded. The lease may end before: of a long prefix it has the first slice."""
    room_again_s: float = -float("inf")
    """There was no room for the lease; it is not asked for again before this."""
    waited_for: Future[Any] | None = None
    """The answer that a step has waited for."""
    counted: bool = False
    """Its first question was asked, which is the one that the daemon's hit rates count."""
    lease_s: float = 0.0
    """How long the answer to the wish for a lease took, reading from disk included."""
    turn_s: float | None = None
    """When the engine first asked for what there is to load."""
    leasing_s: float = 0.0
    """When the lease that is under way was asked for."""
    late_s: float | None = None
    """So long its answer may take, from the request's turn on, before what is on disk, or farther away, is computed
    instead; None: for ever."""
    far_bytes: int = 0
    """What the lease that is under way has to be read for from disk, or from a shared store."""
    distance: Distance = Distance.DISK
    """How far away the farthest of it is."""
    slow: bool = False
    """A lease was given up that took too long: only what is in memory is loaded."""
    refused: bool = False
    """Nothing is to be loaded for this request, unless it is preempted."""
    failed: bool = False
    """A load failed; never load for this request again, even after a preemption."""


class Lookups:
    """Asks the daemon about prompts, ahead of their turn and at it.

    Args:
        link: the line to the daemon.
        geometry: how prefixd blocks are made of the engine's.
        look_ahead: says how many prompts are brought up from disk ahead of their turn, at a time.
        cost: judges how much is to be loaded; None: everything, however long that takes.
        clock: seconds, monotonic.
        unleased_s: for so long after the question, what was in the daemon's memory is loaded without a lease at the
            request's turn: the load gets one of its own anyhow, and what was evicted meanwhile is computed. 0: never.

    Attributes:
        abandoned: leases that were given up because they took too long.
    """

    def __init__(
        self,
        link: Link,
        geometry: Geometry,
        look_ahead: LookAhead,
        cost: CostModel | None,
        clock: Callable[[], float] = time.monotonic,
        unleased_s: float = 0.0,
    ) -> None:
        self._link = link
        self._geometry = geometry
        self._block_tokens = geometry.block_tokens
        self._look_ahead = look_ahead
        self._cost = cost
        self._clock = clock
        # With windows a load that lacks one block is lost as a whole.
        self._unleased_s = 0.0 if geometry.needs_end else unleased_s
        self.abandoned = 0
        self._lookups: dict[str, Lookup] = {}
        self._waiting: set[str] = set()  # for their turn
        self._ahead: set[str] = set()  # prompts that are brought up ahead of their turn
        self._line: dict[str, None] = {}  # those that came when there were enough of them, in order
        self._complained_s = -float("inf")
        self._leases = self._leased_blocks = 0
        self._renewals: list[Future[SeenPrefix]] = []
        self.patience_s = 0.0
        """How long this step may still wait for answers; set for each step."""
        self.idle = True
        """Nothing runs that waiting would hold up. Otherwise an answer is waited for in one step only: one that takes
        long, as from disk, would hold up every step until it is there."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lookups

    @property
    def prefetched(self) -> int:
        """How many prompts are brought up ahead of their turn at a time."""
        return self._look_ahead.requests(0)

    def began(self, request_id: str) -> None:
        """The request's turn has come."""
        if request_id in self._waiting:
            self._waiting.discard(request_id)
            self._look_ahead.handed_over(bool(self._waiting))

    def add(self, request_id: str, spec: NamespaceSpec, tokens: Sequence[int]) -> None:
        """A request has come: asks what there is of its prompt, and has it brought up."""
        self.forget(request_id)
        lookup = Lookup(spec, self._usable(tokens))
        self._lookups[request_id] = lookup
        self._waiting.add(request_id)
        self._ask(request_id, lookup)

    def seen(self, request_id: str) -> SeenPrefix | None:
        """What was last seen of the request's prompt; asks again when that is long ago,
        for a few requests at a time. Never waits."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return None
        self._settle(lookup)
        if lookup.asking is None and self._clock() - lookup.seen_s > _FRESH_S:
            self._renewals = [renewal for renewal in self._renewals if not renewal.done()]
            if len(self._renewals) < _RENEWALS and (renewal := self._ask(request_id, lookup)) is not None:
                self._renewals.append(renewal)
        return lookup.seen

    def hit(self, request_id: str, local_tokens: int, most_tokens: int) -> int | None:
        """How many tokens beyond `local_tokens` can be loaded; None: ask again, the answer is under way.

        The tokens counted are leased when this returns more than 0, or were in memory a moment ago. They are as many as
        are loaded faster than computed, by what both have taken. A lease that takes so long that computing is faster is
        given up, and what came to memory meanwhile is used.

        Args:
            local_tokens: what the engine has itself.
            most_tokens: no more than so many of the prompt's tokens can be used.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or not self._link.up:
            return 0
        if lookup.turn_s is None:
            lookup.turn_s = self._clock()
        return self._hit(request_id, lookup, local_tokens, most_tokens, self._unleased_s)

    def _hit(
        self, request_id: str, lookup: Lookup, local_tokens: int, most_tokens: int, unleased_s: float
    ) -> int | None:
        self._settle(lookup)
        if lookup.refused:
            return 0
        if lookup.lease is not None and lookup.lease.remaining_s < _LEASE_S / 2:
            self._let_go(lookup)
        if lookup.lease is None and lookup.leasing is None:
            if self._clock() - lookup.seen_s > _FRESH_S:
                self._ask(request_id, lookup)
            if lookup.asking is not None and not self._wait(lookup):
                return None
            if lookup.seen is None:  # no answer: the daemon is away
                return 0
            if min(lookup.seen.tokens, most_tokens) <= local_tokens:
                return 0
            if not self._may_lease(_LEASES, _LEASED_SLICES) or self._clock() < lookup.room_again_s:
                return None
            end = self._worth_loading(lookup, lookup.seen, local_tokens)
            if end <= local_tokens:
                lookup.refused = True
                return 0
            first_block = local_tokens // self._block_tokens
            near = not self._far_bytes(lookup.seen, local_tokens, end)[0]
            if near and self._clock() - lookup.asked_s < unleased_s:
                lookup.end_block = -(-end // self._block_tokens)
                return min(end, most_tokens) - local_tokens
            self._look_ahead.loads(lookup.seen.distance(local_tokens), self._nbytes(end - local_tokens))
            self._acquire(lookup, first_block, -(-end // self._block_tokens))
        if lookup.leasing is not None and not self._wait(lookup):
            self._look_whether_late(lookup)
            return None
        if lookup.lease is None:
            return self._unleased(lookup)
        end = lookup.end_block * self._block_tokens
        if lookup.lease.first_block * self._block_tokens > local_tokens:  # the engine has lost some meanwhile
            self._let_go(lookup)
            return None
        return max(0, min(end, most_tokens) - local_tokens)

    def prepare(self, request_id: str, local_tokens: int, most_tokens: int) -> None:
        """Begins what `hit`, with the same arguments, would else begin at the request's turn. Never waits.

        Half of the leases are left for requests whose turn it is.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or not self._link.up or not self._may_lease(_LEASES // 2, _LEASED_SLICES // 2):
            return
        patience_s, self.patience_s = self.patience_s, 0.0
        self._hit(request_id, lookup, local_tokens, most_tokens, 0.0)
        self.patience_s = patience_s

    def loading(self, request_id: str) -> None:
        """The workers have been told to load what `hit` said. Where the lease has a part of it only, it ends: it would
        keep room from their next slices."""
        lookup = self._lookups[request_id]
        lease = lookup.lease
        if lease is not None and lease.first_block + lease.blocks < lookup.end_block:
            self._let_go(lookup)

    def take_found(self, request_id: str) -> MatchResult | None:
        """The answer that counted the prompt as asked for, for the first load of it; None for others."""
        lookup = self._lookups[request_id]
        found, lookup.found = lookup.found, None
        return found

    def sources(self, request_id: str, local_tokens: int, tokens: int) -> dict[Distance, int]:
        """Where `tokens` tokens beyond `local_tokens` came from, as far as was seen when they were asked for."""
        lookup = self._lookups.get(request_id)
        found: dict[Distance, int] = {}
        at, left, end = 0, tokens, local_tokens
        for distance, run in (lookup.seen or NOTHING_SEEN).runs if lookup else ():
            at += run
            taken = min(left, max(0, at - end))
            if taken:
                found[distance] = found.get(distance, 0) + taken
                left -= taken
                end += taken
        if left:  # it was committed or brought up since
            found[Distance.CPU] = found.get(Distance.CPU, 0) + left
        return found

    def lease_s(self, request_id: str) -> float:
        """How long it took to get the request's lease, reading from disk included."""
        return self._lookups[request_id].lease_s

    def waited_s(self, request_id: str) -> float | None:
        """How long ago the engine first asked for what there is to load for the request; None for one that is gone."""
        lookup = self._lookups.get(request_id)
        return None if lookup is None or lookup.turn_s is None else self._clock() - lookup.turn_s

    def refuse(self, request_id: str) -> None:
        """Nothing more is loaded for this request: what was to be had it has, or it failed."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            lookup.refused = True
            self._let_go(lookup)
            self._next_ahead(request_id)

    def again(self, request_id: str, tokens: Sequence[int]) -> None:
        """The request was preempted and will need its prefix, of more tokens by now, once more."""
        lookup = self._lookups.get(request_id)
        if lookup is not None and not lookup.failed:
            lookup.tokens = self._usable(tokens)
            lookup.refused = lookup.slow = False
            lookup.turn_s = None
            lookup.seen_s = -float("inf")

    def failed(self, request_id: str) -> None:
        """A load for the request failed: it computes what it needs."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            lookup.failed = True
            self.refuse(request_id)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        lookup = self._lookups.pop(request_id, None)
        self._waiting.discard(request_id)
        self._line.pop(request_id, None)
        self._next_ahead(request_id)
        if lookup is not None:
            self._let_go(lookup)
            if lookup.asking is not None:
                lookup.asking.cancel()

    def clear(self) -> None:
        """Forgets every request."""
        self._line.clear()
        for request_id in list(self._lookups):
            self.forget(request_id)

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _slice_blocks(self) -> int:
        """The most that one lease has, a quarter of the daemon's memory."""
        return self._link.slice_blocks(self._geometry.block_bytes)

    def _may_lease(self, leases: int, slices: int) -> bool:
        """Whether another lease may be asked for: there are fewer than so many, and they have fewer slices."""
        return self._leases < leases and self._leased_blocks < slices * self._slice_blocks

    def _usable(self, tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
        """What the daemon is asked about. With windows, only as much as can be loaded: the daemon answers with the
        longest length that every group allows, and a lease for that length lacks window bytes that a shorter one needs.
        """
        if self._geometry.needs_end:
            tokens = tokens[: self._geometry.most_loadable(len(tokens))]
        return np.asarray(tokens, np.uint32)

    def _ask(self, request_id: str, lookup: Lookup) -> Future[SeenPrefix] | None:
        """The question that is under way then; None where there is nothing, or nobody, to ask."""
        if lookup.asking is not None or not self._link.up or len(lookup.tokens) < self._block_tokens:
            if len(lookup.tokens) < self._block_tokens:
                lookup.seen, lookup.seen_s = NOTHING_SEEN, float("inf")
            return lookup.asking
        most = self.prefetched
        ahead = request_id not in self._ahead and len(self._ahead) < most
        if ahead:
            self._ahead.add(request_id)
            self._line.pop(request_id, None)
        elif lookup.seen is None and most and request_id not in self._ahead:
            self._line.setdefault(request_id)

        first, lookup.counted = not lookup.counted, True

        async def ask() -> SeenPrefix:
            cache = await self._link.cache(lookup.spec)
            match = await cache.match(lookup.tokens, counted=first)
            if first:
                lookup.found = match
            if ahead and match.blocks_in(Tier.DISK) + match.blocks_in(Tier.REMOTE):
                await cache.prefetch(lookup.tokens)
            return SeenPrefix(
                match.blocks * self._block_tokens,
                tuple((_DISTANCES[run.tier], run.blocks * self._block_tokens) for run in match.runs),
            )

        lookup.asked_s = self._clock()
        lookup.asking = self._link.start(ask)
        return lookup.asking

    def _next_ahead(self, gone: str) -> None:
        """One prompt less is brought up ahead of its turn; those that waited in line are, as many as may be."""
        if gone not in self._ahead:
            return
        self._ahead.discard(gone)
        while self._line and len(self._ahead) < self.prefetched:
            request_id = next(iter(self._line))
            del self._line[request_id]
            lookup = self._lookups[request_id]
            if not lookup.refused:
                self._ahead.add(request_id)
                self._bring_up(lookup)

    def _bring_up(self, lookup: Lookup) -> None:
        async def bring_up() -> int:
            cache = await self._link.cache(lookup.spec)
            return await cache.prefetch(lookup.tokens)

        # Whether it came, the next answer shows.
        self._link.start(bring_up).add_done_callback(self._result)

    def _acquire(self, lookup: Lookup, first_block: int, end_block: int) -> None:
        """Asks for a lease of the blocks that are to be loaded; of many, of the first ones: they come in slices."""
        max_blocks = min(end_block - first_block, self._slice_blocks)
        lookup.end_block, lookup.leased_blocks = end_block, max_blocks
        self._leased(lookup, 1)
        lookup.leasing_s = began_s = self._clock()

        async def acquire() -> AsyncLease:
            cache = await self._link.cache(lookup.spec)
            lease = await cache.acquire(
                lookup.tokens,
                first_block=first_block,
                max_blocks=max_blocks,
                prefix_blocks=end_block,
                ttl_s=_LEASE_S,
                counted=False,
            )
            lookup.lease_s = self._clock() - began_s
            return lease

        nbytes = self._geometry.nbytes(len(lookup.tokens) // self._block_tokens)
        lookup.leasing = self._link.start(acquire, self._link.timeout_s + nbytes / _BYTES_PER_S)

    def _wait(self, lookup: Lookup) -> bool:
        """Whether the answer is there, after waiting for it as long as this step's patience lasts."""
        future: Future[Any] | None = lookup.asking or lookup.leasing
        assert future is not None
        if self.patience_s > 0 and (self.idle or future is not lookup.waited_for):
            lookup.waited_for = future
            began_s = self._clock()
            with suppress(NotYet, CancelledError):
                future.exception(self.patience_s)
            self.patience_s -= self._clock() - began_s
        self._settle(lookup)
        return future.done()

    def _settle(self, lookup: Lookup) -> None:
        """Takes the answers that have come."""
        if lookup.asking is not None and lookup.asking.done():
            seen = self._result(lookup.asking)
            lookup.asking = None
            lookup.seen_s = self._clock()
            if seen is not None:
                lookup.seen = seen
        if lookup.leasing is not None and lookup.leasing.done():
            lookup.lease = self._result(lookup.leasing)
            lookup.leasing = None
            if lookup.lease is None:
                self._leased(lookup, -1)
                lookup.refused = True
            elif not lookup.lease.blocks:
                self._not_leased(lookup, lookup.lease.cached_blocks)
            else:
                lease = lookup.lease  # an older daemon does not say what is cached behind it
                lookup.end_block = min(lookup.end_block, lease.cached_blocks or lease.first_block + lease.blocks)

    def _not_leased(self, lookup: Lookup, cached_blocks: int) -> None:
        """A lease has no blocks, though so many are cached."""
        self._leased(lookup, -1)
        lookup.lease = None
        now_s = self._clock()
        if not cached_blocks:  # evicted since it was seen
            lookup.seen, lookup.seen_s = NOTHING_SEEN, now_s
        elif cached_blocks < lookup.end_block:
            lookup.seen_s = -float("inf")
        elif lookup.turn_s is not None and now_s - lookup.turn_s > _ROOM_S:
            lookup.refused = True
        else:
            lookup.room_again_s = now_s + _ROOM_PAUSE_S

    @staticmethod
    def _unleased(lookup: Lookup) -> int | None:
        """`hit` of a request for which no lease came: nothing, or that it is asked for again."""
        return 0 if lookup.refused or lookup.seen is NOTHING_SEEN else None

    def _leased(self, lookup: Lookup, by: int) -> None:
        """There is one lease more, or less."""
        self._leases += by
        self._leased_blocks += by * lookup.leased_blocks

    def _worth_loading(self, lookup: Lookup, seen: SeenPrefix, local_tokens: int) -> int:
        """Up to which token of the prefix to load; what is behind is computed. Says when that lease is late."""
        lookup.late_s, lookup.far_bytes = None, 0
        if self._cost is None:
            return seen.tokens
        whole = self._geometry.needs_end
        if lookup.slow:
            seen = seen.before(Distance.DISK, local_tokens)
            if whole and seen.tokens < (lookup.seen or seen).tokens:
                return local_tokens
        plan = plan_prefix(
            self._cost,
            len(lookup.tokens),
            local_tokens,
            seen,
            self._nbytes,
            self._block_tokens,
            whole=whole,
            to_carry_out=True,
        )
        end = plan.ready_tokens + plan.front_tokens
        compute_s = self._cost.compute_s(end - local_tokens, local_tokens)
        nbytes, distance = lookup.far_bytes, lookup.distance = self._far_bytes(seen, local_tokens, end)
        load_s = self._cost.load_s(nbytes, distance)
        if nbytes and compute_s is not None and load_s is not None:
            lookup.late_s = load_s + max(_LEAST_PATIENCE_S, _PATIENCE * compute_s)
        return end

    def _far_bytes(self, seen: SeenPrefix, begin: int, end: int) -> tuple[int, Distance]:
        """Bytes of the prefix that lie on disk, or farther away, alone, between two lengths; how far away the farthest
        of them are."""
        at, nbytes, farthest = 0, 0, Distance.DISK
        for distance, tokens in seen.runs:
            at += tokens
            here = min(tokens, at - begin, end - (at - tokens))
            if distance >= Distance.DISK and here > 0:
                nbytes, farthest = nbytes + self._nbytes(here), max(farthest, distance)
        return nbytes, farthest

    def _nbytes(self, tokens: int) -> int:
        return self._geometry.nbytes(-(-tokens // self._block_tokens))

    def _look_whether_late(self, lookup: Lookup) -> None:
        """Gives a lease up that takes longer than expected, by some of what computing takes, from when the engine waits
        for it. It is given back when it comes; what is in memory by now is asked for anew."""
        if lookup.late_s is None or lookup.turn_s is None:
            return
        if self._clock() - max(lookup.leasing_s, lookup.turn_s) <= lookup.late_s:
            return
        self.abandoned += 1
        if self._cost is not None:  # it takes longer yet
            self._cost.observe_load(lookup.distance, lookup.far_bytes, self._clock() - lookup.leasing_s)
        self._let_go(lookup)
        lookup.slow = True
        lookup.seen_s = -float("inf")

    def _let_go(self, lookup: Lookup) -> None:
        if lookup.leasing is not None:
            # Not cancelled: who cancels does not learn of a lease that was granted at that moment.
            lookup.leasing.add_done_callback(self._give_back)
            lookup.leasing = None
            self._leased(lookup, -1)
        if lookup.lease is not None:
            self._leased(lookup, -1)
            if lookup.lease.blocks:
                self._link.give_back(lookup.lease)
            lookup.lease = None

    def _give_back(self, leasing: Future[AsyncLease]) -> None:
        lease = self._result(leasing)
        if lease is not None and lease.blocks:
            self._link.give_back(lease)

    def _result(self, future: Future[Any]) -> Any:
        """The answer; None when there is none, which the log says now and then."""
        if future.cancelled():
            return None
        error = future.exception()
        if error is None:
            return future.result()
        if not isinstance(error, LinkDown | ClientError):
            self._link.log.error("prefixd: a question to the daemon failed", exc_info=error)
        elif isinstance(error, ClientError) and self._clock() - self._complained_s > _COMPLAINT_S:
            self._complained_s = self._clock()
            self._link.log.warning("prefixd refuses: %s", error)
        return None
