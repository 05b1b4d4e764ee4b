"""When an engine's requests arrived, on a monotonic clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

FRONT_END_S = 60.0
"""The longest time that a request spends in the engine's front end, which reads its text and images."""


class StampedRequest(Protocol):
    """The field of an engine's request that is read here."""

    arrival_time: float


class Arrivals:
    """Turns an engine's wall-clock stamps into times on `clock`.

    The engine's front end stamps requests in seconds since 1970, and an operator may set that clock by a day at any
    moment. So the stamp is read once, when the request comes to the scheduler; its wait there is measured by `clock`.
    If the wall clock is set while a request is in the front end, its arrival is wrong by at most `FRONT_END_S`.

    Args:
        clock: seconds, monotonic.
        wall: seconds since 1970, as in the stamps.
    """

    def __init__(self, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._clock = clock
        self._wall = wall
        self._known: WeakKeyDictionary[StampedRequest, float] = WeakKeyDictionary()

    def arrival_s(self, request: StampedRequest) -> float:
        """When the request arrived, on `clock`; the same at every call."""
        known = self._known.get(request)
        if known is None:
            age_s = min(max(self._wall() - request.arrival_time, 0.0), FRONT_END_S)
            known = self._known[request] = self._clock() - age_s
        return known
