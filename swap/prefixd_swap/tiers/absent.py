"""The place of a memory tier that a machine does not have: nothing fits into it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.tiers.base import Int64s
from prefixd_swap.tiers.memory import MemoryTier


class AbsentTier(MemoryTier):
    """No memory at all, with the level that it would have; so nobody need ask whether there is one."""

    addressable = False
    on_device = False
    shared = False

    @property
    def capacity_bytes(self) -> int:
        """None."""
        return 0

    @property
    def used_bytes(self) -> int:
        """None."""
        return 0

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        """Nothing does."""
        del nbytes
        return False

    def footprint(self, nbytes: Sequence[int]) -> int:
        """What a block would take elsewhere."""
        return sum(nbytes)

    def room(self, nbytes: int) -> int:
        """None."""
        del nbytes
        return 0

    def addresses(self, slots: Int64s) -> Int64s:
        """There are none."""
        raise MemoryMisuseError(f"there is no {self.name} tier, so its slots {slots.ravel()[:4].tolist()} lie nowhere")

    def allocated(self) -> Int64s:
        """No slots."""
        return np.empty(0, np.int64)

    def check_integrity(self) -> None:
        """There is nothing to count."""

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        del count, near
        return np.empty((0, len(nbytes)), np.int64)

    def _free(self, slots: Int64s) -> None:
        if len(slots):
            raise MemoryMisuseError(
                f"there is no {self.name} tier, so its slots {slots[:4].tolist()} are not allocated"
            )
