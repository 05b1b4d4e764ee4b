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
        whole: the account that includes this one.
        nbytes: bytes of its slots, and of the accounts that it includes.
    """

    whole: Account | None = None
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        """Add bytes; a negative number removes them."""
        account: Account | None = self
        while account is not None:
            account.nbytes += nbytes
            account = account.whole


Charge = tuple[Account, int]
"""The account of a slot in flight, and the slot's bytes."""


class MemoryTier(Tier):
    """A tier whose blocks lie at addresses.

    The caller allocates a slot, fills it and then enters it into the trie; in between the slot is *in flight*.

        allocate ──> in flight ──entered──> in the trie ──free──> free
                         └────────────────free──────────────────────┘
    """

    durable = False

    def __init__(self, name: str, level: int) -> None:
        super().__init__(name, level)
        self.in_flight: dict[int, Charge] = {}
        """Slots that are allocated and in no trie (reservations, blocks that a request fills, copies under way), with
        the account and the bytes of each."""
        self.unassigned = Account()
        """The account of slots that were allocated without one."""

    @final
    def allocate(
        self, nbytes: Sequence[int], count: int, near: Int64s | None = None, account: Account | None = None
    ) -> Int64s:
        """Slots for up to `count` blocks, all parts of a block or none; fewer blocks when there is no room for more.

        Args:
            nbytes: bytes of each of the p parts of a block.
            count: blocks.
            near: slots [p] of the parent block; a tier may place the new slots close to them.
            account: counts their bytes while they are in flight; `unassigned` by default.

        Returns:
            [m, p], m <= count. They are in flight.

        Raises:
            MemoryMisuseError: such a block never fits, even into the empty tier.
        """
        slots = self._allocate(nbytes, count, near)
        account = self.unassigned if account is None else account
        for size, column in zip(nbytes, slots.T.tolist(), strict=True):
            self.in_flight.update(dict.fromkeys(column, (account, self.footprint((size,)))))
        account.add(len(slots) * self.footprint(nbytes))
        return slots

    @final
    def entered(self, slots: Int64s) -> None:
        """End the flight of slots that are in a trie now; NO_SLOT is skipped."""
        self._end_flight(slots.ravel().tolist())

    @final
    def free(self, slots: Int64s | Iterable[int]) -> None:
        """Free slots that are in flight or were just removed from a trie; NO_SLOT is skipped.

        Raises:
            MemoryMisuseError: a slot is not allocated.
        """
        flat = np.array(slots if isinstance(slots, np.ndarray) else list(slots), np.int64).ravel()
        given = flat[flat != NO_SLOT]
        self._free(given)
        self._end_flight(given.tolist())

    def _end_flight(self, slots: Iterable[int]) -> None:
        """Take slots out of `in_flight` if they are in it."""
        for charge, count in Counter(map(self.in_flight.pop, slots, repeat(None))).items():
            if charge is not None:
                account, slot_bytes = charge
                account.add(-count * slot_bytes)

    @abstractmethod
    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        """Whether a block with parts of these sizes fits into the empty tier; if not, evicting cannot help."""

    @abstractmethod
    def footprint(self, nbytes: Sequence[int]) -> int:
        """Bytes of the slots of a block with parts of these sizes."""

    @abstractmethod
    def room(self, nbytes: int) -> int:
        """Number of parts of `nbytes` bytes each that could be allocated now."""

    @abstractmethod
    def addresses(self, slots: Int64s) -> Int64s:
        """The addresses of the slots, in an array of the same shape; meaningless for NO_SLOT.

        Raises:
            MemoryMisuseError: a slot lies outside the tier.
        """

    @abstractmethod
    def allocated(self) -> Int64s:
        """All allocated slots, ascending."""

    @abstractmethod
    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        """As `allocate`."""

    @abstractmethod
    def _free(self, slots: Int64s) -> None:
        """As `free`; no slot is NO_SLOT."""
