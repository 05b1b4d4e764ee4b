"""Virtual memory for the GPU tier, on CUDA and on Linux, behind one interface."""

from __future__ import annotations

from prefixd_swap.vmem.backends.cuda import CudaMemory
from prefixd_swap.vmem.backends.cuda_driver import cuda_ordinal
from prefixd_swap.vmem.backends.host import HostMemory
from prefixd_swap.vmem.base import ChunkId, Export, FrameId, VirtualMemory
from prefixd_swap.vmem.fence import Fence
from prefixd_swap.vmem.frame_table import FrameTable
from prefixd_swap.vmem.frames import FramePool, NewFrames
from prefixd_swap.vmem.transfer import attach_memory, recv_export, send_export
from prefixd_swap.vmem.virtual_range import VirtualRange

__all__ = [
    "ChunkId",
    "Export",
    "Fence",
    "FrameId",
    "FramePool",
    "FrameTable",
    "HostMemory",
    "NewFrames",
    "VirtualMemory",
    "VirtualRange",
    "attach_memory",
    "create_memory",
    "recv_export",
    "send_export",
]


def create_memory(device: str, chunk_bytes: int | None = None) -> VirtualMemory:
    """A memory on `device`: "cpu", "cuda" or "cuda:N"; `chunk_bytes` is the device's smallest if not given.

    Raises DeviceError for an unknown or absent device, MemoryMisuseError for an impossible chunk.
    """
    ordinal = cuda_ordinal(device)
    return HostMemory(chunk_bytes) if ordinal is None else CudaMemory(ordinal, chunk_bytes)
