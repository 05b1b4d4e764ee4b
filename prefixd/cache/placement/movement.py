"""One movement of blocks, as those see it who wait for it: made more urgent, or dropped, as a whole.

A movement is more than its transfers: room is made for it first, and what leaves for that room moves with its urgency.
So it is with a lock: the most urgent movement has it first, and its holder is as urgent as whoever waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prefixd_swap import SwapError
from prefixd_swap.tiers import BlockTransfer
from prefixd_swap.transfers import Urgency

R = TypeVar("R")
T = TypeVar("T")


class Movement:
    """What is moved for one reason.

    Attributes:
        due_s: when the first who waits wants it, on the clock of the transfers; None: as soon as its turn comes.
        dropped: nobody wants it any more; what has not been started is left out.
        task: runs it, where others may join.
    """

    def __init__(self, urgency: Urgency, due_s: float | None = None) -> None:
        self._urgency = urgency
        self.due_s = due_s
        self._lent: list[Urgency] = []
        self.dropped = False
        self.task: asyncio.Task[bool] | None = None
        self._transfers: set[BlockTransfer[Any]] = set()
        self._wanted_by = 0

    @property
    def urgency(self) -> Urgency:
        """Of everything that it moves now."""
        return min(self._urgency, *self._lent) if self._lent else self._urgency

    def raise_to(self, urgency: Urgency) -> None:
        """Makes it more urgent; one that is so urgent already stays as it is."""
        self._urgency = min(self._urgency, urgency)
        self._hurry()

    def lend(self, urgency: Urgency) -> None:
        """Makes it as urgent as who waits for a step of it, until `take_back`; what it moves later is not."""
        self._lent.append(urgency)
        self._hurry()

    def take_back(self, urgency: Urgency) -> None:
        """Ends one `lend`. What is under way stays as urgent as it is."""
        self._lent.remove(urgency)

    async def run(self, transfer: BlockTransfer[R]) -> list[R | SwapError]:
        """Waits for the end of a transfer of this urgency that belongs to it; see `BlockTransfer.finish`."""
        self._transfers.add(transfer)
        if self.dropped:
            transfer.transfer.drop()
        try:
            return await transfer.finish()
        finally:
            self._transfers.discard(transfer)

    def _hurry(self) -> None:
        for transfer in self._transfers:
            transfer.raise_to(self.urgency)

    def join(self, urgency: Urgency, due_s: float | None = None) -> None:
        """Somebody wants it, so urgently and at `due_s`; `leave` is his last word.

        The time counts for transfers that begin later.
        """
        self._wanted_by += 1
        if due_s is not None:
            self.due_s = due_s if self.due_s is None else min(self.due_s, due_s)
        self.raise_to(urgency)

    def leave(self) -> None:
        """One wants it no more. When nobody does, it is dropped."""
        self._wanted_by -= 1
        if not self._wanted_by:
            self.dropped = True
            for transfer in self._transfers:
                transfer.transfer.drop()

    async def wait(self) -> None:
        """Waits for the end of its task, however that ends."""
        if self.task is not None:
            await asyncio.wait({self.task})


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
