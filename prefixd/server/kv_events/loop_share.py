"""A bounded part of the event loop's time, for all who share it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

_SHARE = 0.05


class LoopShare:
    """Lets those who share it work one after the other, with pauses: what they do takes `share` of the time at most.

    Args:
        share: of the time.
        clock: seconds, monotonic.
        used: seconds that this thread has computed.
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
        self._free_s = clock()  # the next one may begin then

    async def turn(self) -> None:
        """Waits until it is the caller's turn: it goes on at once then, and counts what it does."""
        async with self._line:
            while (left_s := self._free_s - self._clock()) > 0.0:
                await asyncio.sleep(left_s)

    @contextmanager
    def counted(self) -> Generator[None]:
        """Counts what is done inside, where nothing waits."""
        began_s, used_s = self._clock(), self._used()
        try:
            yield
        finally:
            self._free_s = max(self._free_s, began_s) + (self._used() - used_s) / self._share
