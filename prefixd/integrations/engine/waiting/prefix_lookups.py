"""Looks up the cached prefixes of waiting requests in the scheduler, and leases the blocks that are to be loaded.

A step waits for the daemon at most `patience_s`: calls run in the link's thread, and the engine asks again in a later
step while an answer is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.client import AsyncLease, ClientError, MatchResult, NamespaceSpec, Tier, within_request, within_trace
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.engine.waiting.computing_once import ComputingOnce
from prefixd.integrations.engine.waiting.lookup_state import Lookup
from prefixd.integrations.engine.waiting.match_batches import MatchBatches
from prefixd.integrations.engine.waiting.ready import plan_prefix
from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import CostModel, Distance, LookAhead

_FRESH_S = 1.0  # age up to which an answer is used
_RENEWALS = 4  # old answers that are renewed at a time, however many requests wait: a step must not pay for hundreds
_LEASE_S = 30.0
_LEASES = 32
_LEASED_SLICES = 2
"""Slices that may be leased before another lease is asked for. Three at most are leased then: a quarter of the daemon's
memory is left for loads, which lease slices of their own."""
_ROOM_S = 1.0  # after a request's turn, time in which its lease may find no room before it is computed
_ROOM_PAUSE_S = 0.02
_PATIENCE = 0.1
_LEAST_PATIENCE_S = 0.02
"""A lease may be late by 10% of the time of computing its tokens, and by 20 ms in any case."""
_COMPLAINT_S = 60.0  # at least between two log lines about a daemon that refuses

_DISTANCES = {
    Tier.GPU: Distance.CPU,
    Tier.CPU: Distance.CPU,
    Tier.DISK: Distance.DISK,
    Tier.REMOTE: Distance.REMOTE,
}
"""By tier of the daemon. Blocks in the daemon's own GPU tier come to an engine through the CPU tier."""


class Lookups:
    """Asks the daemon about prompts, ahead of their turn and at it.

    Args:
        link: the connection to the daemon.
        geometry: how prefixd blocks are made of the engine's.
        look_ahead: decides how many prompts are prefetched from disk at a time.
        cost: decides how much of a prefix is loaded; None: all of it, however long that takes.
        clock: seconds, monotonic.
        once: claims what is computed at requests' turns, and waits for other engines' claims; None: each engine
            computes for itself.
        unleased_s: age up to which a match in the daemon's memory needs no lease at the request's turn: the load has
            a lease of its own anyway, and the engine computes blocks that were evicted meanwhile. 0: always lease.

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
        once: ComputingOnce | None = None,
    ) -> None:
        self._once = once
        self._matches = MatchBatches(link.timeout_s)
        self._link = link
        self._geometry = geometry
        self._block_tokens = geometry.block_tokens
        self._look_ahead = look_ahead
        self._cost = cost
        self._clock = clock
        # With windows a load fails as a whole if one block is missing.
        self._unleased_s = 0.0 if geometry.needs_end else unleased_s
        self.abandoned = 0
        self._lookups: dict[str, Lookup] = {}
        self._waiting: set[str] = set()  # requests before their turn
        self._ahead: set[str] = set()  # requests with a prefetched prompt
        self._line: dict[str, None] = {}  # requests that may be prefetched next, in order of arrival
        self._complained_s = -float("inf")
        self._leases = self._leased_blocks = 0
        self._renewals: list[Future[SeenPrefix]] = []
        self.patience_s = 0.0
        """How long this step may still wait for answers; set for each step."""
        self.idle = True
        """Whether the step computes nothing. A step that computes waits for an answer only once: otherwise a slow
        answer, as from disk, would delay every step until it comes."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._lookups

    @property
    def prefetched(self) -> int:
        """How many prompts are prefetched at a time."""
        return self._look_ahead.requests(0)

    def note_turn(self, request_id: str) -> None:
        """Notes that the engine has begun the request."""
        if request_id in self._waiting:
            self._waiting.discard(request_id)
            self._look_ahead.handed_over(bool(self._waiting))

    def add(
        self, request_id: str, spec: NamespaceSpec, tokens: Sequence[int], *, saved: bool = True, traceparent: str = ""
    ) -> None:
        """Adds a request: starts a match of its prompt, and prefetches the prefix if it is among the next ones.

        `saved`: what is computed of it will be saved, so that other engines may wait for it. `traceparent`: the span of
        the engine's caller; empty: unknown.
        """
        self.forget(request_id)
        lookup = Lookup(request_id, spec, self._usable(tokens), claims=saved, traceparent=traceparent)
        self._lookups[request_id] = lookup
        self._waiting.add(request_id)
        self._start_match(request_id, lookup)

    def seen(self, request_id: str) -> SeenPrefix | None:
        """The last answer about the request's prompt; renews an old one, for a few requests at a time. Never waits."""
        lookup = self._lookups.get(request_id)
        if lookup is None:
            return None
        self._read_results(lookup)
        if lookup.asking is None and self._clock() - lookup.seen_s > _FRESH_S:
            self._renewals = [renewal for renewal in self._renewals if not renewal.done()]
            if len(self._renewals) < _RENEWALS and (renewal := self._start_match(request_id, lookup)) is not None:
                self._renewals.append(renewal)
        return lookup.seen

    def loadable_tokens(self, request_id: str, local_tokens: int, most_tokens: int) -> int | None:
        """How many tokens beyond `local_tokens` to load; None: ask again, the answer is under way.

        Tokens that it returns are leased, or were in memory a moment ago. Their number is the one for which loading is
        faster than computing, by the observed times of both. A lease that takes longer than computing is given up, and
        blocks that came to memory meanwhile are loaded.

        Args:
            local_tokens: tokens that the engine's own cache holds.
            most_tokens: most tokens of the prompt that the engine can load.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or not self._link.up:
            return 0
        if lookup.turn_s is None:
            lookup.turn_s = self._clock()
        return self._loadable_tokens(request_id, lookup, local_tokens, most_tokens, self._unleased_s)

    def _loadable_tokens(
        self, request_id: str, lookup: Lookup, local_tokens: int, most_tokens: int, unleased_s: float
    ) -> int | None:
        self._read_results(lookup)
        if lookup.refused:
            return 0
        prepared = lookup.lease is not None or lookup.leasing is not None
        if prepared and lookup.seen is not None and not self._may_compute(lookup, lookup.seen, local_tokens):
            return None
        if lookup.lease is not None and lookup.lease.remaining_s < _LEASE_S / 2:
            self._end_lease(lookup)
        if lookup.lease is None and lookup.leasing is None:
            if self._clock() - lookup.seen_s > _FRESH_S:
                self._start_match(request_id, lookup)
            if lookup.asking is not None and not self._wait_for_answer(lookup):
                return None
            if lookup.seen is None:  # no answer: the daemon is away
                return 0
            if not self._may_compute(lookup, lookup.seen, local_tokens):
                return None
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
            self._start_lease(lookup, first_block, -(-end // self._block_tokens))
        if lookup.leasing is not None and not self._wait_for_answer(lookup):
            self._give_up_late_lease(lookup)
            return None
        if lookup.lease is None:
            return self._without_lease(lookup)
        end = lookup.end_block * self._block_tokens
        if lookup.lease.first_block * self._block_tokens > local_tokens:  # the engine has lost some meanwhile
            self._end_lease(lookup)
            return None
        return max(0, min(end, most_tokens) - local_tokens)

    def prepare(self, request_id: str, local_tokens: int, most_tokens: int) -> None:
        """Starts the match and lease of `loadable_tokens` before the request's turn; arguments as there. Never waits.

        Half of the leases are left for requests at their turn.
        """
        lookup = self._lookups.get(request_id)
        if lookup is None or not self._link.up or not self._may_lease(_LEASES // 2, _LEASED_SLICES // 2):
            return
        patience_s, self.patience_s = self.patience_s, 0.0
        self._loadable_tokens(request_id, lookup, local_tokens, most_tokens, 0.0)
        self.patience_s = patience_s

    def end_partial_lease(self, request_id: str) -> None:
        """Ends the lease, once the workers have the load job, if it has only a part of the load: it would keep memory
        from the workers' next slices."""
        lookup = self._lookups[request_id]
        lease = lookup.lease
        if lease is not None and lease.first_block + lease.blocks < lookup.end_block:
            self._end_lease(lookup)

    def take_counted_match(self, request_id: str) -> MatchResult | None:
        """Returns the match that counted the prompt as asked for, for its first load; None for later loads."""
        lookup = self._lookups[request_id]
        found, lookup.found = lookup.found, None
        return found

    def sources(self, request_id: str, local_tokens: int, tokens: int) -> dict[Distance, int]:
        """The tiers of `tokens` tokens beyond `local_tokens`, at the time of the last answer: tokens by distance."""
        lookup = self._lookups.get(request_id)
        seen = None if lookup is None else lookup.seen
        return (seen or NOTHING_SEEN).sources(local_tokens, tokens)

    def lease_s(self, request_id: str) -> float:
        """Seconds that the daemon took for the request's lease, reading from disk included."""
        return self._lookups[request_id].lease_s

    def waited_s(self, request_id: str) -> float | None:
        """Seconds since the engine first asked how much to load for the request; None for a request that is gone."""
        lookup = self._lookups.get(request_id)
        return None if lookup is None or lookup.turn_s is None else self._clock() - lookup.turn_s

    def refuse(self, request_id: str) -> None:
        """Loads nothing more for a request: it has its prefix, or a load failed."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            lookup.refused = True
            self._end_lease(lookup)
            self._prefetch_next(request_id)

    def note_preempted(self, request_id: str, tokens: Sequence[int]) -> None:
        """Allows loads again for a preempted request, which needs its prefix, by now of `tokens`, once more."""
        lookup = self._lookups.get(request_id)
        if lookup is not None and not lookup.failed:
            lookup.tokens = self._usable(tokens)
            lookup.refused = lookup.slow = False
            lookup.turn_s = None
            lookup.seen_s = -float("inf")

    def note_failed_load(self, request_id: str) -> None:
        """Forbids loads for a request after a failed one; the engine computes its prefix."""
        lookup = self._lookups.get(request_id)
        if lookup is not None:
            lookup.failed = True
            self.refuse(request_id)

    def forget(self, request_id: str, computed_tokens: int = 0) -> None:
        """Drops the look-up of a request that has ended, with the KV of its first `computed_tokens` tokens."""
        lookup = self._lookups.pop(request_id, None)
        self._waiting.discard(request_id)
        self._line.pop(request_id, None)
        self._prefetch_next(request_id)
        if lookup is not None:
            self._end_lease(lookup)
            if self._once is not None and lookup.claiming is not None:
                self._once.end(lookup.claiming, computed_tokens)
            if lookup.asking is not None:
                lookup.asking.cancel()

    def clear(self) -> None:
        """Drops all look-ups."""
        self._line.clear()
        for request_id in list(self._lookups):
            self.forget(request_id)

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _slice_blocks(self) -> int:
        """Most blocks of one lease: a quarter of the daemon's memory."""
        return self._link.slice_blocks(self._geometry.block_bytes)

    def _may_lease(self, leases: int, slices: int) -> bool:
        """Whether fewer than `leases` are held, with less than `slices` full slices in them."""
        return self._leases < leases and self._leased_blocks < slices * self._slice_blocks

    def _usable(self, tokens: Sequence[int]) -> npt.NDArray[np.uint32]:
        """The token ids to match. With windows only the loadable ones: the daemon answers with the longest length that
        every group allows, and a lease for that length lacks window bytes that a shorter prefix needs."""
        if self._geometry.needs_end:
            tokens = tokens[: self._geometry.most_loadable(len(tokens))]
        return np.asarray(tokens, np.uint32)

    def _start_match(self, request_id: str, lookup: Lookup) -> Future[SeenPrefix] | None:
        """Starts a match unless one is under way; returns it. None without the daemon or a full block to match."""
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

        async def match_prefix() -> SeenPrefix:
            cache = await self._link.cache(lookup.spec)
            match = await self._matches.match(cache, lookup.tokens, counted=first)
            if first:
                lookup.found = match
            if ahead and match.blocks_in(Tier.DISK) + match.blocks_in(Tier.REMOTE):
                await cache.prefetch(lookup.tokens)
            return SeenPrefix(
                match.blocks * self._block_tokens,
                tuple((_DISTANCES[run.tier], run.blocks * self._block_tokens) for run in match.runs),
            )

        lookup.asked_s = self._clock()
        lookup.asking = self._link.start(match_prefix)
        return lookup.asking

    def _prefetch_next(self, gone: str) -> None:
        """Prefetches the next prompts in line in place of that of `gone`."""
        if gone not in self._ahead:
            return
        self._ahead.discard(gone)
        while self._line and len(self._ahead) < self.prefetched:
            request_id = next(iter(self._line))
            del self._line[request_id]
            lookup = self._lookups[request_id]
            if not lookup.refused:
                self._ahead.add(request_id)
                self._prefetch(lookup)

    def _prefetch(self, lookup: Lookup) -> None:
        async def prefetch() -> int:
            cache = await self._link.cache(lookup.spec)
            return await cache.prefetch(lookup.tokens)

        # The next match shows whether the blocks came.
        self._link.start(prefetch).add_done_callback(self._result_of)

    def _start_lease(self, lookup: Lookup, first_block: int, end_block: int) -> None:
        """Asks for a lease of the first slice of the blocks `first_block` to `end_block`."""
        max_blocks = min(end_block - first_block, self._slice_blocks)
        lookup.end_block, lookup.leased_blocks = end_block, max_blocks
        self._count_lease(lookup, 1)
        lookup.leasing_s = began_s = self._clock()

        async def acquire() -> AsyncLease:
            cache = await self._link.cache(lookup.spec)
            with within_request(lookup.request_id), within_trace(lookup.traceparent):
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
        lookup.leasing = self._link.start(acquire, self._link.limit_s(nbytes))

    def _may_compute(self, lookup: Lookup, seen: SeenPrefix, local_tokens: int) -> bool:
        """Whether the request may compute what `seen` lacks: False while it claims that, or while another engine does
        it, and if more is cached since then."""
        once = self._once
        if once is None or lookup.turn_s is None or not lookup.claims:
            return True
        if lookup.claiming is None:
            known = max(seen.tokens, local_tokens)
            lookup.claiming = once.begin(lookup.spec, lookup.tokens, known)
        claiming = lookup.claiming
        while not once.read(claiming):
            if not self._wait_for_answer(lookup, claiming.call):
                return False
        if claiming.cached_tokens > seen.tokens:
            claiming.cached_tokens = 0
            self._end_lease(lookup)
            lookup.turn_s, lookup.seen_s = self._clock(), -float("inf")
            return False
        return True

    def _wait_for_answer(self, lookup: Lookup, claim: Future[Any] | None = None) -> bool:
        """Waits for the answer under way while this step's patience lasts; returns whether it came."""
        future: Future[Any] | None = claim or lookup.asking or lookup.leasing
        assert future is not None
        if self.patience_s > 0 and (self.idle or future is not lookup.waited_for):
            lookup.waited_for = future
            began_s = self._clock()
            with suppress(NotYet, CancelledError):
                future.exception(self.patience_s)
            self.patience_s -= self._clock() - began_s
        self._read_results(lookup)
        return future.done()

    def _read_results(self, lookup: Lookup) -> None:
        """Reads the results of calls that have ended."""
        if lookup.asking is not None and lookup.asking.done():
            seen = self._result_of(lookup.asking)
            lookup.asking = None
            lookup.seen_s = self._clock()
            if seen is not None:
                lookup.seen = seen
        if lookup.leasing is not None and lookup.leasing.done():
            lookup.lease = self._result_of(lookup.leasing)
            lookup.leasing = None
            if lookup.lease is None:
                self._count_lease(lookup, -1)
                lookup.refused = True
            elif not lookup.lease.blocks:
                self._handle_empty_lease(lookup, lookup.lease.cached_blocks)
            else:
                lease = lookup.lease  # an older daemon does not report `cached_blocks`
                lookup.end_block = min(lookup.end_block, lease.cached_blocks or lease.first_block + lease.blocks)

    def _handle_empty_lease(self, lookup: Lookup, cached_blocks: int) -> None:
        """Handles a lease without blocks: evicted blocks, or no room for the `cached_blocks`."""
        self._count_lease(lookup, -1)
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
    def _without_lease(lookup: Lookup) -> int | None:
        """The result of `loadable_tokens` without a lease: 0 if none is possible, None to ask again."""
        return 0 if lookup.refused or lookup.seen is NOTHING_SEEN else None

    def _count_lease(self, lookup: Lookup, by: int) -> None:
        """Counts one lease more (`by` = 1) or less (-1)."""
        self._leases += by
        self._leased_blocks += by * lookup.leased_blocks

    def _worth_loading(self, lookup: Lookup, seen: SeenPrefix, local_tokens: int) -> int:
        """The token up to which loading the prefix pays; sets the time after which the lease is late."""
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
        """Bytes of the prefix between two lengths that are on disk or farther away, and their farthest tier."""
        at, nbytes, farthest = 0, 0, Distance.DISK
        for distance, tokens in seen.runs:
            at += tokens
            here = min(tokens, at - begin, end - (at - tokens))
            if distance >= Distance.DISK and here > 0:
                nbytes, farthest = nbytes + self._nbytes(here), max(farthest, distance)
        return nbytes, farthest

    def _nbytes(self, tokens: int) -> int:
        return self._geometry.nbytes(-(-tokens // self._block_tokens))

    def _give_up_late_lease(self, lookup: Lookup) -> None:
        """Gives a lease up that the engine has awaited longer than `late_s`. The lease is released when it comes; a new
        match finds the blocks that are in memory by now."""
        if lookup.late_s is None or lookup.turn_s is None:
            return
        if self._clock() - max(lookup.leasing_s, lookup.turn_s) <= lookup.late_s:
            return
        self.abandoned += 1
        if self._cost is not None:  # the lease takes at least so long
            self._cost.observe_load(lookup.distance, lookup.far_bytes, self._clock() - lookup.leasing_s)
        self._end_lease(lookup)
        lookup.slow = True
        lookup.seen_s = -float("inf")

    def _end_lease(self, lookup: Lookup) -> None:
        if lookup.leasing is not None:
            # Not cancelled: a lease that is granted at that moment would never be released.
            lookup.leasing.add_done_callback(self._release_late_lease)
            lookup.leasing = None
            self._count_lease(lookup, -1)
        if lookup.lease is not None:
            self._count_lease(lookup, -1)
            if lookup.lease.blocks:
                self._link.give_back(lookup.lease)
            lookup.lease = None

    def _release_late_lease(self, leasing: Future[AsyncLease]) -> None:
        lease = self._result_of(leasing)
        if lease is not None and lease.blocks:
            self._link.give_back(lease)

    def _result_of(self, future: Future[Any]) -> Any:
        """The result of a call; None if it failed, with a log line at most every `_COMPLAINT_S`."""
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
