"""Stands in for a memory tier that a machine does not have: nothing fits into it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.tiers.base import Int64s
from prefixd_swap.tiers.memory import MemoryTier


class AbsentTier(MemoryTier):
    """A tier without memory at the level of the absent one, so that callers need no check for its presence."""

    addressable = False
    on_device = False
    shared = False

    @property
    def capacity_bytes(self) -> int:
        return 0

    @property
    def used_bytes(self) -> int:
        return 0

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        del nbytes
        return False

    def footprint(self, nbytes: Sequence[int]) -> int:
        return sum(nbytes)

    def room(self, nbytes: int) -> int:
        del nbytes
        return 0

    def addresses(self, slots: Int64s) -> Int64s:
        raise MemoryMisuseError(f"there is no {self.name} tier, so its slots {slots.ravel()[:4].tolist()} lie nowhere")

    def allocated(self) -> Int64s:
        return np.empty(0, np.int64)

    def check_integrity(self) -> None:
        pass

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        del count, near
        return np.empty((0, len(nbytes)), np.int64)

    def _free(self, slots: Int64s) -> None:
        if len(slots):
            raise MemoryMisuseError(
                f"there is no {self.name} tier, so its slots {slots[:4].tolist()} are not allocated"
            )
