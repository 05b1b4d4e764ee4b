"""One movement of blocks, as its owner sees it: wait for its pieces, make it more urgent, cancel it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.transfers.device_queue import Waiter
from prefixd_swap.transfers.pieces import Outcome, Piece, Result, Urgency

if TYPE_CHECKING:
    from prefixd_swap.transfers.transfers import Transfers

T = TypeVar("T")


class Transfer(Generic[T]):
    """One movement of blocks; made by `Transfers.submit`."""

    def __init__(
        self, transfers: Transfers, waiter: Waiter, pieces: Iterator[Piece[T]], count: int, nbytes: int
    ) -> None:
        self._transfers = transfers
        self._waiter = waiter
        self._pieces: Iterator[Piece[T]] | None = pieces
        self._in_order = False
        self._waiting_pieces = count
        self._waiting_bytes = nbytes
        self._submitted_s = 0.0
        self._outcomes: list[Outcome[T] | None] = []
        self._ended: list[int] = []
        self._news = asyncio.Event()
        self._finished: asyncio.Future[Result[T]] = asyncio.get_running_loop().create_future()

    @property
    def path(self) -> str:
        return self._waiter.path

    @property
    def urgency(self) -> Urgency:
        return self._waiter.urgency

    @property
    def finished(self) -> bool:
        """Whether all its pieces have ended or been dropped."""
        return self._finished.done()

    @property
    def done(self) -> Awaitable[Result[T]]:
        """The result, to be awaited. The transfer goes on if the waiting task is cancelled."""
        return asyncio.shield(self._finished)

    async def outcomes(self) -> AsyncIterator[tuple[int, Outcome[T]]]:
        """Yields each piece's position and outcome as soon as it has ended; ends with the transfer."""
        seen = 0
        while True:
            while seen < len(self._ended):
                position = self._ended[seen]
                seen += 1
                outcome = self._outcomes[position]
                if outcome is None:
                    raise MemoryMisuseError(f"piece {position} is still under way; wait for the end of the transfer")
                yield position, outcome
            if self.finished:
                return
            self._news.clear()
            await self._news.wait()

    async def finish(self) -> Result[T]:
        """Waits for the end. If the caller is cancelled, it cancels the transfer as `cancel` does.

        When this returns or raises, no piece touches its memory any more.
        """
        try:
            return await self.done
        except asyncio.CancelledError:
            await self.cancel()
            raise

    def drop(self) -> None:
        """Drops the pieces that have not started; those under way run to their end."""
        self._transfers._drop(self)

    async def cancel(self) -> Result[T]:
        """Drops the pieces that have not started and waits for the end of those under way.

        A piece that has started cannot be stopped: its thread writes into memory. If the caller is cancelled meanwhile,
        CancelledError is raised only after this end.
        """
        self.drop()
        cancelled: asyncio.CancelledError | None = None
        while not self._finished.done():
            try:
                await asyncio.wait([self._finished])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return self._finished.result()

    def raise_to(self, urgency: Urgency) -> None:
        """Makes the transfer more urgent; without effect if it is at least as urgent already."""
        self._transfers._raise(self, urgency)
