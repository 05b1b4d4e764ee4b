"""Memory tiers that are cut into pages: the CPU tier, which is an arena. A slot is an offset in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prefixd_swap.arena import CpuArena
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.pages.page_blocks import allocate_blocks
from prefixd_swap.pages.page_eviction import ChooseVictims, choose_victims
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import round_to_slot
from prefixd_swap.tiers.base import Int64s
from prefixd_swap.tiers.memory import MemoryTier


class PagedTier(MemoryTier):
    """A memory tier in which blocks of several sizes share pages.

    Args:
        pages: the allocator of one range that begins at offset 0.
        capacity_bytes: bytes of the range.
        address: address of the range.
        name: see `Tier`.
        level: see `Tier`.
    """

    addressable = True
    on_device = False
    shared = True

    def __init__(self, pages: PageAllocator, capacity_bytes: int, address: int, *, name: str, level: int) -> None:
        super().__init__(name, level)
        self.pages = pages
        self._capacity_bytes = capacity_bytes
        self._address = address

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.pages.used_bytes

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        return self.footprint(nbytes) <= self._capacity_bytes

    def footprint(self, nbytes: Sequence[int]) -> int:
        return sum(map(round_to_slot, nbytes))

    def room(self, nbytes: int) -> int:
        return self.pages.room(nbytes)

    def addresses(self, slots: Int64s) -> Int64s:
        if slots.size and int(slots.max()) >= self._capacity_bytes:
            raise MemoryMisuseError(
                f"slot {int(slots.max())} lies outside the {self.name} tier of {self._capacity_bytes} bytes"
            )
        return slots + self._address

    def allocated(self) -> Int64s:
        return self.pages.allocated()

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Single slots, or whole pages."""
        return partial(choose_victims, self.pages)

    def choose_victims_later(self) -> ChooseVictims:
        return partial(choose_victims, self.pages.copy())

    def check_integrity(self) -> None:
        self.pages.check_integrity()

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        if not self.ever_fits(nbytes):
            raise MemoryMisuseError(
                f"a block of {sum(nbytes)} bytes in {len(nbytes)} parts never fits into the {self.name} tier of "
                f"{self._capacity_bytes} bytes; make it larger"
            )
        return allocate_blocks(self.pages, nbytes, count, near)

    def _free(self, slots: Int64s) -> None:
        self.pages.free_many(slots)


class CpuTier(PagedTier):
    """The CPU tier's blocks. The caller closes the arena."""

    def __init__(self, arena: CpuArena, *, name: str = "cpu", level: int = 1) -> None:
        capacity_bytes = arena.capacity_bytes
        super().__init__(arena.pages, capacity_bytes, arena.span(0, capacity_bytes).address, name=name, level=level)
        self.arena = arena
