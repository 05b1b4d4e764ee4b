"""Bounds the part of the event loop's time that several tasks take together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

_SHARE = 0.05


class LoopShare:
    """Lets tasks work one after the other, with pauses, so that all of them together take at most `share` of the time.

    Args:
        share: largest part of the time, 0.05 for 5%.
        clock: seconds, monotonic.
        used: CPU time of this thread, in seconds.
    """

    def __init__(
        self,
        share: float = _SHARE,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self._share = share
        self._clock = clock
        self._used = used
        self._line = asyncio.Lock()
        self._free_s = clock()  # when the next task may begin

    async def turn(self) -> None:
        """Waits until it is the caller's turn. The caller must then work at once, inside `counted`."""
        async with self._line:
            while (left_s := self._free_s - self._clock()) > 0.0:
                await asyncio.sleep(left_s)

    @contextmanager
    def counted(self) -> Generator[None]:
        """Counts the CPU time of the work inside, which must not await anything."""
        began_s, used_s = self._clock(), self._used()
        try:
            yield
        finally:
            self._free_s = max(self._free_s, began_s) + (self._used() - used_s) / self._share
