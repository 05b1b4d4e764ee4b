"""vTensor's pSet: the physical memory of virtual tensors, with reference counts (paper, section 5.2)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.vmem.base import FrameId, VirtualMemory
from prefixd_swap.vmem.frame_table import FrameTable


class PhysicalSet:
    """Frames with their number of references, and the list of free ones.

    It counts references to every frame of `table`. A frame that it created itself (`p_alloc`) becomes free when its
    last reference goes; other frames belong to another owner, such as the daemon, which allocates them.

    ```
    frame        0   1   2   3   4   5
    references   3   1   0   2   0   1        7 references to 4 frames: sharing saves 3 frames
    own          x   x   x               <- created here; 2 is free
    ```

    Not thread-safe: one thread owns it.

    Args:
        memory: where frames are created.
        table: the frames' chunks.
        limit: most frames to create; 0 if another process owns the memory.
    """

    def __init__(self, memory: VirtualMemory, table: FrameTable, limit: int = 0) -> None:
        self.limit = limit
        self._memory = memory
        self._table = table
        self._references: npt.NDArray[np.int32] = np.zeros(table.size, np.int32)
        self._own: set[FrameId] = set()
        self._free: dict[FrameId, None] = {}  # in the order in which they became free

    @property
    def free_count(self) -> int:
        """Frames without references, which can be allocated."""
        return len(self._free)

    @property
    def unmapped_count(self) -> int:
        """Free frames that are mapped nowhere: allocating one takes no mapping from an idle row."""
        first = self._table.chunks(list(self._free))[:, 0]
        return int(np.count_nonzero(self._memory.mapping_counts(first) == 0))

    @property
    def shared_count(self) -> int:
        """Frames that sharing saves: references beyond the first of each frame."""
        counted = self._references[self._references > 1]
        return int(counted.sum()) - len(counted)

    def references(self, frame: FrameId) -> int:
        """Number of references to `frame`."""
        return int(self._references[frame]) if frame < len(self._references) else 0

    def is_free(self, frame: FrameId) -> bool:
        """Whether `frame` has no reference and can be allocated."""
        return frame in self._free

    def p_alloc(self, count: int, wanted: Sequence[FrameId] = ()) -> list[FrameId] | None:
        """Allocate `count` frames with one reference each; None, and none allocated, if that exceeds `limit`.

        Takes free frames first: those in `wanted` (the caller has them mapped), then the longest free. Creates the
        rest; no other operation takes memory from the device (vTensor, pAlloc). Raises OutOfMemoryError, with none
        allocated, if the device has no memory left.
        """
        if count < 0:
            raise MemoryMisuseError(f"cannot allocate {count} frames")
        lacking = count - len(self._free)
        if lacking > 0:
            if len(self._own) + lacking > self.limit:
                return None
            self._create(lacking)
        taken = list(dict.fromkeys(frame for frame in wanted if frame in self._free))[:count]
        for frame in taken:
            del self._free[frame]
        # Ascending: on host memory the kernel maps chunks with consecutive ids as one mapping.
        for frame in sorted(islice(self._free, count - len(taken))):
            del self._free[frame]
            taken.append(frame)
        self._references[taken] = 1
        return taken

    def retain(self, frames: Sequence[FrameId]) -> None:
        """Add a reference to each frame. Raises MemoryMisuseError, and adds none, if one does not exist."""
        self._table.chunks(frames)
        self._fit()
        freed = [frame for frame in frames if frame in self._free]
        if freed:
            raise MemoryMisuseError(f"frame {freed[0]} is free; take it with p_alloc before it is used")
        np.add.at(self._references, np.asarray(frames, np.int64), 1)

    def release(self, frames: Iterable[FrameId]) -> None:
        """Remove a reference from each frame; a frame created here becomes free with its last reference.

        Raises MemoryMisuseError, and removes none, if a frame has no reference left.
        """
        numbers = list(frames)
        counts = np.bincount(np.asarray(numbers, np.int64), minlength=len(self._references)) if numbers else None
        if counts is not None and (len(counts) > len(self._references) or bool((counts > self._references).any())):
            raise MemoryMisuseError(f"frames {numbers[:8]} have fewer references than are given back")
        np.subtract.at(self._references, np.asarray(numbers, np.int64), 1)
        for frame in numbers:
            if frame in self._own and not self._references[frame]:
                self._free[frame] = None

    def p_free(self, keep: int = 0) -> list[FrameId]:
        """Return the memory of free frames to the device, the longest free first; `keep` frames stay.

        They must not be mapped in this process. Returns the destroyed frames.
        """
        frames = list(self._free)[: max(0, len(self._free) - keep)]
        for frame in frames:
            for chunk in self._table.chunks([frame])[0].tolist():
                self._memory.destroy(range(chunk, chunk + 1))
            self._table.remove([frame])
            del self._free[frame]
            self._own.discard(frame)
        return frames

    def check_integrity(self, referenced: Iterable[FrameId]) -> None:
        """Raise IntegrityError unless each frame is in `referenced` as often as its count says."""
        numbers = list(referenced)
        size = max([len(self._references), *(frame + 1 for frame in numbers)])
        found = np.bincount(np.asarray(numbers, np.int64), minlength=size) if numbers else np.zeros(size, np.int64)
        counted = np.zeros(size, np.int64)
        counted[: len(self._references)] = self._references
        if not np.array_equal(found, counted):
            frame = int((found != counted).argmax())
            raise IntegrityError(f"frame {frame} has {found[frame]} references, but {counted[frame]} are counted")
        idle = {frame for frame in self._own if not counted[frame]}
        if idle != set(self._free):
            raise IntegrityError(f"{len(self._free)} frames are marked as free, but {len(idle)} have no reference")

    def _create(self, count: int) -> None:
        created = self._memory.create(count * self._table.frame_chunks)
        frames = self._table.unused(count)
        self._table.add(frames, created)
        self._own.update(frames)
        self._free.update(dict.fromkeys(frames))
        self._fit()

    def _fit(self) -> None:
        missing = self._table.size - len(self._references)
        if missing > 0:
            self._references = np.append(self._references, np.zeros(missing, np.int32))
