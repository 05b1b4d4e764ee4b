"""The GPU tier's memory as frames of one size: any frame serves any KV group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import IntegrityError, MemoryMisuseError, SwapError
from prefixd_swap.group_shape import chunks_per_frame
from prefixd_swap.number_runs import consecutive_runs
from prefixd_swap.spans import Span
from prefixd_swap.vmem.base import ChunkIds, FrameId, VirtualMemory
from prefixd_swap.vmem.frame_table import FrameTable
from prefixd_swap.vmem.free_runs import FreeRuns


@dataclass(frozen=True, slots=True)
class NewFrames:
    """Frames with memory that the pool has not admitted yet; `chunks` are their chunks, in order."""

    frames: list[FrameId]
    chunks: ChunkIds


class FramePool:
    """The daemon's side of the GPU tier: frames of one size, recycled for as long as they exist.

    Frame n is mapped in one window at offset n * frame_bytes, so a frame is contiguous there. A freed frame keeps its
    bytes. The pool grows and shrinks while frames are in use. Creating and destroying memory takes long and may run in
    any thread; only the thread that owns the pool makes the other calls:

    ```
    grow      new = create(count)  (any thread)     admit(new)
    shrink    allocate, withdraw(frames)     destroy(frames)  (any thread, no process maps them)     forget(frames)
    ```

    Args:
        memory: where frames are created.
        frame_bytes: bytes of a frame, whole chunks.
        frames: frames to create now; the caller waits for that.
        most: the most frames that can ever exist: addresses are reserved for them.

    Raises GeometryError if a frame is not made of whole chunks, OutOfMemoryError if there is not enough memory.
    """

    def __init__(self, memory: VirtualMemory, frame_bytes: int, frames: int, most: int | None = None) -> None:
        if frames < 1:
            raise MemoryMisuseError(f"a pool of {frames} frames is not possible; give the gpu tier room for a block")
        self.memory = memory
        self.frame_bytes = frame_bytes
        self.most = max(frames, most or frames)
        self.table = FrameTable(chunks_per_frame(frame_bytes, memory.chunk_bytes))
        self._window = memory.reserve(self.most * frame_bytes)
        self._free = FreeRuns(0)
        self._used: npt.NDArray[np.bool_] = np.zeros(0, bool)
        self._leaving: set[FrameId] = set()
        self._plan: int | None = None
        self._may_grow_to = 0
        self._least: int | None = None
        self._closed = False
        try:
            self.admit(self.create(frames))
        except BaseException:
            self._window.discard()
            raise

    @property
    def capacity(self) -> int:
        """Frames that exist and are not withdrawn: free or allocated."""
        return self.table.count - len(self._leaving)

    @property
    def lasting(self) -> int:
        """Frames that stay: `capacity`, or fewer while the pool is about to shrink."""
        return self.capacity if self._plan is None else min(self.capacity, self._plan)

    @property
    def attainable(self) -> int:
        """Frames that the pool has, or gets when they are wanted: `lasting`, or more where its owner makes it grow."""
        return max(self.lasting, self._may_grow_to)

    @property
    def least(self) -> int:
        """Frames that the pool has at any time: fewer than `lasting` if it grows and shrinks by itself."""
        return self.lasting if self._least is None else min(self.lasting, self._least)

    @property
    def free_count(self) -> int:
        """Frames that can be allocated."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Frames that are allocated."""
        return self.capacity - len(self._free)

    @property
    def first_address(self) -> int:
        """The address of frame 0 in the window, even if frame 0 does not exist."""
        return self._window.base

    def allocate(self, count: int) -> list[FrameId] | None:
        """Take `count` frames, consecutive if possible and in ascending runs; None, and nothing taken, if too few."""
        if count < 0:
            raise MemoryMisuseError(f"cannot allocate {count} frames")
        runs = self._free.take(count)
        if runs is None:
            return None
        for run in runs:
            self._used[run.start : run.stop] = True
        return [FrameId(frame) for run in runs for frame in run]

    def allocated(self) -> npt.NDArray[np.int64]:
        """All allocated frames, ascending."""
        return np.flatnonzero(self._used)

    def free(self, frames: Iterable[FrameId]) -> None:
        """Give frames back. Raises MemoryMisuseError, and frees none, if one is not allocated or named twice."""
        for run in consecutive_runs(self._check_allocated(frames)):
            self._used[run.start : run.stop] = False
            self._free.give(run)

    def span(self, frame: FrameId) -> Span:
        """The bytes of `frame` in the daemon's window. Raises MemoryMisuseError if the frame does not exist."""
        self.table.chunks([frame])
        return Span(self._window.base + frame * self.frame_bytes, self.frame_bytes, self.memory.on_device)

    # -- growing and shrinking ----------------------------------------------------------------------------------

    def plan(self, count: int | None) -> None:
        """Announce that the pool shrinks to `count` frames; None: all frames stay. See `lasting`."""
        self._plan = count

    def let_grow(self, count: int) -> None:
        """Announce that the pool grows to as many as `count` frames when they are wanted. See `attainable`.

        The first call says, too, that it shrinks again, to the frames that it has then. See `least`.
        """
        self._may_grow_to = count
        if self._least is None:
            self._least = self.capacity

    def create(self, count: int) -> NewFrames:
        """Create memory for `count` more frames, in any thread; one call at a time.

        Raises MemoryMisuseError above `most`, OutOfMemoryError without enough memory, with nothing created.
        """
        if count < 1 or self.table.count + count > self.most:
            raise MemoryMisuseError(
                f"{count} more frames are not possible: there are {self.table.count}, and addresses for {self.most}"
            )
        frames = self.table.unused(count)
        chunks = self.memory.create(count * self.table.frame_chunks)
        ids = np.arange(chunks.start, chunks.stop)
        per_frame = self.table.frame_chunks
        done = 0
        try:
            for run in consecutive_runs(frames):
                self._window.map(run.start * self.frame_bytes, ids[done * per_frame : (done + len(run)) * per_frame])
                done += len(run)
        except SwapError:
            for run in consecutive_runs(frames[:done]):
                self._window.unmap(run.start * self.frame_bytes, len(run) * self.frame_bytes)
            self.memory.destroy(chunks)
            raise
        return NewFrames(frames, ids)

    def admit(self, new: NewFrames) -> None:
        """Enter frames that `create` made; they are free."""
        self.table.add(new.frames, new.chunks)
        if self.table.size > len(self._used):
            self._used = np.append(self._used, np.zeros(self.table.size - len(self._used), bool))
        for run in consecutive_runs(new.frames):
            self._free.give(run)

    def withdraw(self, frames: Sequence[FrameId]) -> None:
        """Take allocated frames out of the pool before they are destroyed; `capacity` falls.

        Raises MemoryMisuseError, and withdraws none, if one is not allocated or no frame would stay.
        """
        ordered = self._check_allocated(frames)
        if len(ordered) >= self.capacity:
            raise MemoryMisuseError(f"{len(ordered)} of {self.capacity} frames cannot go; one has to stay")
        self._used[ordered] = False
        self._leaving.update(ordered)

    def destroy(self, frames: Sequence[FrameId]) -> None:
        """Give the memory of withdrawn frames back to the device, in any thread; call `forget` after it.

        No other process may map them, nor keep handles of their chunks. Raises OutOfMemoryError if unmapping splits a
        mapping of the kernel and the process has no mapping left, DeviceError if the device refuses. Call it again to
        destroy the rest.
        """
        ordered = sorted(frames)
        if not self._leaving.issuperset(ordered):
            raise MemoryMisuseError(f"frames {ordered[:8]} were not withdrawn; withdraw them before they are destroyed")
        frame_bytes = self.frame_bytes
        # An earlier call, which failed, may have unmapped some of them.
        mapped = [frame for frame in ordered if self._window.chunks(frame * frame_bytes, frame_bytes)[0] >= 0]
        for run in consecutive_runs(mapped):
            self._window.unmap(run.start * frame_bytes, len(run) * frame_bytes)
        self._destroy_chunks(self.table.chunks(ordered).reshape(-1))

    def forget(self, frames: Sequence[FrameId]) -> None:
        """Remove destroyed frames; new frames may get their numbers."""
        self._leaving.difference_update(frames)
        self.table.remove(frames)

    # -- end ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every frame is free, used or leaving and the window maps every chunk in place.

        The window is not checked for frames that are being created or destroyed.
        """
        self._free.check_integrity()
        found = np.zeros(len(self._used), np.int64)
        for run in self._free.runs():
            found[run.start : run.stop] += 1
        found += self._used
        found[list(self._leaving)] += 1
        expected = np.zeros(len(self._used), np.int64)
        expected[self.table.frames()] = 1
        if not np.array_equal(found, expected):
            frame = int((found != expected).argmax())
            raise IntegrityError(f"frame {frame} is counted {found[frame]} times as free, used or leaving")
        frames = np.setdiff1d(self.table.frames(), np.fromiter(self._leaving, np.int64, len(self._leaving)))
        mapped = self._window.chunks(0, self.table.size * self.frame_bytes)
        if not np.array_equal(mapped.reshape(self.table.size, -1)[frames], self.table.chunks(frames)):
            raise IntegrityError("the window does not map the chunks of all frames in order")
        self.memory.check_integrity()

    def close(self) -> None:
        """Unmap the window and destroy the chunks; every use of the frames must have ended. Can be called twice."""
        if self._closed:
            return
        self._closed = True
        self._window.discard()
        self._destroy_chunks(self.table.remove([FrameId(frame) for frame in self.table.frames().tolist()]))
        self._free = FreeRuns(0)

    def _destroy_chunks(self, chunks: ChunkIds) -> None:
        """Destroy those of `chunks` that still exist after an earlier call failed."""
        for run in consecutive_runs(sorted(chunks[self.memory.exist(chunks)].tolist())):
            self.memory.destroy(run)

    def _check_allocated(self, frames: Iterable[FrameId]) -> list[FrameId]:
        ordered = sorted(frames)
        for previous, frame in zip([None, *ordered], ordered, strict=False):
            if not self.table.exists(frame):
                self.table.chunks([frame])  # raises
            if frame == previous or not self._used[frame]:
                raise MemoryMisuseError(f"frame {frame} is not allocated, or freed twice; free what allocate() gave")
        return ordered
