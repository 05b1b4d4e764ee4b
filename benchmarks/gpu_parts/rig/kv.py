"""The shapes of KV that are measured, and virtual tensors of a shape over chunks that are there already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.gpu_parts.rig.device import Device
from prefixd_swap.block_size import Padding, choose_blocks
from prefixd_swap.group_shape import KvGeometry, Layout
from prefixd_swap.vmem import FrameId, FrameTable, VirtualMemory
from prefixd_swap.vtensor import VirtualTensorManager

LAYOUTS: tuple[Layout, ...] = ("token", "layer")


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention in numbers: 32 layers of an 8B model, or a small model's. padding: see `choose_blocks`."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    padding: Padding = "none"

    def geometry(self, layout: Layout, chunk_bytes: int) -> KvGeometry:
        """In bfloat16, with as few tokens a block, 16 at least, as fill whole chunks."""
        asked = KvGeometry(self.layers, self.kv_heads, self.head_dim, "bfloat16", 16, layout)
        return choose_blocks([asked], chunk_bytes, self.padding)[0]


GQA, MHA, MQA = (Heads(name, 32, 32, heads, 128) for name, heads in (("gqa", 8), ("mha", 32), ("mqa", 1)))
QWEN, QWEN_PADDED = Heads("qwen2.5-7b", 28, 28, 4, 128), Heads("qwen2.5-7b padded", 28, 28, 4, 128, "auto")
"""56 KiB a token, and those at a stride of 64 KiB."""
SMALL_PADDED = Heads("48 KiB", 24, 4, 4, 128), Heads("48 KiB padded", 24, 4, 4, 128, "auto")
SMALL = tuple(Heads(name, 2, 4, heads, 128) for name, heads in (("gqa", 2), ("mha", 4), ("mqa", 1)))


@dataclass(frozen=True, slots=True)
class Tensors:
    """A manager, and frames that it can be given."""

    manager: VirtualTensorManager
    frames: list[FrameId]
    table: FrameTable


@contextmanager
def virtual_tensors(
    device: Device, memory: VirtualMemory, chunks: range, geometry: KvGeometry, requests: int, max_tokens: int
) -> Iterator[Tensors]:
    """Virtual tensors of `geometry` whose frames are made of `chunks`; nothing is mapped any more when it ends."""
    per_frame = geometry.chunks_per_block(memory.chunk_bytes)
    frames = [FrameId(frame) for frame in range(len(chunks) // per_frame)]
    table = FrameTable(per_frame)
    table.add(frames, chunks[: len(frames) * per_frame])
    manager = VirtualTensorManager(memory, table, geometry, requests=requests, max_tokens=max_tokens)
    try:
        yield Tensors(manager, frames, table)
    finally:
        device.synchronize()
        manager.close()
