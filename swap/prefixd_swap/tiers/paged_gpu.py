"""The GPU tier for block tables: pages of any number of frames side by side, out of large pages that serve all sizes.

Without virtual memory a kernel finds a block's keys and values, or a state, by one address; so what a part of a block
takes must lie side by side. Parts of several sizes then share one memory by Jenga's two levels (section 4.2): large
pages, each cut into small pages of one size until it is empty again.

    frames       0  1  2  3  4  5 |  6  7  8  9 10 11 | 12 13 14 15 16 17
    large page   <-------------->  <----------------->  <--------------->   6 = lcm(2, 3), where the tier is large
    small pages  [2  ][2  ][free]  [   3   ][   3   ]        empty

`pages.PageAllocator` is both levels, over frames instead of bytes: it chooses the size of the large pages and takes a
small page in Jenga's steps (section 5.4; its module says which two are in another order). *Request-aware* it is by
`near`: a request's pages lie in large pages of its own, so that they leave together and give whole large pages back, as
long as little is free inside large pages. Jenga goes on so while there are empty ones: with the state model of
`benchmarks.jenga` that wasted 12.8% instead of 2.5%, and found 2.36 instead of 2.64 times the baseline's hits.

What virtual tensors do not have: a free small page serves its own size alone, and a part may find no large page though
frames enough are free (`stranded_bytes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.pages.page_blocks import allocate_blocks
from prefixd_swap.pages.page_eviction import Allow, ChooseVictims, Victims, Worths, choose_victims
from prefixd_swap.pages.page_table import Bools
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import PAGE_BYTES as UNIT
from prefixd_swap.tiers.base import NO_SLOT, Int64s
from prefixd_swap.tiers.gpu import GpuTier
from prefixd_swap.vmem import FrameId, FramePool, NewFrames


class PagedGpuTier(GpuTier):
    """The GPU tier's blocks. A slot is the first of the frames that a part takes, side by side.

    In the allocator a frame is `UNIT` bytes: so every page of it begins at a frame.

    Args:
        pool: all its frames are this tier's from here on. It stays its maker's to close.
        widths: frames of the parts that are to come; the large pages suit them from the start.
    """

    def __init__(self, pool: FramePool, widths: Collection[int] = (), *, name: str = "gpu", level: int = 0) -> None:
        super().__init__(pool, name=name, level=level)
        self._pages = PageAllocator(pool.capacity * UNIT)
        self._covered = 0  # frames that the allocator knows, those that there are no more among them
        self._leaving: set[int] = set()  # frames that were withdrawn: nobody's, and taken in the allocator
        self._width: dict[int, int] = {}  # of every slot that is taken
        self._take_in()
        for width in widths:
            self._pages.room(width * UNIT)

    @property
    def used_bytes(self) -> int:
        """Bytes of the frames taken."""
        return (self._pages.used_bytes // UNIT - len(self._leaving)) * self.frame_bytes

    @property
    def stranded_bytes(self) -> int:
        """Bytes that are free inside large pages of which something is taken: only parts of one size can have them."""
        pages = self._pages.pages()
        taken = pages.used_slots > 0
        return int((pages.nbytes - pages.used_bytes)[taken].sum()) // UNIT * self.frame_bytes

    @property
    def large_page_bytes(self) -> int:
        """Bytes of a large page as they are cut now."""
        return self._pages.page_bytes // UNIT * self.frame_bytes

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        """Whether there are frames enough for a block."""
        return len(nbytes) > 0 and sum(map(self._frames_for, nbytes)) <= self.pool.capacity

    def footprint(self, nbytes: Sequence[int]) -> int:
        """So many whole frames for each part as it needs."""
        return sum(map(self._frames_for, nbytes)) * self.frame_bytes

    def frames_of(self, slots: Iterable[int]) -> int:
        """How many frames these slots, which are taken, have."""
        return sum(self._width[slot] for slot in slots)

    def room(self, nbytes: int) -> int:
        """How many more parts of `nbytes` bytes each could be allocated now."""
        return self._pages.room(self._frames_for(nbytes) * UNIT)

    def withdraw(self, frames: Sequence[FrameId]) -> None:
        """Take frames in flight, allocated one by one, out of the tier for good; see `FramePool.withdraw`."""
        super().withdraw(frames)
        self._leaving.update(frames)
        for frame in frames:
            del self._width[frame]

    def admit(self, new: NewFrames) -> None:
        """Have frames that the pool has created; see `FramePool.admit`."""
        super().admit(new)
        self._take_in()

    def allocated(self) -> Int64s:
        """Every slot that is taken, ascending."""
        return np.array(sorted(self._width), np.int64)

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Single small pages, or whole large ones."""
        return partial(self._choose, self._pages)

    def choose_victims_later(self) -> ChooseVictims:
        """Among the slots of a copy."""
        return partial(self._choose, self._pages.copy())

    def check_integrity(self) -> None:
        """Count again."""
        self.pool.check_integrity()
        self._pages.check_integrity()
        offsets, sizes = self._pages.occupied()
        known = dict(zip((offsets // UNIT).tolist(), (sizes // UNIT).tolist(), strict=True))
        if known != {**self._width, **dict.fromkeys(self._leaving, 1)}:
            raise IntegrityError(f"the {self.name} tier's pages are {known}, and {self._width} are counted as taken")

    def _frames_for(self, nbytes: int) -> int:
        return -(-nbytes // self.frame_bytes)

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        if not self.ever_fits(nbytes):
            raise MemoryMisuseError(
                f"a block with parts of {list(nbytes)} bytes never fits into the {self.name} tier of "
                f"{self.pool.capacity} frames of {self.frame_bytes} bytes; make it larger"
            )
        widths = [self._frames_for(size) for size in nbytes]
        hints: list[int | None] = [None] * len(nbytes)
        if near is not None:
            hints = [None if slot == NO_SLOT else slot * UNIT for slot in near.tolist()]
        offsets = allocate_blocks(self._pages, [width * UNIT for width in widths], count, hints)
        slots = offsets // UNIT
        for column, width in zip(slots.T.tolist(), widths, strict=True):
            self._width.update(dict.fromkeys(column, width))
        return slots

    def _free(self, slots: Int64s) -> None:
        if withdrawn := self._leaving.intersection(slots.tolist()):
            raise MemoryMisuseError(f"frame {min(withdrawn)} was withdrawn from the {self.name} tier")
        self._pages.free_many(slots * UNIT)
        for slot in slots.tolist():
            del self._width[slot]

    def _take_in(self) -> None:
        """Give out what the pool has free: frames that were withdrawn once, or that are behind all others."""
        come = self.pool.allocate(self.pool.free_count) or []
        back = self._leaving.intersection(come)
        self._leaving -= back
        if back:
            self._pages.free_many(np.array(sorted(back), np.int64) * UNIT)
        if fresh := [frame for frame in come if frame >= self._covered]:
            # A frame that came and went before it was taken in does not exist: the pool names the lowest ones first.
            if fresh != list(range(self._covered, self._covered + len(fresh))):
                raise IntegrityError(f"frames {fresh[:8]} do not follow frame {self._covered - 1}")
            self._pages.add(self._covered * UNIT, len(fresh) * UNIT)
            self._covered += len(fresh)

    def _choose(
        self,
        pages: PageAllocator,
        nbytes: int,
        count: int,
        offsets: Int64s,
        worth: Worths,
        evictable: Bools | None = None,
        allow: Allow | None = None,
        /,
    ) -> Victims:
        return choose_victims(pages, self._frames_for(nbytes) * UNIT, count, offsets * UNIT, worth, evictable, allow)
