"""The prefetcher's second stage: prefixes that are on disk alone come to the CPU tier while the GPU tier has no room.

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
from prefixd.serving.loading.load_choice import LoadClaims, LoadMeter
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd_scheduler import Distance
from prefixd_swap import SwapError
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

_ROOM_SHARE = 2
"""Half of the CPU tier at most is held for the window: what leaves the GPU tier needs room there, too."""
_SPARE = 1.5
"""So much longer than estimated a load may take and still be over in time."""


@dataclass(slots=True, eq=False)
class _Near:
    """A request of which the CPU tier holds, or gets, what the GPU tier lacks.

    Attributes:
        request: waits for its turn.
        rows, groups: what the GPU tier lacks.
        hold: of these in the CPU tier.
        round: the last look at the window in which it was there.
        complete: all of it has been in the CPU tier, which holds it since.
        copy: brings what is lacking.
    """

    request: Request
    rows: Rows
    groups: GroupMask
    hold: Hold
    round: int
    complete: bool = False
    copy: asyncio.Task[None] | None = None


class CpuStage:
    """Holds in the CPU tier what requests beyond the GPU tier's room will need, and brings up what is on disk alone.

    What is held is not evicted, so room is made from what the window does not need (paper, V.G). Nothing is begun that
    would not help: a load that is over in time anyway when it begins with the GPU tier's room. A request that leaves
    the window loses its hold, and what was not yet moved for it alone is left where it is.

    Images of a request are left to its turn.

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
        self._ahead_bytes = 0  # on disk, of the requests before this one in the window

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
        """A new look at the window begins: `keep` or `add` say who is in it, in the order of their turns; `time_s`:
        how long it takes until the GPU tier has room for the first of them."""
        self._round += 1
        self._time_s = time_s
        self._ahead_bytes = 0
        self._budget.begin_round()

    def keep(self, request: Request) -> bool:
        """A request beyond the GPU tier's room of which everything is held here; False where it has to be added."""
        near = self._near.get(request.id)
        if near is None or not near.complete:
            return False
        near.round = self._round
        return True

    def add(self, request: Request, *, due_s: float, may_read: bool) -> bool:
        """A request beyond the GPU tier's room, of which `found` is exact; False when the CPU tier has no room for it
        while it holds what it holds. Of one that would never fit nothing is brought.

        Args:
            request: waits without a footprint.
            due_s: when its turn comes, on the clock of the transfers.
            may_read: whether the disk is free for it.
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
                return True  # left to its turn; others behind it fit
            use, tenant = self._mover.use, self._mover.use.tenant_of(request.namespace)
            to_hold = use.room_to_hold(tenant, tiers.shared)
            if to_hold is not None and use.held.fresh_bytes(trie, tiers.shared, rows, groups).sum() > to_hold:
                return True  # left to its turn, too; other tenants' fit
            if self._budget.taken + self._budget.weigh(trie, rows, groups) > self._room_bytes:
                return False
            near = self._hold(request, rows, groups)
        near.round = self._round
        lacking = trie.lacking(near.rows, tiers.shared.level, near.groups)
        nbytes = int(trie.group_bytes[lacking].sum())
        near.complete = not nbytes
        if nbytes:
            self._ahead_bytes += nbytes
            if may_read and near.copy is None and not self._is_in_time(_farthest(trie, near.rows[lacking != 0])):
                self._begin(near, due_s)
        return True

    def end_round(self) -> None:
        """Lets go of requests that were not added in this round.

        While a prefix is on its way to the GPU tier, what of it comes by way of the CPU tier goes on.
        """
        for near in list(self._near.values()):
            if near.round != self._round and near.request.state is not RequestState.STAGING:
                self.end(near.request)

    def end(self, request: Request) -> None:
        """Lets go of a request; one that it does not have is left alone."""
        near = self._near.pop(request.id, None)
        if near is None:
            return
        if near.copy is not None:
            near.copy.cancel()
            self._reading.discard(request.id)
        near.hold.end()
        self._budget.remove(near.rows, near.groups)

    async def stop(self) -> None:
        """Lets go of everything and waits for the copies under way."""
        for near in list(self._near.values()):
            self.end(near.request)
        await asyncio.gather(*self._copies, return_exceptions=True)

    @property
    def _most_bytes(self) -> int:
        """What may ever be held."""
        return self._cache.tiers.shared.capacity_bytes // _ROOM_SHARE // max(1, self._share.members)

    @property
    def _room_bytes(self) -> int:
        """What may be held: not what waits to be written, which could only make room by being written at once."""
        capacity_bytes = self._cache.tiers.shared.capacity_bytes
        return min(capacity_bytes // _ROOM_SHARE, capacity_bytes - self._mover.queued[1]) // max(1, self._share.members)

    def _is_in_time(self, distance: Distance) -> bool:
        """Whether this load and those before it in the window are over in time if they begin with the GPU's room."""
        load_s = self._cost.load_s(self._ahead_bytes, distance)
        return load_s is not None and _SPARE * load_s <= self._time_s

    def _hold(self, request: Request, rows: Rows, groups: GroupMask) -> _Near:
        trie, placement = request.trie, self._cache.placement
        # What is in the GPU tier, too, goes after what no request waits for.
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
        """Reads what is on disk alone and not on its way to the GPU tier. What several of these requests wait for, the
        first of them counts."""
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
        near.copy.add_done_callback(partial(self._ended, near, rows[fresh]))

    def _ended(self, near: _Near, claimed: Rows, copy: asyncio.Task[None]) -> None:
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
        mark = self._meter.begin() if claimed.any() else None
        complete = False
        try:
            there = await self._mover.bring(trie, rows, shared, groups, urgency=Urgency.PREFETCH, due_s=due_s)
            complete = there == len(rows)
        except SwapError as error:
            log.error("the prefix of request %s could not be brought to the CPU tier: %s", near.request.name, error)
        finally:
            elapsed_s = 0.0 if mark is None else self._meter.end(mark)
            if complete and mark is not None:
                self._cost.observe_load(distance, int(trie.group_bytes[groups[claimed]].sum()), elapsed_s)


def _farthest(trie: Trie, rows: Rows) -> Distance:
    """From how far away any of some blocks has to be brought."""
    return Distance(int(trie.nearest[rows].max(initial=Distance.DISK)))
