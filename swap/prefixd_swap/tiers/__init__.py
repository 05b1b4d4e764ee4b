"""Tiers as objects: memory with slots, and stores that are read and written.

`base`, `memory` and `store` are the contract; `gpu` (or `paged_gpu`, for block tables), `cpu` and `disk` wrap this
machine's, and `remote` a store that other hosts share. `memory_copies` moves blocks between two memory tiers;
`block_transfer` is a movement as its caller sees it.
"""

from __future__ import annotations

from prefixd_swap.tiers.absent import AbsentTier
from prefixd_swap.tiers.base import NO_SLOT, Int64s, Tier
from prefixd_swap.tiers.block_transfer import BlockTransfer
from prefixd_swap.tiers.cpu import CpuTier, PagedTier
from prefixd_swap.tiers.disk import DiskTier
from prefixd_swap.tiers.gpu import GpuTier
from prefixd_swap.tiers.memory import Account, MemoryTier
from prefixd_swap.tiers.memory_copies import MemoryCopies
from prefixd_swap.tiers.paged_gpu import PagedGpuTier
from prefixd_swap.tiers.remote.remote_parts import PartRead, RemotePart, coding_label, part_object_name
from prefixd_swap.tiers.remote.remote_tier import RemoteLoad, RemoteSave, RemoteTier
from prefixd_swap.tiers.store_tier import Identity, Loads, Places, StoreTier, can_move

__all__ = [
    "NO_SLOT",
    "AbsentTier",
    "Account",
    "BlockTransfer",
    "CpuTier",
    "DiskTier",
    "GpuTier",
    "Identity",
    "Int64s",
    "Loads",
    "MemoryCopies",
    "MemoryTier",
    "PagedGpuTier",
    "PagedTier",
    "PartRead",
    "Places",
    "RemoteLoad",
    "RemotePart",
    "RemoteSave",
    "RemoteTier",
    "StoreTier",
    "Tier",
    "can_move",
    "coding_label",
    "part_object_name",
]
