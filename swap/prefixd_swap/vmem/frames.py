"""The GPU tier's memory as frames: homes of one block each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.geometry import KvGeometry
from prefixd_swap.spans import Span
from prefixd_swap.vmem.base import FrameId, VirtualMemory
from prefixd_swap.vmem.free_runs import FreeRuns


class FramePool:
    """The daemon's side of the GPU tier: `frames` frames of one geometry, created at once and recycled for
    ever.

    A frame is a run of chunks with consecutive ids, and all frames are mapped in order on one window, so a
    frame is contiguous there and neighbouring frames are neighbours in memory. What a freed frame held stays
    in it.

    Raises GeometryError if a block is not made of whole chunks, OutOfMemoryError if there is not enough
    memory.
    """

    def __init__(self, memory: VirtualMemory, geometry: KvGeometry, frames: int) -> None:
        if frames < 1:
            raise MemoryMisuseError(f"a pool of {frames} frames is not possible; give the gpu tier room for a block")
        self.memory = memory
        self.geometry = geometry
        self.capacity = frames
        self._frame_chunks = geometry.chunks_per_block(memory.chunk_bytes)
        self._chunks = memory.create(frames * self._frame_chunks)
        self._window = memory.reserve(frames * geometry.block_bytes)
        self._window.map(0, self._chunks)
        self._free = FreeRuns(frames)
        self._used = np.zeros(frames, bool)

    @property
    def free_count(self) -> int:
        """How many frames can be allocated."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """How many frames are allocated."""
        return self.capacity - len(self._free)

    @property
    def first_chunk(self) -> int:
        """The id of the first frame's first chunk; `VirtualTensor` needs it to find a frame's chunks."""
        return self._chunks.start

    def allocate(self, count: int) -> list[FrameId] | None:
        """Take `count` frames, consecutive if possible and in ascending runs; None, and nothing taken, if too
        few."""
        if count < 0:
            raise MemoryMisuseError(f"cannot allocate {count} frames")
        runs = self._free.take(count)
        if runs is None:
            return None
        for run in runs:
            self._used[run.start : run.stop] = True
        return [FrameId(frame) for run in runs for frame in run]

    def allocated(self) -> npt.NDArray[np.int64]:
        """All frames that are taken, ascending."""
        return np.flatnonzero(self._used)

    def free(self, frames: Iterable[FrameId]) -> None:
        """Give frames back. Raises MemoryMisuseError, and frees none, if one is not allocated or named
        twice."""
        ordered = sorted(frames)
        for previous, frame in zip([None, *ordered], ordered, strict=False):
            self._check(frame)
            if frame == previous or not self._used[frame]:
                raise MemoryMisuseError(f"frame {frame} is not allocated, or freed twice; free what allocate() gave")
        start = 0
        for stop in range(1, len(ordered) + 1):
            if stop == len(ordered) or ordered[stop] != ordered[stop - 1] + 1:
                run = range(ordered[start], ordered[stop - 1] + 1)
                self._used[run.start : run.stop] = False
                self._free.give(run)
                start = stop

    def span(self, frame: FrameId) -> Span:
        """The bytes of `frame` in the daemon's window: its pieces one after the other."""
        self._check(frame)
        return Span(
            self._window.base + frame * self.geometry.block_bytes,
            self.geometry.block_bytes,
            self.memory.on_device,
        )

    def chunks(self, frame: FrameId) -> range:
        """The chunks that `frame` is made of."""
        self._check(frame)
        return self._chunks[frame * self._frame_chunks : (frame + 1) * self._frame_chunks]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every frame is either free or used and the window maps every chunk in
        order."""
        self._free.check_integrity()
        used = np.ones(self.capacity, bool)
        for run in self._free.runs():
            used[run.start : run.stop] = False
        if not np.array_equal(used, self._used):
            frame = int((used != self._used).argmax())
            raise IntegrityError(f"frame {frame} is marked {'used' if self._used[frame] else 'free'}, but is not")
        if not np.array_equal(self._window.mapped_chunks(), np.asarray(self._chunks)):
            raise IntegrityError("the window does not map all chunks of the pool in order")
        self.memory.check_integrity()

    def close(self) -> None:
        """Unmap the window and destroy the chunks; every use of the frames must have ended. Can be called
        twice."""
        if not self._chunks:
            return
        self._window.discard()
        self.memory.destroy(self._chunks)
        self._chunks = self._chunks[:0]
        self._free = FreeRuns(0)

    def _check(self, frame: int) -> None:
        if not 0 <= frame < self.capacity:
            raise MemoryMisuseError(f"frame {frame} does not exist; the pool has frames 0 to {self.capacity - 1}")
