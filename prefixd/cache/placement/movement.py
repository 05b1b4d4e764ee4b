"""A movement of blocks, which its callers make more urgent or drop as a whole; and a lock that respects urgency.

A movement is more than its transfers: room is made for it first, and the evictions for that room run at its urgency.
The lock goes to the most urgent movement, and its holder becomes as urgent as the most urgent waiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prefixd.cache.placement.layer_watch import LayerWatch
from prefixd_swap import SwapError
from prefixd_swap.tiers import BlockTransfer
from prefixd_swap.transfers import Urgency

R = TypeVar("R")
T = TypeVar("T")


class Movement:
    """Transfers with one purpose.

    Attributes:
        due_s: when the first caller needs it, on the clock of the transfers; None: as soon as possible.
        dropped: no caller wants it any more; transfers that have not started are left out.
        task: runs it, if others may join it.
        by_layers: has the blocks copied layer by layer, and follows that.
    """

    def __init__(self, urgency: Urgency, due_s: float | None = None, by_layers: LayerWatch | None = None) -> None:
        self._urgency = urgency
        self.due_s = due_s
        self.by_layers = by_layers
        self._lent: list[Urgency] = []
        self.dropped = False
        self.task: asyncio.Task[bool] | None = None
        self._transfers: set[BlockTransfer[Any]] = set()
        self._wanted_by = 0

    @property
    def urgency(self) -> Urgency:
        """The urgency of all its transfers now."""
        return min(self._urgency, *self._lent) if self._lent else self._urgency

    def raise_to(self, urgency: Urgency) -> None:
        """Raises its urgency to at least `urgency`."""
        self._urgency = min(self._urgency, urgency)
        self._hurry()

    def lend(self, urgency: Urgency) -> None:
        """Raises its urgency until `take_back`, for a caller that waits for one step of it."""
        self._lent.append(urgency)
        self._hurry()

    def take_back(self, urgency: Urgency) -> None:
        """Ends one `lend`. Transfers under way stay as urgent as they are."""
        self._lent.remove(urgency)

    async def run(self, transfer: BlockTransfer[R]) -> list[R | SwapError]:
        """Runs a transfer as a part of this movement; returns the result of each block."""
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
        """Adds a caller that needs it with this urgency, at `due_s`; each calls `leave` at the end.

        The time counts for transfers that begin later.
        """
        self._wanted_by += 1
        if due_s is not None:
            self.due_s = due_s if self.due_s is None else min(self.due_s, due_s)
        self.raise_to(urgency)

    def leave(self) -> None:
        """Removes a caller; drops the movement if it was the last one."""
        self._wanted_by -= 1
        if not self._wanted_by:
            self.dropped = True
            for transfer in self._transfers:
                transfer.transfer.drop()

    async def wait(self) -> None:
        """Waits for the end of its task, also if that fails."""
        if self.task is not None:
            await asyncio.wait({self.task})


class UrgentLock:
    """A lock that the most urgent waiter gets next.

    Args:
        urgency_enabled: False: first come, first served.
    """

    def __init__(self, *, urgency_enabled: bool = True) -> None:
        self._urgency_enabled = urgency_enabled
        self._holder: Movement | None = None
        self._lent: list[Urgency] = []
        self._waiting: list[tuple[Movement, asyncio.Future[None]]] = []

    def locked(self) -> bool:
        """Whether a movement has the lock."""
        return self._holder is not None

    @asynccontextmanager
    async def hold(self, movement: Movement) -> AsyncGenerator[None, None]:
        """A context with the lock. Meanwhile the holder is as urgent as its most urgent waiter."""
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
            else:  # the lock was handed over just before
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
    """Waits until `work` has ended, even if cancelled meanwhile; raises the cancellation afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled():
        task.exception()  # mark it as retrieved: the caller gets the cancellation instead
        raise cancelled
    return task.result()
