"""What a tier is: the contract between the memory below and the cache above, which knows no tier by its number.

There are two kinds. A memory tier (`memory`) hands out slots, whose bytes lie at an address: blocks come and go by
copies. A store tier (`store`) is read and written by calls, and names the places of what it has stored itself.

Blocks are given in columns: n blocks of p parts each are arrays [n, p]. A part that a block lacks has slot `NO_SLOT`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.pages.page_eviction import ChooseVictims

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

NO_SLOT = -1
"""A part that is not there."""


class Tier(ABC):
    """One kind of memory or storage. The event loop's thread calls it; only bytes move elsewhere.

    Args:
        name: in metrics, messages and paths, for example "cpu"; different from every other tier's.
        level: 0 is nearest to the engine. A block is demoted to the next level and promoted from any.
    """

    addressable: bool
    """Whether a CPU can read and write its bytes at an address."""
    on_device: bool
    """Whether its bytes lie in a device's memory."""
    durable: bool
    """Whether its blocks survive the end of the process."""
    shared: bool
    """Whether others use its bytes, too: clients that map its memory, or other hosts."""
    backed = True
    """Whether there are bytes behind its slots; a plan's tiers are only accounted for."""

    def __init__(self, name: str, level: int) -> None:
        self.name = name
        self.level = level

    @property
    @abstractmethod
    def capacity_bytes(self) -> int:
        """The most that it holds."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """What of that is taken."""

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Which slots make room where blocks of several sizes share pages; None where any slot serves any block."""
        return None

    def choose_victims_later(self) -> ChooseVictims:
        """As `choose_victims`, among the slots as they are now, whatever happens meanwhile: a thread may call it.

        Raises:
            MemoryMisuseError: any slot serves any block here.
        """
        if self.choose_victims is None:
            raise MemoryMisuseError(f"every slot of the {self.name} tier serves any block; choose blocks, not pages")
        return self.choose_victims

    @abstractmethod
    def check_integrity(self) -> None:
        """Count again.

        Raises:
            IntegrityError: the accounting contradicts itself.
        """
