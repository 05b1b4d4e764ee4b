"""The prefetcher's second stage: brings prefixes from disk to the CPU tier while the GPU tier has no room for them.

```
window   r1  r2  r3 | r4  r5  r6  r7 | r8 ...
         GPU's room | CPU's room     | waits
         to the GPU | disk to CPU    |
```
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from prefixd.cache import Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.placement.holds import Hold
from prefixd.cache.rules import GroupMask
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.loading.load_bytes import LoadBytes, bytes_to_load
from prefixd.serving.loading.load_choice import LoadClaims, LoadMeter
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd_scheduler import Distance
from prefixd_swap import SwapError
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_ROOM_SHARE = 2
"""At most half of the CPU tier is held for the window: blocks that leave the GPU tier need room there, too."""
_SPARE = 1.5
"""A load counts as in time if it may take 1.5 times as long as estimated."""


@dataclass(slots=True, eq=False)
class _Near:
    """A request whose prefix is held in the CPU tier, as far as the GPU tier lacks it.

    Attributes:
        request: waits for its turn.
        rows, groups: blocks, and their KV groups, that the GPU tier lacks.
        hold: holds these in the CPU tier.
        round: the last round in which the request was in the window.
        complete: all of these have been in the CPU tier; the hold keeps them there.
        copy: brings those that the CPU tier lacks.
    """

    request: Request
    rows: Rows
    groups: GroupMask
    hold: Hold
    round: int
    complete: bool = False
    copy: asyncio.Task[None] | None = None


class CpuStage:
    """Holds in the CPU tier the prefixes of requests for which the GPU tier has no room yet, and reads them from disk.

    Held blocks are not evicted, so room is made by evicting blocks that the window does not need (paper, V.G). A load
    that would be over in time even if it began when the GPU tier has room is not begun here: it would not help. A
    request that leaves the window loses its hold, and its copies that no other request waits for are cancelled.

    A request's images are loaded at its turn, not here.

    Args:
        context: the dispatcher's.
        coming: blocks that are on their way to the GPU tier.
    """

    def __init__(self, context: DispatchContext, coming: LoadClaims) -> None:
        self._cache = context.cache
        self._mover = context.cache.mover
        self._cost = context.cost
        self._meter = LoadMeter(context.clock)
        self._coming = coming
        self._claims = LoadClaims()
        self._share = context.share
        self._wake = context.wake
        self._budget = FrameBudget(context.cache.tiers.shared.footprint)
        self._near: dict[int, _Near] = {}
        self._copies: set[asyncio.Task[None]] = set()
        self._reading: set[int] = set()
        self._round = 0
        self._time_s = 0.0  # until the GPU tier has room for the requests of this round
        self._ahead_bytes = LoadBytes()  # on disk, of the requests before this one in the window

    def __len__(self) -> int:
        return len(self._near)

    def __contains__(self, request: Request) -> bool:
        return request.id in self._near

    @property
    def held_bytes(self) -> int:
        """Bytes of the CPU tier that are held, or on their way, for waiting requests."""
        return self._budget.taken

    @property
    def reading(self) -> set[int]:
        """Ids of the requests for which the disk is being read."""
        return self._reading

    def begin_round(self, time_s: float) -> None:
        """Begins a round, in which `keep` or `add` is called for each request of the window, in the order of their
        turns. `time_s`: estimated seconds until the GPU tier has room for the first of them."""
        self._round += 1
        self._time_s = time_s
        self._ahead_bytes = LoadBytes()
        self._budget.begin_round()

    def keep(self, request: Request) -> bool:
        """Keeps a request whose prefix is held here completely; False if the request has to be added."""
        near = self._near.get(request.id)
        if near is None or not near.complete:
            return False
        near.round = self._round
        return True

    def add(self, request: Request, *, due_s: float, may_read: bool) -> bool:
        """Holds a request's prefix in the CPU tier and begins to read it. Nothing is read for a prefix that never fits.

        Args:
            request: waits without a footprint; its `found` is exact.
            due_s: when its turn comes, on the clock of the transfers.
            may_read: whether the disk is free for it.

        Returns:
            False if the CPU tier has no room for it beside the present holds.
        """
        tiers, trie = self._cache.tiers, request.trie
        stores = [tier for tier in (tiers.durable, tiers.remote) if tier is not None and tier.readable]
        if not stores or not tiers.exists(tiers.shared):
            return False
        near = self._near.get(request.id)
        if near is None:
            needed = trie.lacking(request.found, tiers.compute.level, request.wanted)
            rows, groups = request.found[needed != 0], needed[needed != 0]
            if int(trie.group_bytes[groups].sum()) > self._most_bytes:
                return True  # loaded at its turn; others behind it may fit
            use, tenant = self._mover.use, self._mover.use.tenant_of(request.namespace)
            to_hold = use.room_to_hold(tenant, tiers.shared)
            if to_hold is not None and use.held.fresh_bytes(trie, tiers.shared, rows, groups).sum() > to_hold:
                return True  # loaded at its turn, too; other tenants' requests may fit
            if self._budget.taken + self._budget.weigh(trie, rows, groups) > self._room_bytes:
                return False
            near = self._hold(request, rows, groups)
        near.round = self._round
        lacking = trie.lacking(near.rows, tiers.shared.level, near.groups)
        nbytes = bytes_to_load(trie, near.rows, lacking)
        near.complete = not nbytes
        if nbytes:
            self._ahead_bytes += nbytes
            if may_read and near.copy is None and not self._is_in_time(_farthest(trie, near.rows[lacking != 0])):
                self._begin(near, due_s)
        return True

    def end_round(self) -> None:
        """Ends the holds of requests that were not in this round.

        A prefix on its way to the GPU tier keeps its hold: a part of it comes by way of the CPU tier.
        """
        for near in list(self._near.values()):
            if near.round != self._round and near.request.state is not RequestState.STAGING:
                self.end(near.request)

    def end(self, request: Request) -> None:
        """Ends the hold of a request and its copy; does nothing for a request without a hold."""
        near = self._near.pop(request.id, None)
        if near is None:
            return
        if near.copy is not None:
            near.copy.cancel()
            self._reading.discard(request.id)
        near.hold.end()
        self._budget.remove(near.rows, near.groups)

    async def stop(self) -> None:
        """Ends all holds and waits for the copies under way."""
        for near in list(self._near.values()):
            self.end(near.request)
        await asyncio.gather(*self._copies, return_exceptions=True)

    @property
    def _most_bytes(self) -> int:
        """The most bytes that may be held at any time."""
        return self._cache.tiers.shared.capacity_bytes // _ROOM_SHARE // max(1, self._share.members)

    @property
    def _room_bytes(self) -> int:
        """The bytes that may be held now. Blocks that wait for write-back cannot make room without being written
        first."""
        capacity_bytes = self._cache.tiers.shared.capacity_bytes
        return min(capacity_bytes // _ROOM_SHARE, capacity_bytes - self._mover.queued[1]) // max(1, self._share.members)

    def _is_in_time(self, distance: Distance) -> bool:
        """Whether this load and those before it in the window are over in time if they begin with the GPU's room."""
        load_s = self._ahead_bytes.load_s(self._cost, distance)
        return load_s is not None and _SPARE * load_s <= self._time_s

    def _hold(self, request: Request, rows: Rows, groups: GroupMask) -> _Near:
        trie, placement = request.trie, self._cache.placement
        # Touched, so that blocks in the GPU tier, too, are evicted after blocks that no request waits for.
        if not request.read_only:
            placement.touch(trie, request.found, request.count_use(len(request.found)))
        owner = f"request {request.name}, ahead"
        shared = self._cache.tiers.shared
        hold = placement.holds.hold(owner, trie, rows, shared, groups, counted=shared)
        self._budget.add(trie, rows, groups)
        near = _Near(request, rows, groups, hold, self._round)
        self._near[request.id] = near
        return near

    def _begin(self, near: _Near, due_s: float) -> None:
        """Reads the blocks that are only on disk and not on their way to the GPU tier. If several requests wait for the
        same block, only the first one counts its bytes."""
        trie, tiers = near.request.trie, self._cache.tiers
        lacking = trie.lacking(near.rows, tiers.shared.level, near.groups)
        lacking &= trie.lacking(near.rows, tiers.compute.level, near.groups)
        read = (lacking != 0) & ~self._coming.claimed(trie, near.rows)
        rows, groups = near.rows[read], lacking[read]
        if not len(rows):
            return
        fresh = self._claims.claim(trie, rows)
        near.copy = asyncio.create_task(self._bring(near, rows, groups, fresh, due_s))
        self._copies.add(near.copy)
        self._reading.add(near.request.id)
        near.copy.add_done_callback(partial(self._end_copy, near, rows[fresh]))

    def _end_copy(self, near: _Near, claimed: Rows, copy: asyncio.Task[None]) -> None:
        self._claims.release(near.request.trie, claimed)
        self._copies.discard(copy)
        if self._near.get(near.request.id) is near:
            self._reading.discard(near.request.id)
        self._wake()

    async def _bring(
        self, near: _Near, rows: Rows, groups: GroupMask, claimed: npt.NDArray[np.bool_], due_s: float
    ) -> None:
        trie, shared = near.request.trie, self._cache.tiers.shared
        distance = _farthest(trie, rows)
        nbytes = bytes_to_load(trie, rows[claimed], groups[claimed])
        mark = self._meter.begin() if claimed.any() else None
        complete = False
        try:
            there = await self._mover.bring(trie, rows, shared, groups, urgency=Urgency.PREFETCH, due_s=due_s)
            complete = there == len(rows)
        except SwapError as error:
            log.error(
                "the prefix of request %s could not be brought to the CPU tier: %s",
                near.request.name,
                error,
                extra={"request_id": near.request.name},
            )
        finally:
            elapsed_s = 0.0 if mark is None else self._meter.end(mark)
            if complete and mark is not None:
                self._cost.observe_load(distance, nbytes.moved, elapsed_s, nbytes.decoded)


def _farthest(trie: Trie, rows: Rows) -> Distance:
    """The farthest tier that one of these blocks has to be brought from."""
    return Distance(int(trie.nearest[rows].max(initial=Distance.DISK)))
