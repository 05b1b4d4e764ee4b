"""Brings the prefixes of the requests that are next to the GPU tier, before their turn comes.

Paper `prefix_cache_long_term_memory`, V.G: what matters for throughput is less who is evicted than that the prefixes of
the next requests are on their way early enough.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import numpy as np

from prefixd.cache import CPU, DISK, GPU, TieredCache
from prefixd.cache.index.trie import Rows
from prefixd.server.load_meter import LoadMeter
from prefixd.server.request import Request
from prefixd.server.tracker import PrefixTracker
from prefixd_scheduler import CostModel, Distance
from prefixd_swap import SwapError

log = logging.getLogger(__name__)

_RETRY_S = 0.02
_SETBACKS = 8


class Prefetcher:
    """Stages waiting requests: holds their prefixes in the GPU tier and brings up what is missing there.

    Args:
        cache: the cache.
        tracker: finds prefixes again; None when nothing is cached.
        cost: learns what loading costs, and says whether it pays.
        clock: seconds.
        look: called when a request may have become ready.
        recompute_if_slower: compute a cached prefix again where loading it would take longer.
    """

    def __init__(
        self,
        cache: TieredCache,
        tracker: PrefixTracker | None,
        cost: CostModel,
        clock: Callable[[], float],
        look: Callable[[], None],
        *,
        recompute_if_slower: bool,
    ) -> None:
        self._cache = cache
        self._mover = cache.mover
        self._tracker = tracker
        self._cost = cost
        self._meter = LoadMeter(clock)
        self._clock = clock
        self._look = look
        self._recompute_if_slower = recompute_if_slower

    def stage(self, request: Request) -> None:
        """Holds the request's prefix in the GPU tier and starts bringing up what is missing there."""
        trie = request.trie
        request.cut = False
        if self._recompute_if_slower:
            found = len(request.rows)
            request.rows = self._worth_loading(request)
            request.cut = len(request.rows) < found
        tiers = trie.nearest[request.rows]
        if request.hit_tokens is None or not request.resumed:
            request.hit_tokens = [int((tiers == tier).sum()) * trie.block_tokens for tier in (GPU, CPU, DISK)]
        trie.hold(request.rows, GPU)
        trie.touch(request.rows, self._clock())
        request.staged = True
        request.staging = None
        if len(trie.missing(request.rows, GPU)):
            request.staging = asyncio.create_task(self._bring(request, int(tiers.max())))

    async def _bring(self, request: Request, distance: int) -> None:
        trie, rows = request.trie, request.rows
        missing = len(trie.missing(rows, GPU))
        there = 0
        mark = self._meter.begin()
        try:
            there = await self._mover.bring(trie, rows, GPU)
        except SwapError as error:
            log.error("the prefix of request %s could not be brought up: %s", request.name, error)
        finally:
            elapsed_s = self._meter.end(mark)
            if there == len(rows):
                self._cost.observe_load(Distance(distance), missing * trie.part_bytes[0], elapsed_s)
                self._look()
            else:
                self._set_back(request, rows, there)

    def _set_back(self, request: Request, rows: Rows, there: int) -> None:
        """A prefix came up in part: a block was damaged, or frames were short for the moment.

        It is looked up and staged again. When that does not help either, what is missing is computed.
        """
        request.setbacks += 1
        if request.setbacks < _SETBACKS:
            request.staging = None
            self.unstage(request)
            asyncio.get_running_loop().call_later(_RETRY_S, self._look)
        else:
            self._cache.unhold(request.trie, rows[there:], GPU)
            request.rows = rows[:there]
            request.cut = True
            self._look()

    def unstage(self, request: Request) -> None:
        """Ends the hold on a request's prefix and looks it up anew; its blocks stay where they are."""
        if request.staged:
            request.staged = False
            self._cache.unhold(request.trie, request.rows, GPU)
            request.forget_rows()
            if self._tracker is not None:
                self._tracker.look_up(request)

    def unstage_all_but(self, head: Request, waiting: Iterable[Request]) -> None:
        """`head` lacks frames: those who wait behind it may not keep theirs. Looks again soon."""
        for request in waiting:
            if request is not head and request.ready:
                self.unstage(request)
        asyncio.get_running_loop().call_later(_RETRY_S, self._look)

    def _worth_loading(self, request: Request) -> Rows:
        """The prefix up to the first tier that is slower to load from than to compute."""
        trie, rows = request.trie, request.rows
        tiers = trie.nearest[rows]
        for distance in (Distance.CPU, Distance.DISK):
            far = np.flatnonzero(tiers >= distance)
            if len(far) and (tiers[far] == distance).any():
                nbytes = int((tiers == distance).sum()) * trie.part_bytes[0]
                tokens = (len(rows) - int(far[0])) * trie.block_tokens
                if not self._cost.load_pays(tokens, nbytes, distance):
                    return rows[: int(far[0])]
        return rows

    def grew(self, request: Request) -> bool:
        """Whether somebody computed more of the prefix since it was staged."""
        if self._tracker is None or request.cut or request.next_key not in request.trie:
            return False
        match = request.trie.match(request.namespace.root, request.chain, request.usable_blocks)
        return len(match) > len(request.rows)
