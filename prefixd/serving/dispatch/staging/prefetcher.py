"""Brings the prefixes of the next requests up the tiers before their turns come.

It has two stages, in the policy's order: the prefixes of as many requests as the GPU tier has room for go to the GPU
tier; those of the requests behind them go from disk to the CPU tier (`cpu_stage`).

Paper `prefix_cache_long_term_memory`, V.G: for throughput it matters more to bring the next prefixes up early enough
than to choose the blocks to evict well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.staging.cpu_stage import CpuStage
from prefixd.serving.dispatch.staging.loader import Loader
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.images.image_kv import ImageHolds
from prefixd.serving.loading.load_bytes import LoadBytes, bytes_to_load
from prefixd.serving.request.footprint import Footprint
from prefixd.serving.request.request import Request, hit_tiers
from prefixd.serving.request.request_events import Event
from prefixd.serving.request.states import RequestState
from prefixd.serving.request.worker_run import Run
from prefixd_scheduler import Distance
from prefixd_swap.transfers import Urgency

_RETRY_S = 0.02
_READ_FROM = (Distance.DISK, Distance.REMOTE)
_READS = 4
"""Prefixes that are read from disk at once. With fewer, the disk is idle while each read waits for its latency. More
would only wait for the disk, while a request that needs a prefix sooner may still come."""


class Prefetcher:
    """Stages waiting requests: holds their prefixes in the GPU tier and brings up what is missing there.

    Args:
        context: the dispatcher's.
        tracker: watches the requests that are not staged.
        backlog_s: estimated seconds until the worker has computed the prompts that it has.

    Attributes:
        loader: loads the prefixes of staged requests.
        cpu_stage: the second stage.
    """

    def __init__(self, context: DispatchContext, tracker: PrefixTracker, backlog_s: Callable[[], float]) -> None:
        self._context = context
        self._cache = context.cache
        self._mover = context.cache.mover
        self._tracker = tracker
        self._clock = context.clock
        self._look_ahead = context.look_ahead
        self._staged: dict[int, Request] = {}  # STAGING, READY, or WITHDRAWN while a copy is under way
        self._reading: set[int] = set()  # requests whose loads read from disk; some loads may have ended
        self.loader = Loader(context, self._staged, self.unstage, backlog_s)
        self.cpu_stage = CpuStage(context, self.loader.claims)

    async def stop(self) -> None:
        """Waits for the copies under way."""
        await self.cpu_stage.stop()
        await self.loader.stop()

    # -- one request --------------------------------------------------------------------------------------------

    def stage(self, request: Request, *, demanded: bool, places: int = 0) -> None:
        """Holds a request's cached prefix in the GPU tier, and starts to bring up the blocks that are missing there.

        Args:
            request: its `found` is exact (`PrefixTracker.verify`): the held blocks must be its own.
            demanded: whether the worker would run it now; else this is a prefetch.
            places: how many more requests are handed over before its turn comes.
        """
        turn_s = self._look_ahead.until_turn_s(places)
        trie, rows = request.trie, self.loader.planner.choose(request, demanded=demanded, turn_s=turn_s)
        tiers = trie.distances(rows)
        if not request.resumed:
            request.hit_tiers = hit_tiers(trie, rows, request.tiers_at_arrival(tiers))
        self._tracker.remove(request)
        owner, images = f"request {request.name}", None
        if request.image_kv is not None:
            caching = self._context.caching and (self._context.options.keep_embeddings or request.image_kv.every_row)
            images = ImageHolds(
                self._cache,
                self._context.image_budget,
                owner,
                request.image_kv,
                finding=caching and not request.uncached,
                keeping=caching and request.keeps,
                computed_tokens=len(rows) * trie.block_tokens,
            )
        behind = None if request.beside is None else request.beside.rows
        request.stage(Footprint(self._cache, self._context.budget, owner, trie, rows, images, behind))
        self._staged[request.id] = request
        if not request.read_only:
            if request not in self.cpu_stage:  # else the CPU stage has touched it
                self._cache.placement.touch(trie, rows, request.count_use(len(rows)))
            if images is not None:
                images.touch()
        missing = trie.lacking(rows, self._cache.tiers.compute.level, request.wanted)
        distances, nbytes = [*tiers.tolist()], bytes_to_load(trie, rows, missing)
        if images is not None:
            distances += images.tiers
            nbytes += LoadBytes(images.missing_bytes)
        if nbytes:
            urgency = Urgency.DEMAND if demanded else Urgency.PREFETCH
            distance = Distance(max(distances))
            self._look_ahead.loads(distance, nbytes.moved, nbytes.decoded)
            if distance in _READ_FROM:
                self._reading.add(request.id)
            self.loader.start(request, urgency, self._clock() + turn_s)
        else:
            request.staged()

    def may_bring_ahead(self, request: Request) -> bool:
        """Whether the copies of a waiting request may begin ahead of its turn: not if they read from disk or a shared
        store while 4 others do."""
        if request.farthest not in _READ_FROM:
            return True
        under_way = (RequestState.STAGING, RequestState.WITHDRAWN)
        staged = ((number, self._staged.get(number)) for number in self._reading)
        self._reading = {number for number, request in staged if request is not None and request.state in under_way}
        others = (self._reading | self.cpu_stage.reading) - {request.id}  # its own reads under way do not count
        return len(others) < _READS

    def hurry(self, request: Request) -> None:
        """The turn of a request has come while its prefix is on its way: makes the copies urgent."""
        self.loader.hurry(request)

    def unstage(self, request: Request) -> None:
        """Ends the hold of a request, which goes on waiting; its blocks stay where they are."""
        del self._staged[request.id]
        request.unstage()
        self._tracker.add(request)

    def withdraw(self, request: Request, event: Event) -> None:
        """Ends a request that waits. A copy under way keeps its footprint until it has ended."""
        self.cpu_stage.end(request)
        if request.state is RequestState.STAGING:
            request.withdraw(event)
            return
        self._tracker.remove(request)
        self._staged.pop(request.id, None)
        request.end(event)

    def hand_over(self, request: Request, run: Run, own: list[int]) -> None:
        """Begins the run of a READY request, with `own` frames."""
        request.hand_over(run, own)
        self.cpu_stage.end(request)
        del self._staged[request.id]

    def grew(self, request: Request) -> bool:
        """Whether more of the prefix, or an image of the prompt, was cached since the request was staged."""
        if request.cut:
            return False
        if request.seen_epoch != self._mover.epoch and self._tracker.has_grown(request):
            return True
        return request.image_holds is not None and request.image_holds.grew

    # -- many ---------------------------------------------------------------------------------------------------

    async def keep_only(self, window: Iterable[Request]) -> None:
        """Unstages the READY requests that are not in the window."""
        inside = {request.id for request in window}
        await self.unstage_ready(request for request in self._staged.values() if request.id not in inside)

    async def unstage_all_but(self, head: Request) -> None:
        """Unstages all READY requests but `head`, which lacks frames. Wakes the dispatcher after 20 ms."""
        await self.unstage_ready(request for request in self._staged.values() if request is not head)
        asyncio.get_running_loop().call_later(_RETRY_S, self._context.wake)

    async def unstage_ready(self, requests: Iterable[Request]) -> None:
        """Unstages the READY ones among the requests."""
        for request in list(requests):
            if request.state is RequestState.READY:
                self.unstage(request)
                await self._context.pacer.worked(len(request.found))
