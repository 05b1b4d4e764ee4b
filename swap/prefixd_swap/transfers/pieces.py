"""The pieces of a transfer, and the outcome of each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from prefixd_swap.errors import TransferDroppedError

T = TypeVar("T")
Item = TypeVar("Item")

PIECE_BYTES = 4 << 20
"""The most bytes of one piece of several items: demand waits 4 ms for such a piece on a disk of 1 GB/s."""
PIECE_ITEMS = 64
"""The most items in one piece of PIECE_BYTES: each item costs a system call or a checksum besides its bytes."""


class Urgency(IntEnum):
    """The purpose of a transfer; lower values start first."""

    DEMAND = 0
    """A request waits for the blocks, or for the room that their eviction makes."""
    PREFETCH = 1
    """A request will probably need the blocks."""
    WRITE_BACK = 2
    """A copy to a lower tier, made before room is needed."""
    SCRUB = 3
    """Bytes are only verified."""


class Piece(NamedTuple, Generic[T]):
    """A part of a transfer that runs without interruption.

    A piece must not wait for another transfer: that transfer may be held back until this piece has ended.
    """

    nbytes: int
    work: Callable[[], T] | Callable[[], Coroutine[Any, Any, T]]
    on_loop: bool = False
    """Whether `work` is a coroutine function that runs on the event loop; otherwise it runs in a thread."""
    joined: int = 1
    """Number of the submitted pieces in this one: an iterator may join some when they start; see
    `Transfers.out_of_turn`."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How one piece ended."""

    value: T | None
    error: BaseException | None = None

    def get(self) -> T:
        """The piece's return value.

        Raises:
            BaseException: the piece's error.
        """
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # None only where T allows it


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """How a transfer ended. Each piece counts once: in `outcomes` or in `dropped`."""

    outcomes: Sequence[Outcome[T]]
    """Outcomes of the started pieces, in the order given."""
    dropped: int
    """Pieces that never started; each counts as one, even if it might have been joined."""

    def values(self) -> list[T]:
        """The return values of all pieces.

        Raises:
            BaseException: the first piece's error.
            TransferDroppedError: pieces were dropped.
        """
        values = [outcome.get() for outcome in self.outcomes]
        if self.dropped:
            raise TransferDroppedError(
                f"{self.dropped} of {self.dropped + len(values)} pieces were dropped because the transfer was "
                "cancelled; submit them again if they are still wanted"
            )
        return values


def piece_items(item_bytes: int, items: int, *, at_least: int = 1, most_bytes: int = PIECE_BYTES) -> int:
    """Items of one piece, if `items` items of `item_bytes` bytes each are cut into pieces.

    Args:
        item_bytes: bytes of one item; an item larger than a piece is a piece by itself.
        items: number of items.
        at_least: pieces to make if there are enough items, so that several slots of a device work on them.
        most_bytes: the most bytes of a piece of several items; n * PIECE_BYTES allows n * PIECE_ITEMS items.
    """
    most_items = PIECE_ITEMS * max(1, most_bytes // PIECE_BYTES)
    return max(1, min(most_items, most_bytes // max(1, item_bytes), -(-items // max(1, at_least))))


def grouped(
    items: Iterable[Item],
    nbytes: Callable[[Item], int],
    *,
    most_items: int = PIECE_ITEMS,
    most_bytes: int = PIECE_BYTES,
) -> Iterator[tuple[list[Item], int]]:
    """Groups consecutive items into pieces; yields each group with its bytes.

    Reads the items of a group when the group is requested, and one item more. Only a group of one item may have more
    than `most_bytes`.
    """
    group: list[Item] = []
    total = 0
    for item in items:
        size = nbytes(item)
        if group and (len(group) == most_items or total + size > most_bytes):
            yield group, total
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group, total
