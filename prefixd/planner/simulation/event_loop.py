"""An event loop whose time passes only while everything waits: simulations are exact and take no time."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prefixd_swap import SwapError

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_RESOLUTION_S = 1e-9


class SimulationError(SwapError):
    """A simulation that cannot go on."""


class _TimeSelector(selectors.BaseSelector):
    """Instead of waiting for input, it lets the time of the wait pass."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout <= 0:
            return []  # there is work to do at once; asking the system takes longer than much of it
        ready = self._real.select(0)
        if ready:
            return ready
        if timeout is None:
            raise SimulationError(
                "simulated time stands still: every task waits for something that no timer brings; threads and files "
                "have no part in a simulation"
            )
        self.now_s += max(0.0, timeout)
        return []

    def register(self, fileobj: FileDescriptorLike, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: FileDescriptorLike) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[FileDescriptorLike, selectors.SelectorKey]:
        return self._real.get_map()


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """`time` is the clock and `asyncio.sleep` the way to wait; use it with `asyncio.Runner(loop_factory=...)`.

    The first `time` is 0.0 seconds. When every task waits and no timer is set, `run_until_complete` raises
    `SimulationError`. Work in threads is not seen: time does not wait for it.
    """

    def __init__(self) -> None:
        self._time_selector = _TimeSelector()
        super().__init__(self._time_selector)

    @property
    def _clock_resolution(self) -> float:
        """asyncio runs the timers that are due within this many seconds from now. After half a year, a nanosecond is
        less than the distance of two floats: a timer of the present moment would never be due, and no time would pass.
        """
        return max(_RESOLUTION_S, math.ulp(self.time()))

    @_clock_resolution.setter
    def _clock_resolution(self, _: float) -> None:
        """asyncio sets that of the system's clock."""

    def time(self) -> float:
        """Simulated seconds since the start."""
        return self._time_selector.now_s
