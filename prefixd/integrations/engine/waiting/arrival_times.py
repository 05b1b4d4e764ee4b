"""When an engine's requests arrived, by a clock that nobody sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

FRONT_END_S = 60.0
"""A request is in the engine's front end, which reads its text and images, for at most so long."""


class StampedRequest(Protocol):
    """What is read of an engine's request."""

    arrival_time: float


class Arrivals:
    """An engine stamps requests in its front end, in seconds since 1970, where no other process can be sure of the
    clock: it may be set by a day at any moment. So what the stamp says counts once, when the request comes to the
    scheduler; how long it waits there is measured by `clock`. If the wall clock is set while a request is in the front
    end, its arrival is wrong by at most `FRONT_END_S`.

    Args:
        clock: seconds, by a clock that nobody sets.
        wall: seconds since 1970, as in the stamps.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._known: WeakKeyDictionary[StampedRequest, float] = WeakKeyDictionary()

    def arrival_s(self, request: StampedRequest) -> float:
        """When it arrived, on `clock`: the same however often that is asked."""
        known = self._known.get(request)
        if known is None:
            age_s = min(max(self._wall() - request.arrival_time, 0.0), FRONT_END_S)
            known = self._known[request] = self._clock() - age_s
        return known
