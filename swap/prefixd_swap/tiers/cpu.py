"""Memory tiers that are cut into pages: the CPU tier, whose bytes are an arena's. A slot is an offset in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from prefixd_swap.arena import CpuArena
from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.pages.page_blocks import allocate_blocks
from prefixd_swap.pages.page_eviction import ChooseVictims, choose_victims
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import round_to_slot
from prefixd_swap.tiers.base import NO_SLOT, Int64s
from prefixd_swap.tiers.memory import MemoryTier


class PagedTier(MemoryTier):
    """A memory tier in which blocks of several sizes share pages.

    Args:
        pages: which bytes are taken, of one range that begins at 0.
        capacity_bytes: bytes of the range.
        address: where the range begins.
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
        """The tier's size."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots taken."""
        return self.pages.used_bytes

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        """Whether an empty tier has room for a block."""
        return self.footprint(nbytes) <= self._capacity_bytes

    def footprint(self, nbytes: Sequence[int]) -> int:
        """Bytes of a block's slots."""
        return sum(map(round_to_slot, nbytes))

    def room(self, nbytes: int) -> int:
        """How many more parts of `nbytes` bytes each could be allocated now."""
        return self.pages.room(nbytes)

    def addresses(self, slots: Int64s) -> Int64s:
        """Where the slots' bytes begin."""
        if slots.size and int(slots.max()) >= self._capacity_bytes:
            raise MemoryMisuseError(
                f"slot {int(slots.max())} lies outside the {self.name} tier of {self._capacity_bytes} bytes"
            )
        return slots + self._address

    def allocated(self) -> Int64s:
        """Every slot that is taken, ascending."""
        return self.pages.allocated()

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Single slots, or whole pages."""
        return partial(choose_victims, self.pages)

    def choose_victims_later(self) -> ChooseVictims:
        """Among the slots of a copy."""
        return partial(choose_victims, self.pages.copy())

    def check_integrity(self) -> None:
        """Count again."""
        self.pages.check_integrity()

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        if not self.ever_fits(nbytes):
            raise MemoryMisuseError(
                f"a block of {sum(nbytes)} bytes in {len(nbytes)} parts never fits into the {self.name} tier of "
                f"{self._capacity_bytes} bytes; make it larger"
            )
        hints: list[int | None] = [None] * len(nbytes)
        if near is not None:
            hints = [None if slot == NO_SLOT else slot for slot in near.tolist()]
        return allocate_blocks(self.pages, nbytes, count, hints)

    def _free(self, slots: Int64s) -> None:
        self.pages.free_many(slots)


class CpuTier(PagedTier):
    """The CPU tier's blocks. The arena stays its maker's to close."""

    def __init__(self, arena: CpuArena, *, name: str = "cpu", level: int = 1) -> None:
        capacity_bytes = arena.capacity_bytes
        super().__init__(arena.pages, capacity_bytes, arena.span(0, capacity_bytes).address, name=name, level=level)
        self.arena = arena
