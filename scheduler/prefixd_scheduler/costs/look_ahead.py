"""Decides for how many requests ahead of their turns the prefixes are brought up."""

from __future__ import annotations

import math
from collections.abc import Callable

from prefixd_scheduler.costs.cost import CostModel
from prefixd_scheduler.distance import Distance

MOST = 64
"""A dispatch looks at every request of its window: some 40 us for each."""
_UNKNOWN = 16  # until a load and a few hand-overs were seen
_SPARE = 2.0  # a load may take twice as long as estimated
_SMOOTHING = 1 / 32


class LookAhead:
    """Measures how fast requests are handed over, and how far ahead of their turns the loads have to begin.

    The paper's N (`prefix_cache_long_term_memory`, V.G) "is based on system capacity". Here: a load of l seconds is
    over in time if it begins l seconds before its request's turn. If a request is handed over every h seconds, these
    are l / h requests. The number of running requests is added, because they may all end at once.

    Args:
        cost: estimates the time of a load.
        clock: seconds.
        fixed: uses this number instead; 0 brings nothing up ahead of its turn.

    Attributes:
        interval_s: mean seconds between two hand-overs while requests wait; None before it was measured.
    """

    def __init__(self, cost: CostModel, clock: Callable[[], float], fixed: int | None = None) -> None:
        self._cost = cost
        self._clock = clock
        self._fixed = fixed
        self.interval_s: float | None = None
        self._mean_bytes: dict[Distance, tuple[float, float]] = {}  # moved and decoded bytes of a load
        self._last_s: float | None = None  # the last hand-over, if others waited then

    def handed_over(self, others_wait: bool) -> None:
        """A request was handed over. Only if others wait, the time until the next hand-over is measured."""
        now_s = self._clock()
        if self._last_s is not None:
            gap_s = now_s - self._last_s
            mean_s = gap_s if self.interval_s is None else self.interval_s
            self.interval_s = mean_s + _SMOOTHING * (gap_s - mean_s)
        self._last_s = now_s if others_wait else None

    def loads(self, distance: Distance, nbytes: int, decoded_bytes: int = 0) -> None:
        """A load from `distance` begins, with bytes as in `CostModel.observe_load`."""
        moved, decoded = self._mean_bytes.get(distance, (float(nbytes), float(decoded_bytes)))
        self._mean_bytes[distance] = (
            moved + _SMOOTHING * (nbytes - moved),
            decoded + _SMOOTHING * (decoded_bytes - decoded),
        )

    @property
    def load_s(self) -> float | None:
        """Estimated seconds of a mean load from the slowest tier; None if none was observed."""
        seconds = (
            self._cost.load_s(int(moved), distance, decoded_bytes=int(decoded))
            for distance, (moved, decoded) in self._mean_bytes.items()
        )
        return max((each for each in seconds if each is not None), default=None)

    def requests(self, running: int) -> int:
        """How many requests to look at beyond those that could run now; `running` is how many run at once."""
        if self._fixed is not None:
            return self._fixed
        load_s = self.load_s
        if load_s is None or self.interval_s is None:
            return min(MOST, max(_UNKNOWN, running))
        if load_s >= MOST * self.interval_s:  # also if the interval is 0
            return MOST
        return min(MOST, running + math.ceil(_SPARE * load_s / self.interval_s))

    def until_turn_s(self, places: int) -> float:
        """Estimated seconds until `places` requests have been handed over; 0 while unknown."""
        return max(0, places) * (self.interval_s or 0.0)
