"""The GPU tier for block tables: pages of adjacent frames, cut from large pages that serve all sizes.

Without virtual memory a kernel finds a block's keys and values, or a state, by one address, so the frames of a part
must be adjacent. Parts of several sizes share one memory by Jenga's two levels (section 4.2): large pages, each cut
into small pages of one size until it is empty again.

    frames       0  1  2  3  4  5 |  6  7  8  9 10 11 | 12 13 14 15 16 17
    large page   <-------------->  <----------------->  <--------------->   6 = lcm(2, 3), in a large tier
    small pages  [2  ][2  ][free]  [   3   ][   3   ]        empty

`pages.PageAllocator` does both levels, over frames instead of bytes: it chooses the size of the large pages and
allocates a small page in Jenga's steps (section 5.4; its module tells which two are in another order). `near` makes it
*request-aware*: a request's pages lie in large pages of its own, so that they are freed together and whole large pages
become empty, as long as little is free inside large pages. Jenga does this while there are empty large pages, and
evicts a whole one before it uses what is free in those of other requests. `jenga_order` does so, too, to measure it:
`benchmarks.jenga --page-order jenga`. A request's large page is that of its last block.

A drawback against virtual tensors: a free small page serves only its own size, and a part may find no large page
although enough frames are free (`stranded_bytes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial

import numpy as np

from prefixd_swap.errors import IntegrityError, MemoryMisuseError
from prefixd_swap.pages.page_blocks import allocate_blocks
from prefixd_swap.pages.page_eviction import Allow, ChooseVictims, Victims, Worths, choose_victims
from prefixd_swap.pages.page_order import PageOrder
from prefixd_swap.pages.page_table import Bools
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import PAGE_BYTES as UNIT
from prefixd_swap.tiers.base import Int64s
from prefixd_swap.tiers.gpu import GpuTier
from prefixd_swap.vmem import FrameId, FramePool, NewFrames


class PagedGpuTier(GpuTier):
    """The GPU tier's blocks. A slot is the first of a part's adjacent frames.

    In the allocator a frame is `UNIT` bytes, so every page begins at a frame.

    Args:
        pool: this tier takes all its frames. The caller closes the pool.
        widths: frames of each part that is expected; the large pages suit them from the start.
        jenga_order: allocate and evict in the order of Jenga's steps (`PageOrder`).
    """

    def __init__(
        self,
        pool: FramePool,
        widths: Collection[int] = (),
        *,
        jenga_order: bool = False,
        name: str = "gpu",
        level: int = 0,
    ) -> None:
        super().__init__(pool, name=name, level=level)
        self._pages = PageAllocator(pool.capacity * UNIT)
        if jenga_order:
            self._pages.order = PageOrder.OWN
        self._covered = 0  # frames in the allocator's ranges, destroyed ones included
        self._leaving: set[int] = set()  # withdrawn frames, which stay taken in the allocator
        self._width: dict[int, int] = {}  # frames of every slot that is taken
        self._add_free_frames()
        for width in widths:
            self._pages.room(width * UNIT)

    @property
    def used_bytes(self) -> int:
        return (self._pages.used_bytes // UNIT - len(self._leaving)) * self.frame_bytes

    @property
    def stranded_bytes(self) -> int:
        """Bytes that are free inside large pages that are partly taken: only parts of one size can use them."""
        pages = self._pages.pages()
        taken = pages.used_slots > 0
        return int((pages.nbytes - pages.used_bytes)[taken].sum()) // UNIT * self.frame_bytes

    @property
    def large_page_bytes(self) -> int:
        """Bytes of a large page at present."""
        return self._pages.page_bytes // UNIT * self.frame_bytes

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        return len(nbytes) > 0 and sum(map(self._frames_for, nbytes)) <= self.pool.capacity

    def footprint(self, nbytes: Sequence[int]) -> int:
        return sum(map(self._frames_for, nbytes)) * self.frame_bytes

    def frames_of(self, slots: Iterable[int]) -> int:
        return sum(self._width[slot] for slot in slots)

    def room(self, nbytes: int) -> int:
        return self._pages.room(self._frames_for(nbytes) * UNIT)

    def withdraw(self, frames: Sequence[FrameId]) -> None:
        """As `GpuTier.withdraw`; the frames were allocated one by one."""
        super().withdraw(frames)
        self._leaving.update(frames)
        for frame in frames:
            del self._width[frame]

    def admit(self, new: NewFrames) -> None:
        super().admit(new)
        self._add_free_frames()

    def allocated(self) -> Int64s:
        return np.array(sorted(self._width), np.int64)

    @property
    def evicts_pages_alone(self) -> bool:
        """While Jenga's step 3 may succeed."""
        return self._pages.order is PageOrder.OWN

    def relent(self) -> bool:
        """No large page may be evicted: Jenga's steps 4 and 5 are next, until an allocation succeeds."""
        if self._pages.order is not PageOrder.OWN:
            return False
        self._pages.order = PageOrder.OWN_FIRST
        return True

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Single small pages, or whole large ones."""
        return partial(self._choose, self._pages)

    def choose_victims_later(self) -> ChooseVictims:
        return partial(self._choose, self._pages.copy())

    def check_integrity(self) -> None:
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
        near = None if near is None else near * UNIT  # NO_SLOT stays below 0
        slots = allocate_blocks(self._pages, [width * UNIT for width in widths], count, near) // UNIT
        if len(slots) and self._pages.order is PageOrder.OWN_FIRST:
            self._pages.order = PageOrder.OWN
        for column, width in zip(slots.T.tolist(), widths, strict=True):
            self._width.update(dict.fromkeys(column, width))
        return slots

    def _free(self, slots: Int64s) -> None:
        if withdrawn := self._leaving.intersection(slots.tolist()):
            raise MemoryMisuseError(f"frame {min(withdrawn)} was withdrawn from the {self.name} tier")
        self._pages.free_many(slots * UNIT)
        for slot in slots.tolist():
            del self._width[slot]

    def _add_free_frames(self) -> None:
        """Take the pool's free frames: they were withdrawn before, or have higher numbers than all others."""
        added = self.pool.allocate(self.pool.free_count) or []
        back = self._leaving.intersection(added)
        self._leaving -= back
        if back:
            self._pages.free_many(np.array(sorted(back), np.int64) * UNIT)
        if fresh := [frame for frame in added if frame >= self._covered]:
            # No number is skipped: the pool uses the lowest free numbers first.
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
        size, alone = self._frames_for(nbytes) * UNIT, pages.order is PageOrder.OWN
        return choose_victims(pages, size, count, offsets * UNIT, worth, evictable, allow, pages_alone=alone)
