"""The chunks of each frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.vmem.base import ChunkIds, FrameId

_NONE = -1


class FrameTable:
    """The chunks of every frame: a frame is a number, and the table names the chunks that are its memory.

    ```
    frame     0          1          2        3
    chunks    [0 1]      [2 3]      -        [6 7]       2 was removed; 6 and 7 were created later
    ```

    Frames are added and removed one by one, so a tier can grow and shrink while others use it, and the numbers of its
    other frames (the slots of the index) do not change. The number of a removed frame is used again.

    Args:
        frame_chunks: chunks of one frame, at least 1.
    """

    def __init__(self, frame_chunks: int) -> None:
        if frame_chunks < 1:
            raise MemoryMisuseError(f"a frame of {frame_chunks} chunks is not possible; give it at least 1")
        self.frame_chunks = frame_chunks
        self._chunks: ChunkIds = np.empty((0, frame_chunks), np.int64)
        self.count = 0
        """Frames that exist."""

    @property
    def size(self) -> int:
        """One more than the highest frame number that was ever used."""
        return len(self._chunks)

    def frames(self) -> ChunkIds:
        """The numbers of all frames, ascending."""
        return np.flatnonzero(self._exists)

    def exists(self, frame: int) -> bool:
        """Whether the frame exists."""
        return 0 <= frame < len(self._chunks) and bool(self._chunks[frame, 0] != _NONE)

    def unused(self, count: int) -> list[FrameId]:
        """The `count` lowest numbers that no frame has, ascending."""
        holes = np.flatnonzero(~self._exists)[:count]
        fresh = range(self.size, self.size + count - len(holes))
        return [FrameId(frame) for frame in (*holes.tolist(), *fresh)]

    def add(self, frames: Sequence[FrameId], chunks: Sequence[int] | ChunkIds) -> None:
        """Make frames of `chunks`, `frame_chunks` chunks for each frame in order.

        Raises MemoryMisuseError, and adds none, if a frame exists or the number of chunks is wrong.
        """
        ids = np.asarray(chunks, np.int64)
        numbers = np.asarray(frames, np.int64)
        if len(ids) != len(numbers) * self.frame_chunks:
            raise MemoryMisuseError(
                f"{len(ids)} chunks for {len(numbers)} frames; each takes {self.frame_chunks} chunks"
            )
        if not len(numbers):
            return
        taken = [frame for frame in frames if self.exists(frame)]
        if taken or int(numbers.min()) < 0 or len(np.unique(numbers)) != len(numbers):
            wrong = taken[0] if taken else frames[0]
            raise MemoryMisuseError(f"frame {wrong} exists already or is named twice; use numbers that are free")
        missing = int(numbers.max()) + 1 - len(self._chunks)
        if missing > 0:
            empty = np.full((missing, self.frame_chunks), _NONE, np.int64)
            self._chunks = np.concatenate([self._chunks, empty])
        self._chunks[numbers] = ids.reshape(len(numbers), self.frame_chunks)
        self.count += len(numbers)

    def remove(self, frames: Iterable[FrameId]) -> ChunkIds:
        """Remove frames; returns their chunks. Raises MemoryMisuseError, and removes none, if one does not exist."""
        numbers = list(frames)
        chunks = self.chunks(numbers).reshape(-1)
        if len(set(numbers)) != len(numbers):
            raise MemoryMisuseError(f"frames {numbers} name one twice; name each once")
        self._chunks[numbers] = _NONE
        self.count -= len(numbers)
        return chunks

    def chunks(self, frames: Sequence[FrameId] | ChunkIds) -> ChunkIds:
        """[len(frames), frame_chunks]: the chunks of each frame. Raises MemoryMisuseError if one does not exist."""
        numbers = np.asarray(frames, np.int64)
        inside = (numbers >= 0) & (numbers < len(self._chunks))
        if inside.all():
            found: ChunkIds = self._chunks[numbers]
            if not (found[:, :1] == _NONE).any():
                return found
            inside = found[:, 0] != _NONE
        raise MemoryMisuseError(
            f"frame {numbers[~inside][0]} does not exist; there are {self.count} frames, numbered below {self.size}"
        )

    @property
    def _exists(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        exists: np.ndarray[tuple[int], np.dtype[np.bool_]] = self._chunks[:, 0] != _NONE
        return exists
