"""Loads what is missing of a staged request's prefix to the GPU tier."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from prefixd.cache import TieredCache
from prefixd.cache.index.trie import Rows
from prefixd.server.load_meter import LoadMeter
from prefixd.server.request import Request, RequestState
from prefixd_scheduler import CostModel, Distance
from prefixd_swap import SwapError
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_RETRY_S = 0.02
_SETBACKS = 8


class Loader:
    """Carries out the loads of the requests that are staged.

    Args:
        cache: the cache.
        staged: the requests that are staged, by id; one that was withdrawn is taken out when its load ends.
        cost: learns what loading costs, and says whether it pays.
        clock: seconds.
        look: called when a request may have become ready.
        unstage: ends the hold of a request that waits on.
    """

    def __init__(
        self,
        cache: TieredCache,
        staged: dict[int, Request],
        cost: CostModel,
        clock: Callable[[], float],
        look: Callable[[], None],
        unstage: Callable[[Request], None],
    ) -> None:
        self._cache = cache
        self._mover = cache.mover
        self._staged = staged
        self._cost = cost
        self._meter = LoadMeter(clock)
        self._look = look
        self._unstage = unstage
        self._copies: dict[int, asyncio.Task[None]] = {}

    async def stop(self) -> None:
        """Waits for the copies under way."""
        await asyncio.gather(*self._copies.values(), return_exceptions=True)

    def start(
        self, request: Request, distance: Distance, nbytes: int, urgency: Urgency, due_s: float | None = None
    ) -> None:
        """Starts bringing up what a request that is STAGING lacks: so many bytes, the farthest from `distance`.

        `due_s`: when its turn comes, on the clock of the transfers.
        """
        self._copies[request.id] = asyncio.create_task(self._bring(request, distance, nbytes, urgency, due_s))

    async def _bring(
        self, request: Request, distance: Distance, nbytes: int, urgency: Urgency, due_s: float | None
    ) -> None:
        there = 0
        mark = self._meter.begin()
        try:
            compute = self._cache.tiers.compute
            if (images := request.image_holds) is not None:
                await self._mover.bring(images.kv.trie, images.held, compute, urgency=urgency, due_s=due_s)
            there = await self._mover.bring(
                request.trie, request.rows, compute, request.wanted, urgency=urgency, due_s=due_s
            )
        except SwapError as error:
            log.error("the prefix of request %s could not be brought up: %s", request.name, error)
        finally:
            elapsed_s = self._meter.end(mark)
            if there == len(request.rows):
                self._cost.observe_load(distance, nbytes, elapsed_s)
            self._arrived(request, there)

    def _arrived(self, request: Request, there: int) -> None:
        """A copy has ended, and so many blocks of the prefix are in the GPU tier."""
        del self._copies[request.id]
        if request.state is RequestState.WITHDRAWN:
            del self._staged[request.id]
            request.let_go()
            self._look()
        elif there == len(request.rows) and (request.image_holds is None or request.image_holds.complete):
            request.staged()
            self._look()
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
            request.footprint.shorten(there)
            while (blocks := request.uncut(len(request.rows))) < len(request.rows):
                request.footprint.shorten(blocks)
            if request.image_holds is not None:
                request.image_holds.let_go_of_missing()
            request.cut = True
            request.staged()
            self._look()

    def worth_loading(self, request: Request) -> Rows:
        """The prefix up to the first tier that is slower to load from than to compute."""
        trie, rows = request.trie, request.found
        needed, nearer = trie.needed(len(rows)), np.zeros(len(rows), np.uint8)
        for distance in (Distance.CPU, Distance.DISK):
            nearer |= trie.there[rows, distance - 1]
            loaded = needed & ~nearer & trie.there[rows, distance]
            if loaded.any():
                kept = request.usable(rows, nearer)
                tokens = (len(rows) - len(kept)) * trie.block_tokens
                if not self._cost.load_pays(tokens, int(trie.group_bytes[loaded].sum()), distance):
                    return kept
        return rows
