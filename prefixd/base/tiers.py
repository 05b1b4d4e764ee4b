"""The tiers by name and number, once for client, daemon, settings and command line."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Tier(IntEnum):
    """Where bytes are; the value is the distance from where requests run, and the tier's column in the index."""

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
        """The tier with this number in the contract. Raises ValueError for one that this version does not know."""
        return cls(number - 1)


QUOTA_TIERS = tuple(tier.label for tier in (Tier.GPU, Tier.CPU, Tier.DISK))
"""Names of the tiers that have quotas, by level: what this host has. The shared store has none."""
