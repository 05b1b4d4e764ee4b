"""The CPU tier: slots of one shared arena. A slot is its offset in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd_swap.arena import CpuArena
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.slots import round_to_slot
from prefixd_swap.tiers.base import Int64s, MemoryTier


class CpuTier(MemoryTier):
    """The CPU tier's blocks. The arena stays its maker's to close."""

    addressable = True
    on_device = False
    shared = True

    def __init__(self, arena: CpuArena, *, name: str = "cpu", level: int = 1) -> None:
        super().__init__(name, level)
        self.arena = arena
        self._base = arena.span(0, arena.capacity_bytes).address

    @property
    def capacity_bytes(self) -> int:
        """The arena's size."""
        return self.arena.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots taken."""
        return self.arena.used_bytes

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        """Whether an empty arena has room for a block."""
        return sum(map(round_to_slot, nbytes)) <= self.arena.capacity_bytes

    def room(self, nbytes: int) -> int:
        """How many more parts of `nbytes` bytes each could be allocated now."""
        return self.arena.room(nbytes)

    def addresses(self, slots: Int64s) -> Int64s:
        """Where the slots' bytes begin."""
        if slots.size and int(slots.max()) >= self.arena.capacity_bytes:
            raise MemoryMisuseError(
                f"slot {int(slots.max())} lies outside the arena of {self.arena.capacity_bytes} bytes"
            )
        return slots + self._base

    def allocated(self) -> Int64s:
        """Every slot that is taken, ascending."""
        return self.arena.allocated()

    def check_integrity(self) -> None:
        """Count again."""
        self.arena.check_integrity()

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        del near  # slots of one size are taken from the lowest: what is allocated together lies together
        if not self.ever_fits(nbytes):
            raise MemoryMisuseError(
                f"a block of {sum(nbytes)} bytes in {len(nbytes)} parts never fits into the {self.name} tier of "
                f"{self.capacity_bytes} bytes; make it larger"
            )
        taken: list[list[int]] = []
        for _ in range(count):
            block: list[int] = []
            for size in nbytes:
                offset = self.arena.allocate(size)
                if offset is None:
                    for earlier in block:
                        self.arena.free(earlier)
                    return _table(taken, len(nbytes))
                block.append(offset)
            taken.append(block)
        return _table(taken, len(nbytes))

    def _free(self, slots: Int64s) -> None:
        for slot in slots.tolist():
            self.arena.free(slot)


def _table(blocks: list[list[int]], parts: int) -> Int64s:
    return np.array(blocks, np.int64).reshape(len(blocks), parts)
