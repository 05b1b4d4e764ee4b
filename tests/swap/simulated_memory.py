"""A memory tier for tests."""

from __future__ import annotations

from prefixd_swap.arena import CpuArena
from prefixd_swap.tiers.cpu import CpuTier


class SimulatedMemoryTier(CpuTier):
    """A memory tier of any level and size. It has real memory, so that bytes can be compared.

    Args:
        nbytes: capacity.
        name: see `Tier`.
        level: see `Tier`.
        on_device: its spans say that they are a device's; only `SimulatedCopyEngine` copies those.
        shared: see `Tier`.
    """

    def __init__(self, nbytes: int, *, name: str, level: int, on_device: bool = False, shared: bool = False) -> None:
        super().__init__(CpuArena(nbytes), name=name, level=level)
        self.on_device = on_device
        self.addressable = not on_device
        self.shared = shared

    def close(self) -> None:
        """Gives the memory back."""
        self.arena.close()
