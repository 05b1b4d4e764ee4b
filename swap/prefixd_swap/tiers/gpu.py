"""The GPU tier: frames of one pool, all of one size. A slot is a frame's number, and a part of a block takes one frame.

So any frame serves any part of any block. Jenga (section 4) needs pages of a common multiple of all sizes for that;
mapped chunks do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.tiers.base import Int64s
from prefixd_swap.tiers.memory import MemoryTier
from prefixd_swap.vmem import FrameId, FramePool, NewFrames


class GpuTier(MemoryTier):
    """The GPU tier's blocks. The caller closes the pool."""

    shared = False

    def __init__(self, pool: FramePool, *, name: str = "gpu", level: int = 0) -> None:
        super().__init__(name, level)
        self.pool = pool
        self.frame_bytes = pool.frame_bytes
        self.on_device = pool.memory.on_device
        self.backed = pool.memory.backed
        self.addressable = not pool.memory.on_device
        self._base = pool.first_address

    @property
    def capacity_bytes(self) -> int:
        return self.pool.capacity * self.frame_bytes

    @property
    def attainable_bytes(self) -> int:
        """As `FramePool.attainable`."""
        return self.pool.attainable * self.frame_bytes

    @property
    def least_bytes(self) -> int:
        return self.pool.least * self.frame_bytes

    @property
    def used_bytes(self) -> int:
        return self.pool.used_count * self.frame_bytes

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        return 0 < len(nbytes) <= self.pool.attainable and max(nbytes) <= self.frame_bytes

    def footprint(self, nbytes: Sequence[int]) -> int:
        """One whole frame for each part."""
        return len(nbytes) * self.frame_bytes

    def room(self, nbytes: int) -> int:
        return self.pool.free_count if nbytes <= self.frame_bytes else 0

    @property
    def stranded_bytes(self) -> int:
        """Free bytes that not every part can use: none, as any frame serves any part."""
        return 0

    def frames_of(self, slots: Iterable[int]) -> int:
        """Frames of these taken slots: one each."""
        return sum(1 for _ in slots)

    def admit(self, new: NewFrames) -> None:
        """As `FramePool.admit`."""
        self.pool.admit(new)

    def withdraw(self, frames: Sequence[FrameId]) -> None:
        """Take frames in flight out of the tier for good; see `FramePool.withdraw`."""
        self.pool.withdraw(frames)
        self._end_flight(frames)

    def addresses(self, slots: Int64s) -> Int64s:
        if slots.size and int(slots.max()) >= self.pool.table.size:
            raise MemoryMisuseError(
                f"frame {int(slots.max())} does not exist; the {self.name} tier has frames 0 to "
                f"{self.pool.table.size - 1}"
            )
        return slots * self.frame_bytes + self._base

    def allocated(self) -> Int64s:
        return self.pool.allocated()

    def check_integrity(self) -> None:
        self.pool.check_integrity()

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        del near  # any frame will do: a request maps them side by side
        if not nbytes or max(nbytes) > self.frame_bytes:
            raise MemoryMisuseError(
                f"a block with parts of {list(nbytes)} bytes does not fit into frames of {self.frame_bytes} bytes; "
                "give parts of at most a frame's size, and at least one"
            )
        parts = len(nbytes)
        frames = self.pool.allocate(min(count, self.pool.free_count // parts) * parts)
        return np.array([] if frames is None else frames, np.int64).reshape(-1, parts)

    def _free(self, slots: Int64s) -> None:
        self.pool.free(map(FrameId, slots.tolist()))
