"""Maps all frames of the daemon's memory side by side at one address, for block tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.vmem import FrameId, FrameTable, VirtualMemory

NO_PAGE = -1
"""In place of a page that a sequence does not need."""


class FrameWindow:
    """Maps every frame at its number: frame f lies at f * frame_bytes. A frame stays mapped until it is forgotten.

    Args:
        memory: the memory of all frames.
        table: the frames' chunks.
        frame_bytes: of a frame.
        frames: most frames that there will be.
    """

    def __init__(self, memory: VirtualMemory, table: FrameTable, frame_bytes: int, frames: int) -> None:
        self.frame_bytes = frame_bytes
        self.frames = frames
        self._table = table
        self._range = memory.reserve(frames * frame_bytes)
        self._fence = memory.fence()
        self._mapped = np.zeros(frames, np.bool_)
        self._read_on_cuda = False
        self._ended = False
        self._groups: list[Pages] = []
        try:
            self.map_all()
        except BaseException:
            self._range.discard()
            raise

    def has(self, first: int, count: int) -> bool:
        """Whether frames [first, first + count) exist; new ones are mapped.

        Raises OutOfMemoryError when no mapping is left.
        """
        if first < 0 or first + count > self.frames:
            return False
        if not self._mapped[first : first + count].all():
            self.map_all()
        return bool(self._mapped[first : first + count].all())

    def map_all(self) -> None:
        """Map the frames that exist and are not mapped yet. Raises as `has`."""
        frames = np.asarray(self._table.frames(), np.int64)
        frames = frames[~self._mapped[frames]]
        for run in np.split(frames, 1 + np.flatnonzero(np.diff(frames) != 1)):
            if len(run):
                chunks = self._table.chunks([FrameId(frame) for frame in run.tolist()]).reshape(-1)
                self._range.map(int(run[0]) * self.frame_bytes, chunks)
                self._mapped[run] = True

    def pages(self, width: int) -> Pages:
        """The small pages of a group, of `width` frames each."""
        self._groups.append(Pages(self, width))
        return self._groups[-1]

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap frames, after the device has finished its work on them.

        Raises MemoryMisuseError, and unmaps none, if a sequence has one of them.
        """
        for pages in self._groups:
            pages.check_unused(frames)
        if frames and self._read_on_cuda:
            torch.cuda.synchronize()  # reads for a closed sequence may still be queued
        for frame in frames:
            if self._mapped[frame]:
                self._range.unmap(frame * self.frame_bytes, self.frame_bytes)
                self._mapped[frame] = False

    def retire(self, on_retired: Callable[[], None]) -> None:
        """Call `on_retired`, now or by `poll`, once the device has done what is queued on the current stream."""
        streams = [torch.cuda.current_stream().cuda_stream] if self._read_on_cuda else []
        self._fence.retire(streams, on_retired)

    def poll(self, wait: bool = False) -> int:
        """Make the calls of `retire` that are due, or with `wait` all; returns how many are left."""
        return self._fence.poll(wait)

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]) -> torch.Tensor:
        """A view of the whole window."""
        tensor = self._range.tensor(tuple(shape), dtype, tuple(strides))
        self._read_on_cuda |= tensor.is_cuda
        return tensor

    def end(self) -> None:
        """Give the addresses back; may be called twice, since groups share the window."""
        if not self._ended:
            self._ended = True
            self._fence.close()
            self._range.discard()


class Pages:
    """The small pages of one group (Jenga, section 4.2): a block's keys and values, or a state, of `width` frames side
    by side. A page is named by its first frame.

    Args:
        window: where the frames are.
        width: frames of a page.

    Attributes:
        users: number of sequences that have a page.
        shared: number of pages saved because sequences share them: the sum of users - 1 over all pages.
    """

    def __init__(self, window: FrameWindow, width: int) -> None:
        self.window = window
        self.width = width
        self.users: Counter[int] = Counter()
        self.shared = 0

    @property
    def count(self) -> int:
        """Number of frames that a page may begin at: any frame, not only multiples of the width."""
        return self.window.frames - self.width + 1

    def add(self, pages: Sequence[int]) -> None:
        """One more sequence has these pages; NO_PAGE is none.

        Raises OutOfMemoryError when no mapping is left, MemoryMisuseError for a frame that does not exist; the sequence
        has none of them then.
        """
        for page in pages:
            if page != NO_PAGE and not self.window.has(page, self.width):
                raise MemoryMisuseError(f"a page of {self.width} frames from frame {page} on does not exist")
        for page in pages:
            if page != NO_PAGE:
                self.shared += self.users[page] > 0
                self.users[page] += 1

    def remove(self, pages: Sequence[int]) -> None:
        """A sequence gives up these pages; the next owner's work is queued behind on the same stream."""
        for page in pages:
            if page != NO_PAGE:
                self.users[page] -= 1
                self.shared -= self.users[page] > 0
                if not self.users[page]:
                    del self.users[page]

    def check_unused(self, frames: Sequence[int]) -> None:
        """Raises MemoryMisuseError if a sequence has one of `frames`."""
        leaving = set(frames)
        for page in self.users:
            if not leaving.isdisjoint(range(page, page + self.width)):
                raise MemoryMisuseError(
                    f"frames {page} to {page + self.width - 1} are to go, but a request has them; end it first"
                )
