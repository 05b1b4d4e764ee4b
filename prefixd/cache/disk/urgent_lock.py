"""A lock that the most urgent waiter gets first, and whose holder is as urgent as whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import TypeVar

from prefixd.cache.placement.movement import Movement
from prefixd_swap.transfers import Urgency


class UrgentLock:
    """Orders work of different urgency.

    Args:
        urgency_enabled: False: first come, first served.
    """

    def __init__(self, *, urgency_enabled: bool = True) -> None:
        self._urgency_enabled = urgency_enabled
        self._holder: Movement | None = None
        self._lent: list[Urgency] = []
        self._waiting: list[tuple[Movement, asyncio.Future[None]]] = []

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._holder is not None

    @asynccontextmanager
    async def hold(self, movement: Movement) -> AsyncGenerator[None, None]:
        """Within it nobody else has the lock. The holder is as urgent as those who wait, until it is over."""
        await self._acquire(movement)
        try:
            yield
        finally:
            self._hand_over()

    async def _acquire(self, movement: Movement) -> None:
        if self._holder is None:
            self._holder = movement
            return
        self._lend(movement.urgency)
        turn = asyncio.get_running_loop().create_future()
        entry = (movement, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:  # it was handed over just before
                self._hand_over()
            raise

    def _lend(self, urgency: Urgency) -> None:
        if self._urgency_enabled and self._holder is not None:
            self._holder.lend(urgency)
            self._lent.append(urgency)

    def _hand_over(self) -> None:
        while self._lent and self._holder is not None:
            self._holder.take_back(self._lent.pop())
        self._holder = None
        if not self._waiting:
            return
        place = 0
        if self._urgency_enabled:
            place = min(range(len(self._waiting)), key=lambda at: self._waiting[at][0].urgency)
        self._holder, turn = self._waiting.pop(place)
        for movement, _ in self._waiting:
            self._lend(movement.urgency)
        turn.set_result(None)


T = TypeVar("T")


async def to_the_end(work: Coroutine[object, object, T]) -> T:
    """Waits until `work` has ended, even when cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled():
        task.exception()  # seen; the cancellation is what the caller asked for
        raise cancelled
    return task.result()
