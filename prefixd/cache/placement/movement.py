"""One movement of blocks, as those see it who wait for it: made more urgent, or dropped, as a whole.

A movement is more than its transfers: room is made for it first, and what leaves for that room moves with its urgency.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from prefixd_swap import SwapError
from prefixd_swap.tiers import BlockTransfer
from prefixd_swap.transfers import Urgency

R = TypeVar("R")


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
