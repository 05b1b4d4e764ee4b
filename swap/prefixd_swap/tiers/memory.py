"""Tiers whose blocks lie at addresses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import final

import numpy as np

from prefixd_swap.tiers.base import NO_SLOT, Int64s, Tier


class MemoryTier(Tier):
    """A tier whose blocks lie at addresses.

    A slot is allocated by the caller, who fills it and then enters it into the trie; in between it is *in flight*.

        allocate ──> in flight ──entered──> in the trie ──free──> free
                         └────────────────free──────────────────────┘
    """

    durable = False

    def __init__(self, name: str, level: int) -> None:
        super().__init__(name, level)
        self.in_flight: set[int] = set()
        """Slots that are allocated and in no trie: reservations, blocks that a request fills, copies under way."""

    @final
    def allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None = None) -> Int64s:
        """Slots for up to `count` blocks, all parts of a block or none; fewer blocks when there is no room for more.

        Args:
            nbytes: bytes of each of the p parts of a block.
            count: blocks.
            near: slots [p] of the block that these continue; a tier may place them close to it.

        Returns:
            [m, p], m <= count. They are in flight.

        Raises:
            MemoryMisuseError: no such block can lie here, whatever is free.
        """
        slots = self._allocate(nbytes, count, near)
        self.in_flight.update(slots.ravel().tolist())
        return slots

    @final
    def entered(self, slots: Int64s) -> None:
        """These slots are in a trie now; NO_SLOT is skipped."""
        self.in_flight.difference_update(slots.ravel().tolist())

    @final
    def free(self, slots: Int64s | Iterable[int]) -> None:
        """Gives slots back, in flight or just dropped from a trie; NO_SLOT is skipped.

        Raises:
            MemoryMisuseError: a slot is not allocated.
        """
        flat = np.array(slots if isinstance(slots, np.ndarray) else list(slots), np.int64).ravel()
        given = flat[flat != NO_SLOT]
        self._free(given)
        self.in_flight.difference_update(given.tolist())

    @abstractmethod
    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        """Whether an empty tier has room for a block with such parts; if not, nothing need be evicted for it."""

    @abstractmethod
    def footprint(self, nbytes: Sequence[int]) -> int:
        """Bytes of the slots that a block with such parts takes."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """How many more parts of `nbytes` bytes each could be allocated now."""

    @abstractmethod
    def addresses(self, slots: Int64s) -> Int64s:
        """Where the slots' bytes begin, in an array of the same shape; meaningless for NO_SLOT.

        Raises:
            MemoryMisuseError: a slot lies outside the tier.
        """

    @abstractmethod
    def allocated(self) -> Int64s:
        """Every slot that is allocated, ascending."""

    @abstractmethod
    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        """As `allocate`."""

    @abstractmethod
    def _free(self, slots: Int64s) -> None:
        """As `free`; no slot is NO_SLOT."""
