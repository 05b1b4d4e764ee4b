"""Requests that need more frames than the GPU tier has, while it cannot grow: requests that fit pass them.

```
needs more than the tier has --+--> the tier grows: nothing passes it
                               |
                               +--> it cannot grow now (`TierShare.short`): others pass it; it goes on asking
                                      |--> the tier has grown by enough: nothing passes it any more
                                      +--> the device has given no more for 30 s: it ends, and is told (`FrameSupply`)
```

A passed request keeps its place in the queue. The frames that it needs stay noted until it runs or ends, so the tier
does not give them back while it waits for running requests to end.
"""

from __future__ import annotations

from prefixd.serving.dispatch.capacity.frame_supply import FrameSupply
from prefixd.serving.dispatch.capacity.places import GpuQuotas
from prefixd.serving.dispatch.context import DispatchContext
from prefixd.serving.dispatch.tracker import PrefixTracker
from prefixd.serving.request.request import Request
from prefixd_scheduler import QueuedRequest

_MOST = 256
"""So many are passed. Requests behind more of them wait: a round looks at each passed request."""


class PassedRequests:
    """The requests of one model that others have passed.

    Args:
        context: the dispatcher's.
        tracker: knows which requests wait for others to compute a block.
        supply: ends a request for which the device has no memory.
    """

    def __init__(self, context: DispatchContext, tracker: PrefixTracker, supply: FrameSupply) -> None:
        self._cache = context.cache
        self._share = context.share
        self._waiting = context.requests.waiting
        self._tracker = tracker
        self._supply = supply
        self._quotas: GpuQuotas
        self._passed: dict[int, Request] = {}

    def begin_round(self, quotas: GpuQuotas) -> None:
        """Begins a look at the queue."""
        self._quotas = quotas
        self._passed = {number: each for number, each in self._passed.items() if number in self._waiting}

    def passes(self, queued: QueuedRequest) -> bool:
        """Whether requests behind this one pass it in this round."""
        if not self._share.short:
            return False
        request = self._waiting[queued.id]
        if not self._is_too_large(request) or (len(self._passed) >= _MOST and request.id not in self._passed):
            return False
        self._passed[request.id] = request
        return True

    def end_round(self) -> tuple[int, int]:
        """Ends those for which the device has had no memory for too long.

        Returns with how many frames of the tier the others could run, and those that fit by now; 0: there are none.
        """
        lacking = begins = 0
        for number, request in list(self._passed.items()):
            frames = self._quotas.frames_alone(request)
            if self._is_too_large(request):
                self._tracker.stand_alone(request)
                self._supply.note_refused(request, frames)
                lacking = max(lacking, frames if number in self._waiting else 0)
            elif number in self._waiting:
                begins = max(begins, frames)
        return lacking, begins

    def _is_too_large(self, request: Request) -> bool:
        frames = self._cache.tiers.frames
        return self._share.short and frames.lasting < self._quotas.frames_alone(request) <= frames.attainable
