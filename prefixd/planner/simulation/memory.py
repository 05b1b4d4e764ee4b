"""Memory of any size without bytes: its slots are real, their contents do not exist.

A plan of a machine with 256 GiB of memory runs in a process that has none of it: the cache above counts slots, decides
and moves blocks as it does over real memory. Addresses are made up; nothing may read or write them, and no checksum is
taken of them (`Tier.backed`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slots import PAGE_BYTES
from prefixd_swap.tiers import PagedTier
from prefixd_swap.vmem.base import ChunkIds, Export, VirtualMemory
from prefixd_swap.vmem.fence import Fence, HostFence

_FIRST_ADDRESS = 1 << 46  # above what a process has: a defect that touches it ends the process at once


class UnbackedMemoryTier(PagedTier):
    """A memory tier of any level and size, of which only the slots exist.

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
        capacity_bytes = nbytes // PAGE_BYTES * PAGE_BYTES
        if capacity_bytes <= 0:
            raise MemoryMisuseError(f"a {name} tier of {nbytes} bytes holds nothing; give at least {PAGE_BYTES}")
        pages = PageAllocator(capacity_bytes)
        pages.add(0, capacity_bytes)
        super().__init__(pages, capacity_bytes, _FIRST_ADDRESS, name=name, level=level)
        self.on_device = on_device
        self.addressable = not on_device
        self.shared = shared


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
        """More than any plan asks for."""
        return 1 << 62

    def total_bytes(self) -> int:
        """More than any plan asks for."""
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

    def _map_scratch(self, addresses: Sequence[int], nbytes: int) -> Callable[[], None]:
        raise MemoryMisuseError("memory without bytes has none to write to")

    def _describe(self) -> dict[str, object]:
        return {"kind": "unbacked"}

    def _export(self, meta: bytes, runs: Sequence[tuple[int, int]], further: bool) -> Export:
        raise MemoryMisuseError("memory without bytes is in one process only; it cannot be exported")

    def _close(self) -> None:
        """There is nothing to give back."""
