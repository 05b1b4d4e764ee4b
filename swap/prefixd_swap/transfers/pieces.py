"""What a transfer consists of: pieces, and what becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

from prefixd_swap.errors import TransferDroppedError

T = TypeVar("T")
Item = TypeVar("Item")

PIECE_BYTES = 4 << 20
"""The most that one piece of several items moves: demand waits 4 ms for such a piece on a disk of 1 GB/s."""
PIECE_ITEMS = 64
"""The most items in one piece of PIECE_BYTES: an item costs a system call or a checksum beside its bytes."""


class Urgency(IntEnum):
    """Why blocks are moved; the lower the number, the sooner it happens."""

    DEMAND = 0
    """Somebody waits for the blocks, or for the room that their leaving makes."""
    PREFETCH = 1
    """Somebody will probably want them."""
    WRITE_BACK = 2
    """A copy further down, made before room is wanted."""
    SCRUB = 3
    """Bytes are read only to be verified."""


class Piece(NamedTuple, Generic[T]):
    """A part of a transfer that runs without interruption.

    A piece must not wait for another transfer: that one may be held back until this piece has ended.
    """

    nbytes: int
    work: Callable[[], T] | Callable[[], Coroutine[Any, Any, T]]
    on_loop: bool = False
    """Whether `work` is a coroutine function that runs on the event loop; otherwise it runs in a thread."""
    joined: int = 1
    """How many of the pieces that its transfer was submitted with this one stands for: whoever makes pieces as they
    start may join some; see `Transfers.out_of_turn`."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[T]):
    """How one piece ended."""

    value: T | None
    error: BaseException | None = None

    def get(self) -> T:
        """What the piece returned.

        Raises:
            BaseException: what the piece raised.
        """
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # None only where T allows it


@dataclass(frozen=True, slots=True)
class Result(Generic[T]):
    """How a transfer ended. Every piece is accounted for once: in `outcomes` or in `dropped`."""

    outcomes: Sequence[Outcome[T]]
    """Of the pieces that were started, in the order in which they were given."""
    dropped: int
    """Pieces after those, which were never started; each counts as one, though some might have been joined."""

    def values(self) -> list[T]:
        """What all pieces returned.

        Raises:
            BaseException: what the first piece that failed raised.
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
    """How many of `items` items of `item_bytes` bytes each belong in one piece.

    Args:
        item_bytes: bytes of one item; an item that is larger than a piece should be is a piece of its own.
        items: how many there are.
        at_least: pieces to make if there are so many items, so that several slots of a device work on them.
        most_bytes: bytes of a piece of several items; n times PIECE_BYTES may be of n times PIECE_ITEMS.
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

    Items are taken from `items` when their group is asked for, and one item more. Only a single item may have more
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
