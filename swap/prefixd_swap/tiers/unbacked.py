"""Tiers of any size without bytes: slots, places and time are real, what they would hold is not there.

A plan of a machine with 256 GiB of memory runs in a process that has none of it: the cache above counts slots, decides
and moves blocks as it does over real memory, and a movement takes as long as its link says. Addresses are made up;
nobody may read or write them, and no checksum is taken of them (`Tier.backed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from prefixd_swap.copies.copies import CopyEngine, Pair
from prefixd_swap.errors import LostBytesError, MemoryMisuseError
from prefixd_swap.pages.page_blocks import allocate_blocks
from prefixd_swap.pages.page_eviction import ChooseVictims, choose_victims
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slab.index.block_record import DiskPart
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from prefixd_swap.spans import Span
from prefixd_swap.tiers.base import NO_SLOT, Int64s
from prefixd_swap.tiers.memory import MemoryTier
from prefixd_swap.tiers.simulated import SimulatedLink, SimulatedStoreTier
from prefixd_swap.vmem.base import ChunkIds, Export, VirtualMemory
from prefixd_swap.vmem.fence import Fence, HostFence

_FIRST_ADDRESS = 1 << 46  # above what a process has: a defect that touches it ends the process at once


class UnbackedMemoryTier(MemoryTier):
    """A memory tier of any level and size, of which only the slots exist. Accounted as the arena is.

    Args:
        nbytes: capacity; whole pages of 4096 bytes are used.
        name: see `Tier`.
        level: see `Tier`.
        on_device: its spans say that they are a device's.
        shared: see `Tier`.

    Raises:
        MemoryMisuseError: it holds nothing.
    """

    backed = False

    def __init__(self, nbytes: int, *, name: str, level: int, on_device: bool = False, shared: bool = False) -> None:
        super().__init__(name, level)
        self._capacity_bytes = nbytes // PAGE_BYTES * PAGE_BYTES
        if self._capacity_bytes <= 0:
            raise MemoryMisuseError(f"a {name} tier of {nbytes} bytes holds nothing; give at least {PAGE_BYTES}")
        self.on_device = on_device
        self.addressable = not on_device
        self.shared = shared
        self._pages = PageAllocator(self._capacity_bytes)
        self._pages.add(0, self._capacity_bytes)

    @property
    def capacity_bytes(self) -> int:
        """The tier's size."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots taken."""
        return self._pages.used_bytes

    def ever_fits(self, nbytes: Sequence[int]) -> bool:
        """Whether an empty tier has room for a block."""
        return self.footprint(nbytes) <= self._capacity_bytes

    def footprint(self, nbytes: Sequence[int]) -> int:
        """Bytes of a block's slots."""
        return sum(map(round_to_slot, nbytes))

    def room(self, nbytes: int) -> int:
        """How many more parts of `nbytes` bytes each could be allocated now."""
        return self._pages.room(nbytes)

    def addresses(self, slots: Int64s) -> Int64s:
        """Where the slots' bytes would begin."""
        if slots.size and int(slots.max()) >= self._capacity_bytes:
            raise MemoryMisuseError(
                f"slot {int(slots.max())} lies outside the {self.name} tier of {self._capacity_bytes} bytes"
            )
        return slots + _FIRST_ADDRESS

    def allocated(self) -> Int64s:
        """Every slot that is taken, ascending."""
        return self._pages.allocated()

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Single slots, or whole pages."""
        return partial(choose_victims, self._pages)

    def choose_victims_later(self) -> ChooseVictims:
        """Among the slots of a copy."""
        return partial(choose_victims, self._pages.copy())

    def check_integrity(self) -> None:
        """Count again."""
        self._pages.check_integrity()

    def _allocate(self, nbytes: Sequence[int], count: int, near: Int64s | None) -> Int64s:
        if not self.ever_fits(nbytes):
            raise MemoryMisuseError(
                f"a block of {sum(nbytes)} bytes in {len(nbytes)} parts never fits into the {self.name} tier of "
                f"{self._capacity_bytes} bytes; make it larger"
            )
        hints: list[int | None] = [None] * len(nbytes)
        if near is not None:
            hints = [None if slot == NO_SLOT else slot for slot in near.tolist()]
        return allocate_blocks(self._pages, nbytes, count, hints)

    def _free(self, slots: Int64s) -> None:
        self._pages.free_many(slots)


class UnbackedMemory(VirtualMemory):
    """Chunks of a device that is not there: for a `FramePool` of any size. It is never exported.

    Args:
        chunk_bytes: of a chunk, any number above 0.
    """

    backed = False

    def __init__(self, chunk_bytes: int) -> None:
        if chunk_bytes < 1:
            raise MemoryMisuseError(f"a chunk of {chunk_bytes} bytes is not possible; it must be positive")
        super().__init__(chunk_bytes, "simulated", on_device=True, owner=True)
        self._next_address = _FIRST_ADDRESS

    def available_bytes(self) -> int:
        """See `VirtualMemory.available_bytes`: more than anybody asks for."""
        return 1 << 62

    def total_bytes(self) -> int:
        """See `VirtualMemory.total_bytes`: more than anybody asks for."""
        return 1 << 62

    def _make_fence(self) -> Fence:
        return HostFence()

    def _create(self, chunks: range) -> None:
        """There is nothing to create."""

    def _destroy(self, chunks: range) -> None:
        """There is nothing to give back."""

    def _drop(self, chunks: range) -> None:
        raise MemoryMisuseError("memory without bytes is in one process only; nothing of it can be dropped")

    def _import(self, chunks: range, fds: Iterable[int]) -> None:
        raise MemoryMisuseError("memory without bytes is in one process only; nothing of it can be imported")

    def _reserve(self, nbytes: int) -> int:
        address = self._next_address
        self._next_address += nbytes
        return address

    def _free(self, address: int, nbytes: int) -> None:
        """Addresses are never given twice."""

    def _map(self, address: int, chunks: ChunkIds) -> None:
        """The kernel is not told."""

    def _take_mappings(self, count: int) -> None:
        """The kernel has none."""

    def _give_mappings(self, count: int) -> None:
        """The kernel has none."""

    def _unmap(self, address: int, count: int) -> None:
        """The kernel is not told."""

    def _describe(self) -> dict[str, object]:
        return {"kind": "unbacked"}

    def _export(self, meta: bytes, runs: Sequence[tuple[int, int]], further: bool) -> Export:
        raise MemoryMisuseError("memory without bytes is in one process only; it cannot be exported")

    def _close(self) -> None:
        """There is nothing to give back."""


class UnbackedCopyEngine(CopyEngine):
    """Lets the time of copies pass: to a device over one link, and from it, or beside it, over another.

    Args:
        to_device: the way of what goes to a device.
        from_device: the way of everything else.
    """

    def __init__(self, to_device: SimulatedLink, from_device: SimulatedLink) -> None:
        self._to_device = to_device
        self._from_device = from_device
        self._closed = False

    async def copy(self, pairs: Sequence[Pair]) -> None:
        """Returns when the bytes would have arrived."""
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        up = down = 0
        for destination, source in pairs:
            if destination.nbytes != source.nbytes:
                raise MemoryMisuseError(
                    f"cannot copy {source.nbytes} bytes over {destination.nbytes} bytes; sizes must match"
                )
            if destination.on_device:
                up += source.nbytes
            else:
                down += source.nbytes
        if up:
            await self._to_device.move(up)
        if down:
            await self._from_device.move(down)

    def close(self) -> None:
        """End it."""
        self._closed = True


class UnbackedStoreTier(SimulatedStoreTier):
    """A simulated store that keeps records and places, and no bytes. Its checksums are 0."""

    backed = False

    def _contents(self, span: Span, checksum: int | None) -> tuple[bytes, int]:
        del span
        return b"", 0 if checksum is None else checksum

    def _checked(self, part: DiskPart) -> bytes:
        if part.slot not in self._bytes:
            raise LostBytesError(f"slot {part.slot} of the simulated {self.name} tier is gone; drop its block")
        return b""

    def _copy_out(self, part: DiskPart, into: Span) -> None:
        del into
        self._checked(part)
