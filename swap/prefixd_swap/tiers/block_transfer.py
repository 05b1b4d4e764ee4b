"""A movement of blocks, with one result a block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Generic, TypeVar

from prefixd_swap.errors import StorageError, SwapError, TransferDroppedError
from prefixd_swap.transfers import Piece, Result, Transfer, Transfers, Urgency

R = TypeVar("R")


class BlockTransfer(Generic[R]):
    """A movement of blocks; `finish` returns one result a block.

    If a piece ends with a `StorageError`, that is the result of each of its blocks, and of later blocks that were not
    tried. Any other error of a piece is raised.
    """

    def __init__(
        self,
        transfers: Transfers,
        path: str,
        pieces: Iterable[tuple[int, Piece[list[R]]]],
        urgency: Urgency,
        *,
        blocks: int,
        nbytes: int,
        count: int,
        deadline_s: float | None = None,
        in_order: bool = False,
    ) -> None:
        """Submit `pieces`, each with its number of blocks; see `Transfers.submit`.

        Args:
            transfers: starts them.
            path: the path of the blocks.
            pieces: made when they start.
            urgency: see `Urgency`.
            blocks: blocks of all pieces.
            nbytes: bytes of all pieces.
            count: number of pieces.
            deadline_s: time at which the blocks are needed.
            in_order: start each piece after the one before, and none after one that failed.
        """
        self.blocks = blocks
        self._first: list[int] = []  # the first block of each piece that has started
        self._next = 0
        self.transfer: Transfer[list[R]] = transfers.submit(
            path,
            self._take(pieces),
            urgency,
            deadline_s=deadline_s,
            in_order=in_order,
            count=count,
            nbytes=nbytes,
        )

    async def finish(self) -> list[R | SwapError]:
        """Waits for the end; returns the result of each block, in order.

        If the caller is cancelled, the transfer is cancelled, and this raises when no piece touches memory any more.
        The result of a block that another task's `cancel` has dropped is a `TransferDroppedError`.

        Raises:
            BaseException: the error of a piece, unless it is a `StorageError`.
        """
        return self._results(await self.transfer.finish())

    async def cancel(self) -> list[R | SwapError]:
        """Drops pieces that have not started and waits for the others; returns the results as `finish` does."""
        return self._results(await self.transfer.cancel())

    async def arrived(self) -> AsyncIterator[tuple[int, list[R]]]:
        """Yields the results of each piece as soon as it has ended, with the number of its first block.

        Pieces that ended with an error are left out; `finish` returns them.
        """
        async for position, outcome in self.transfer.outcomes():
            if outcome.error is None:
                yield self._first[position], outcome.get()

    def raise_to(self, urgency: Urgency) -> None:
        """As `Transfer.raise_to`."""
        self.transfer.raise_to(urgency)

    def _take(self, pieces: Iterable[tuple[int, Piece[list[R]]]]) -> Iterator[Piece[list[R]]]:
        for blocks, piece in pieces:
            self._first.append(self._next)
            self._next += blocks
            yield piece

    def _results(self, result: Result[list[R]]) -> list[R | SwapError]:
        results: list[R | SwapError] = []
        failed: StorageError | None = None
        for position, outcome in enumerate(result.outcomes):
            if not isinstance(outcome.error, StorageError):
                results += outcome.get()
                continue
            failed = failed or outcome.error
            started = [*self._first[position : position + 2], self._next, self._next]
            results += [outcome.error] * (started[1] - started[0])
        left = self.blocks - len(results)
        if left:
            reason = failed or TransferDroppedError(
                "the transfer was cancelled before it came to this block; try again"
            )
            results += [reason] * left
        return results
