"""The tiers by name and number, for client, daemon, settings and command line."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Tier(IntEnum):
    """A place of bytes. Its value is the distance from the memory where requests run, and the tier's index column."""

    GPU = 0
    CPU = 1
    DISK = 2
    REMOTE = 3

    label: str
    """The name in settings, metrics and tables: `gpu`."""
    wire: Any
    """The number in the contract (`Tier` in cache.proto), which counts from 1. Its type is the contract's own."""

    def __init__(self, level: int) -> None:
        self.label = self.name.lower()
        self.wire = level + 1

    @classmethod
    def from_wire(cls, number: int) -> Tier:
        """Returns the tier with this number in the contract. Raises ValueError if this version does not know it."""
        return cls(number - 1)


QUOTA_TIERS = tuple(tier.label for tier in (Tier.GPU, Tier.CPU, Tier.DISK))
"""Names of the tiers that have quotas, by level: those of this host. The shared store has no quotas."""
