"""Memory and movement: virtual memory for the GPU tier, the CPU arena, the slab store, copies and eviction policies.

This package knows blocks as bytes in slots. The cache above it knows their tokens and prompts.
"""

from __future__ import annotations

from prefixd_swap.arena import CpuArena
from prefixd_swap.copies.copy_engine import CopyEngine, StreamMark, create_copy_engine, register_host, unregister_host
from prefixd_swap.copies.page_copies import PageCopies
from prefixd_swap.copies.page_runs import NO_BLOCK, PackedPages, PageRun
from prefixd_swap.copies.pinning import HostPin
from prefixd_swap.errors import (
    BadObjectError,
    ChecksumError,
    DeviceError,
    DirectoryInUseError,
    DiskFullError,
    FormatError,
    GeometryError,
    IndexUnavailableError,
    IntegrityError,
    LostBytesError,
    MemoryMisuseError,
    MissingDriveError,
    OutOfMemoryError,
    RecordDamagedError,
    RemoteFullError,
    RemoteStoreError,
    ShrinkError,
    StorageError,
    SwapError,
    TransferDroppedError,
    UnknownPolicyError,
)
from prefixd_swap.eviction import EvictionPolicy, UseHistory, Weighing, choose_victims, create_eviction_policy
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.pages.page_eviction import Victims
from prefixd_swap.pages.page_eviction import choose_victims as choose_page_victims
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slab.files.file_ops import FileOps, host_bytes
from prefixd_swap.slab.files.slab_files import MAX_SLABS
from prefixd_swap.slab.index.block_record import BlockRecord, DiskPart, NewBlock
from prefixd_swap.slab.index.record_columns import RecordGroup, Records
from prefixd_swap.slab.index.set_aside import SetAside, discard, list_set_aside
from prefixd_swap.slab.salvage import Salvaged, salvage
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.slots import round_to_slot
from prefixd_swap.spans import Span
from prefixd_swap.threads import started_threads
from prefixd_swap.vmem import Export, FrameId, FramePool, NewFrames, VirtualMemory, create_memory, send_export
from prefixd_swap.vtensor.vattention import KvCacheStats, VAttention

__all__ = [
    "MAX_SLABS",
    "NO_BLOCK",
    "BadObjectError",
    "BlockRecord",
    "ChecksumError",
    "CopyEngine",
    "CpuArena",
    "DeviceError",
    "DirectoryInUseError",
    "DiskFullError",
    "DiskPart",
    "EvictionPolicy",
    "Export",
    "FileOps",
    "FormatError",
    "FrameId",
    "FramePool",
    "GeometryError",
    "HostPin",
    "IndexUnavailableError",
    "IntegrityError",
    "KvCacheStats",
    "KvGeometry",
    "LostBytesError",
    "MemoryMisuseError",
    "MissingDriveError",
    "NewBlock",
    "NewFrames",
    "OutOfMemoryError",
    "PackedPages",
    "PageAllocator",
    "PageCopies",
    "PageRun",
    "RecordDamagedError",
    "RecordGroup",
    "Records",
    "RemoteFullError",
    "RemoteStoreError",
    "Salvaged",
    "SetAside",
    "ShrinkError",
    "SlabStore",
    "Span",
    "StorageError",
    "StreamMark",
    "SwapError",
    "TransferDroppedError",
    "UnknownPolicyError",
    "UseHistory",
    "VAttention",
    "Victims",
    "VirtualMemory",
    "Weighing",
    "choose_page_victims",
    "choose_victims",
    "create_copy_engine",
    "create_eviction_policy",
    "create_memory",
    "discard",
    "host_bytes",
    "list_set_aside",
    "register_host",
    "round_to_slot",
    "salvage",
    "send_export",
    "started_threads",
    "unregister_host",
]
