"""The pages of one sequence, and the runs of them that lie side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixd.worker.memory.frame_window import NO_PAGE


class Extents(NamedTuple):
    """Runs of adjacent pages, in the order of the tokens, each ``[runs]``.

    Example, 16 tokens a block, pages of 2 frames, the pages [6, 8, 30, -1, 32]: blocks [0, 2, 4], counts [2, 1, 1] and
    pages [6, 30, 32]; a block without a page is in no run.
    """

    blocks: npt.NDArray[np.int32]
    counts: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]


class BlockTable:
    """The pages of one sequence, block by block; -1 where it has none.

    Attributes:
        pages: the first frame of each, in int32.
    """

    def __init__(self, pages: Sequence[int] | npt.NDArray[np.int32] = ()) -> None:
        self.pages = np.array(pages, np.int32)
        self._extents: tuple[int, Extents] | None = None  # with the width that they are for

    @property
    def frames(self) -> list[int]:
        """The first frame of each page."""
        pages: list[int] = self.pages.tolist()
        return pages

    @property
    def blocks(self) -> int:
        """How many blocks have memory, or had it."""
        return len(self.pages)

    def append(self, pages: Sequence[int]) -> None:
        """Pages for further blocks."""
        self.pages = np.concatenate((self.pages, np.array(pages, np.int32)))
        self._extents = None

    def clear(self) -> None:
        """Leave the table without blocks."""
        self.pages = np.empty(0, np.int32)
        self._extents = None

    def give_up(self, count: int) -> list[int]:
        """Take the first `count` pages out of the table; returns them."""
        given: list[int] = self.pages[:count].tolist()
        self.pages[:count] = NO_PAGE
        self._extents = None
        return given

    def extents(self, width: int) -> Extents:
        """The runs of pages that are each `width` frames behind the one before; found anew when pages have changed."""
        if self._extents is None or self._extents[0] != width:
            self._extents = width, self._find(width)
        return self._extents[1]

    def _find(self, width: int) -> Extents:
        here = np.flatnonzero(self.pages != NO_PAGE)
        pages = self.pages[here]
        breaks = np.flatnonzero((np.diff(here) != 1) | (np.diff(pages) != width)) + 1
        firsts = np.concatenate(([0], breaks)) if len(here) else breaks
        counts = np.diff(np.concatenate((firsts, [len(here)])))
        return Extents(here[firsts].astype(np.int32), counts.astype(np.int32), pages[firsts])
