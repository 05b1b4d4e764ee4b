"""Tiers whose blocks lie at addresses."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import final

import numpy as np

from prefixd_swap.tiers.base import NO_SLOT, Int64s, Tier


@dataclass(eq=False, slots=True)
class Account:
    """The bytes of slots that are in flight for one purpose.

    Attributes:
        whole: an account of which this one is a part.
        nbytes: bytes of its slots, and of its parts'.
    """

    whole: Account | None = None
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """So many bytes more, or fewer."""
        account: Account | None = self
        while account is not None:
            account.nbytes += nbytes
            account = account.whole


Charge = tuple[Account, int]
"""The account of a slot in flight, and the slot's bytes."""


class MemoryTier(Tier):
    """A tier whose blocks lie at addresses.

    A slot is allocated by the caller, who fills it and then enters it into the trie; in between it is *in flight*.

        allocate ──> in flight ──entered──> in the trie ──free──> free
                         └────────────────free──────────────────────┘
    """

    durable = False

    def __init__(self, name: str, level: int) -> None:
        super().__init__(name, level)
        self.in_flight: dict[int, Charge] = {}
        """Slots that are allocated and in no trie: reservations, blocks that a request fills, copies under way; with
        each who accounts for it."""
        self.unassigned = Account()
        """Of slots that were allocated for nobody in particular."""

    @final
    def allocate(
        self, nbytes: Sequence[int], count: int, near: Int64s | None = None, account: Account | None = None
    ) -> Int64s:
        """Slots for up to `count` blocks, all parts of a block or none; fewer blocks when there is no room for more.

        Args:
            nbytes: bytes of each of the p parts of a block.
            count: blocks.
            near: slots [p] of the block that these continue; a tier may place them close to it.
            account: has their bytes while they are in flight; `unassigned` by default.

        Returns:
            [m, p], m <= count. They are in flight.

        Raises:
            MemoryMisuseError: no such block can lie here, whatever is free.
        """
        slots = self._allocate(nbytes, count, near)
        account = self.unassigned if account is None else account
        for size, column in zip(nbytes, slots.T.tolist(), strict=True):
            self.in_flight.update(dict.fromkeys(column, (account, self.footprint((size,)))))
        account.add(len(slots) * self.footprint(nbytes))
        return slots

    @final
    def entered(self, slots: Int64s) -> None:
        """These slots are in a trie now; NO_SLOT is skipped."""
        self._landed(slots.ravel().tolist())

    @final
    def free(self, slots: Int64s | Iterable[int]) -> None:
        """Gives slots back, in flight or just dropped from a trie; NO_SLOT is skipped.

        Raises:
            MemoryMisuseError: a slot is not allocated.
        """
        flat = np.array(slots if isinstance(slots, np.ndarray) else list(slots), np.int64).ravel()
        given = flat[flat != NO_SLOT]
        self._free(given)
        self._landed(given.tolist())

    def _landed(self, slots: Iterable[int]) -> None:
        """These are in flight no more, if they were."""
        for charge, count in Counter(map(self.in_flight.pop, slots, repeat(None))).items():
            if charge is not None:
                account, slot_bytes = charge
                account.add(-count * slot_bytes)

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
