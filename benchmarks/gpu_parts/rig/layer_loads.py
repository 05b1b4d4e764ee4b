"""A request whose prefix comes from the CPU tier layer by layer, as daemon and worker do it, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from queue import Queue
from threading import Thread

import numpy as np

from benchmarks.gpu_parts.rig.engine_rig import EngineRig
from prefixd.worker_protocol.protocol import Layers
from prefixd_swap.arena import CpuArena
from prefixd_swap.block_layers import BlockLayers
from prefixd_swap.copies.copy_engine import CopyEngine
from prefixd_swap.tiers import CpuTier, GpuTier, MemoryCopies
from prefixd_swap.transfers import Transfers, Urgency
from prefixd_swap.vmem import FrameId

_PATIENCE_S = 60.0


def first_token_by_layers(
    rig: EngineRig,
    arena: CpuArena,
    copies: CopyEngine,
    tokens: Sequence[int],
    frames: Sequence[FrameId],
    blocks: int,
) -> int:
    """Copies the first `blocks` blocks from the arena, block i from slot i, and computes meanwhile; returns the token.

    Raises queue.Empty if no layer comes for a minute.
    """
    geometry, come = rig.geometry, Queue[int]()
    layers = BlockLayers(
        geometry.layers,
        geometry.block_tokens,
        geometry.token_bytes // geometry.layers,
        geometry.stride,
        geometry.layout,
    )

    slabs = layers.slabs(blocks)
    if len(slabs) == 1:  # a short prompt, to test the benchmark
        slabs = layers.slabs(blocks, least=True)

    async def copy() -> None:
        slots, into = np.arange(blocks) * geometry.block_bytes, np.array(frames[:blocks])
        moved = MemoryCopies(copies, Transfers()).submit_layers(
            *(CpuTier(arena), slots, GpuTier(rig.pool), into, layers, slabs),
            *(come.put, Urgency.DEMAND),
            padded=False,
        )
        await moved.finish()

    rig.engine.listen = lambda request: Layers(request, come.get(timeout=_PATIENCE_S))
    thread = Thread(target=lambda: asyncio.run(copy()))
    thread.start()
    try:
        return rig.first_token(tokens, frames, blocks, loading=True)
    finally:
        thread.join()
        rig.engine.listen = None
