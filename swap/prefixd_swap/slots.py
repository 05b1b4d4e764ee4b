"""Slots of one size, side by side: the accounting that the CPU arena and the disk slabs share."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import IntegrityError, MemoryMisuseError

PAGE_BYTES = 4096
MIN_SLOTS = 16
"""A slab holds at least this many slots, unless the whole capacity is small."""


def round_to_slot(nbytes: int) -> int:
    """Bytes of the slot that holds `nbytes`: the next multiple of 4096.

    Raises:
        MemoryMisuseError: `nbytes` is not positive.
    """
    if nbytes <= 0:
        raise MemoryMisuseError(f"a slot of {nbytes} bytes was asked for; ask for at least 1")
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def slots_per_slab(slot_bytes: int, capacity_bytes: int, slab_bytes: int) -> int:
    """Slots that a new slab should hold: about `slab_bytes` of them, and 16 slabs or more in the capacity.

    Many slabs let several slot sizes share a small capacity; many slots keep the slabs few.
    """
    wanted = max(MIN_SLOTS, slab_bytes // slot_bytes)
    return max(1, min(wanted, capacity_bytes // (MIN_SLOTS * slot_bytes)))


class SlotRun:
    """Which of `count` equal slots are taken. The lowest free slot is always taken first."""

    __slots__ = ("_lowest", "_taken", "count", "used")

    def __init__(self, count: int) -> None:
        self.count = count
        self.used = 0
        self._taken = bytearray(count)
        self._lowest = 0  # no slot below is free

    @property
    def full(self) -> bool:
        """Whether no slot is free."""
        return self.used == self.count

    @property
    def free(self) -> int:
        """Slots that are not taken."""
        return self.count - self.used

    def taken(self) -> npt.NDArray[np.int64]:
        """Indices of the slots that are taken, ascending."""
        return np.flatnonzero(np.frombuffer(self._taken, np.uint8))

    def take(self) -> int:
        """Index of a slot that was free and is now taken.

        Raises:
            MemoryMisuseError: every slot is taken.
        """
        index = self._taken.find(0, self._lowest)
        if index < 0:
            raise MemoryMisuseError(f"all {self.count} slots are taken; look at `full` first")
        self._taken[index] = 1
        self._lowest = index + 1
        self.used += 1
        return index

    def claim_many(self, indices: npt.NDArray[np.int64]) -> None:
        """Take these very slots, which must exist and be free, each once."""
        np.frombuffer(self._taken, np.uint8)[indices] = 1
        self.used += len(indices)

    def give(self, index: int) -> None:
        """Make a taken slot free.

        Raises:
            MemoryMisuseError: the slot does not exist or is free.
        """
        if not 0 <= index < self.count or not self._taken[index]:
            raise MemoryMisuseError(f"slot {index} of {self.count} is not taken; free a slot once")
        self._taken[index] = 0
        self._lowest = min(self._lowest, index)
        self.used -= 1

    def check_integrity(self) -> None:
        """Count again.

        Raises:
            IntegrityError: the counters disagree with the slots.
        """
        taken = sum(self._taken)
        if taken != self.used or self._taken.find(0, 0, self._lowest) >= 0:
            raise IntegrityError(f"{taken} slots are taken and {self.used} are counted")
