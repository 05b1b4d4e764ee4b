"""Limits how many requests the worker runs at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prefixd.cache.troubles import Troubles

PART = "worker memory"
RETRY_S = 0.5
CALM_S = 3.0


class ConcurrencyLimit:
    """The limit on running requests. It falls to the number that the worker can map, and rises again one at a time.

    Args:
        most: the configured limit.
        troubles: told when the limit falls, and when the configured limit has held for 3 s again.
        wake: called when another request may start.
    """

    def __init__(self, most: int, troubles: Troubles, wake: Callable[[], None]) -> None:
        self.limit = most
        self._most = most
        self._troubles = troubles
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None

    def shrink(self, running: int, why: str) -> None:
        """The worker could not map a request's memory beside `running` others; `why` ends with the remedy."""
        self.limit = max(1, running)
        self._troubles.begin(PART, f"{self.limit} of {self._most} requests run at once: {why}")
        self._schedule(RETRY_S, self._grow)

    def close(self) -> None:
        """Cancels the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _grow(self) -> None:
        self.limit += 1
        if self.limit < self._most:
            self._schedule(RETRY_S, self._grow)
        else:
            self._schedule(CALM_S, lambda: self._troubles.end(PART))
        self._wake()

    def _schedule(self, delay_s: float, act: Callable[[], None]) -> None:
        self.close()
        self._timer = asyncio.get_running_loop().call_later(delay_s, act)
