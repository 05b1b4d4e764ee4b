"""The pages of one KV group, each at one address for as long as it is the same frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch

from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError
from prefixd_swap.vmem import FrameId, FrameTable, VirtualMemory
from prefixd_swap.vmem.base import ChunkIds

NO_PAGE = -1
"""In place of a page that a sequence does not need."""


class MappedPages:
    """Small pages (Jenga, section 4.2): a block's keys and values, or a state, of `page_frames` frames.

    ```
    page_frames = 2     frames of a block         [3 4]   [7 1]   [5 0]
                        its page                    0       1       2       where it lies: page * page_bytes
    ```

    A page is mapped when it is first used, and stays so: using it again costs nothing. When one of its frames has
    become part of another page of the group, it goes. A page of one frame has its frame's number.

    Args:
        memory: the memory of all frames.
        table: the frames' chunks.
        page_frames: frames of a page.
        page_bytes: bytes of a page.
        frames: most frames that there will be.

    Attributes:
        mapped: the frames of every page that is mapped, by its number.
        users: of every page, how many sequences have it.
        shared: how often a page was had by one more sequence than one, and still is.
        neighbours: the pages of all groups; those that nobody uses go when there is no mapping left.
    """

    def __init__(
        self, memory: VirtualMemory, table: FrameTable, *, page_frames: int, page_bytes: int, frames: int
    ) -> None:
        self.page_frames = page_frames
        self.page_bytes = page_bytes
        self.mapped: dict[int, tuple[int, ...]] = {}
        self.users: Counter[int] = Counter()
        self.shared = 0
        self.neighbours: Sequence[MappedPages] = (self,)
        self._table = table
        self._read_on_cuda = False
        self._range = memory.reserve(frames // page_frames * page_bytes)
        self._page_of: dict[int, int] = {}  # by frame
        self._unused: list[int] = []  # page numbers below `_next`
        self._next = 0

    def add(self, frames: Sequence[int]) -> list[int]:
        """One more sequence has the pages of these frames, `page_frames` each; their numbers, NO_PAGE where one is -1.

        Raises OutOfMemoryError when no mapping is left, MemoryMisuseError for a frame that does not exist or is part of
        another page that a sequence has; the sequence has none of them then.
        """
        pages: list[int] = []
        try:
            for of_page in self._grouped(frames):
                page = self._map(of_page)
                if page != NO_PAGE:
                    self.shared += self.users[page] > 0
                    self.users[page] += 1
                pages.append(page)
        except BaseException:
            self.remove(pages)
            raise
        return pages

    def remove(self, pages: Sequence[int]) -> None:
        """A sequence has these pages no more. They stay mapped: the next owner is ordered behind on the same stream."""
        for page in pages:
            if page != NO_PAGE:
                self.users[page] -= 1
                self.shared -= self.users[page] > 0
                if not self.users[page]:
                    del self.users[page]

    def forget(self, frames: Sequence[int]) -> None:
        """Unmap the pages of which one of `frames` is a part; waits for what the device may still do with them.

        Raises MemoryMisuseError, and unmaps none, if a sequence has one of them.
        """
        pages = {self._page_of[frame] for frame in frames if frame in self._page_of}
        for page in pages:
            if self.users.get(page):
                raise MemoryMisuseError(f"frames {self.mapped[page]} are to go, but a request has them; end it first")
        self._unmap(pages)

    def reclaim(self) -> None:
        """Unmap the pages that no sequence has."""
        self._unmap([page for page in self.mapped if not self.users.get(page)])

    def tensor(self, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int]) -> torch.Tensor:
        """A view of all pages."""
        tensor = self._range.tensor(tuple(shape), dtype, tuple(strides))
        self._read_on_cuda |= tensor.is_cuda
        return tensor

    def end(self) -> None:
        """Give the addresses back."""
        self._range.discard()

    def _grouped(self, frames: Sequence[int]) -> Iterator[tuple[int, ...]]:
        size = self.page_frames
        return (tuple(frames[first : first + size]) for first in range(0, len(frames), size))

    def _map(self, frames: tuple[int, ...]) -> int:
        if -1 in frames:
            return NO_PAGE
        page = self._page_of.get(frames[0], NO_PAGE)
        if page != NO_PAGE and self.mapped[page] == frames:
            return page
        chunks = self._table.chunks([FrameId(frame) for frame in frames]).reshape(-1)
        others = {self._page_of[frame] for frame in frames if frame in self._page_of}
        for other in others:
            if self.users.get(other):
                raise MemoryMisuseError(f"frames {frames} are one page, but a request has {self.mapped[other]} as one")
        self._unmap(others)
        try:
            return self._map_at_once(frames, chunks)
        except OutOfMemoryError:
            for pages in self.neighbours:
                pages.reclaim()
            return self._map_at_once(frames, chunks)

    def _map_at_once(self, frames: tuple[int, ...], chunks: ChunkIds) -> int:
        page = frames[0]
        if self.page_frames > 1:
            if not self._unused:
                self._unused.append(self._next)
                self._next += 1
            page = self._unused[-1]
        self._range.map(page * self.page_bytes, chunks)
        if self.page_frames > 1:
            self._unused.pop()
        self.mapped[page] = frames
        self._page_of.update(dict.fromkeys(frames, page))
        return page

    def _unmap(self, pages: Collection[int]) -> None:
        if pages and self._read_on_cuda:
            torch.cuda.synchronize()  # what reads them for a sequence that was closed may still be queued
        for page in pages:
            self._range.unmap(page * self.page_bytes, self.page_bytes)
            for frame in self.mapped.pop(page):
                del self._page_of[frame]
            if self.page_frames > 1:
                self._unused.append(page)
