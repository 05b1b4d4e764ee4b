"""The contract of a tier, between the memory below and the cache above, which does not depend on tier numbers.

There are two kinds. A memory tier (`memory`) allocates slots with an address, and blocks are copied there. A store tier
(`store`) is read and written by calls, and chooses the slots itself.

Blocks are given in columns: n blocks of p parts each are arrays [n, p]. A missing part has slot `NO_SLOT`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.pages.page_eviction import ChooseVictims

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]

NO_SLOT = -1
"""The slot of a missing part."""


class Tier(ABC):
    """One kind of memory or storage. The event loop's thread calls it; other threads only move bytes.

    Args:
        name: in metrics, messages and paths, for example "cpu"; unique.
        level: 0 is nearest to the engine. A block is demoted to the next level and promoted from any level.
    """

    addressable: bool
    """Whether a CPU can read and write its bytes at an address."""
    on_device: bool
    """Whether its bytes are in a device's memory."""
    durable: bool
    """Whether its blocks survive the process."""
    shared: bool
    """Whether other processes use its bytes: clients that map its memory, or other hosts."""
    backed = True
    """Whether its slots have memory; the tiers of `prefixd plan` only do the accounting."""

    def __init__(self, name: str, level: int) -> None:
        self.name = name
        self.level = level

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """The most bytes of blocks."""

    @property
    def least_bytes(self) -> int:
        """Bytes that the tier has at any time: less than its capacity if it grows and shrinks by itself."""
        return self.capacity_bytes

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Allocated bytes."""

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Chooses slots to evict where blocks of several sizes share pages; None if any slot serves any block."""
        return None

    @property
    def choose_mixed(self) -> ChooseVictims | None:
        """As `choose_victims`, for slots in pages with slots of any sizes; None if there are no such pages."""
        return None

    def choose_victims_later(self) -> ChooseVictims:
        """As `choose_victims`, on a snapshot of the slots, so that a thread may call it.

        Raises:
            MemoryMisuseError: any slot of this tier serves any block.
        """
        if self.choose_victims is None:
            raise MemoryMisuseError(f"every slot of the {self.name} tier serves any block; choose blocks, not pages")
        return self.choose_victims

    @property
    def evicts_pages_alone(self) -> bool:
        """Whether `choose_victims` chooses whole pages even where all blocks have parts of one size."""
        return False

    def relent(self) -> bool:
        """Allow the next allocation, and evictions for it, what the tier tries last; called when nothing could be
        evicted for it. False if that is allowed already, or there is no such thing."""
        return False

    @abstractmethod
    def check_integrity(self) -> None:
        """Check the accounting.

        Raises:
            IntegrityError: it contradicts itself.
        """
