"""How much memory a batch holds, against a cache that allocates the longest request in advance (vTensor, figure 11)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.kv import GQA, LAYOUTS, SMALL, Heads
from benchmarks.gpu_parts.rig.part import Budget, Part
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd_swap.group_shape import Layout
from prefixd_swap.vmem import FrameId, FrameTable
from prefixd_swap.vtensor import VirtualTensorManager
from prefixd_swap.vtensor.own_memory import grow

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_SMALL_BATCHES = (1, 2)
_PREFIX_SHARE = 2  # every second request has the prefix of the first


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Bytes that requests of random length hold, by batch and layout, as the device's driver counts them.

    Lengths are log-uniform from a sixteenth of the longest request to all of it. Every second request begins with the
    same prefix, as long as the shortest request; `private_bytes` is without sharing it. preallocated_bytes: the longest
    request times the batch, computed.
    """
    heads, batches, longest = (GQA, _BATCHES, 8192) if device.measures else (SMALL[0], _SMALL_BATCHES, 1024)
    points = []
    for layout in LAYOUTS:
        for batch in batches:
            if budget.allows(name := f"{layout} {batch}"):
                with budget.attempt(name):
                    point = _point(device, heads, layout, batch, longest)
                    if point is None:
                        budget.skipped.append(f"{name}: not enough memory")
                    else:
                        points.append(point)
    return {"longest_tokens": longest, "points": points}


def _point(device: Device, heads: Heads, layout: Layout, batch: int, longest: int) -> dict[str, Any] | None:
    source = random.Random(batch)
    lengths = [int(longest * 16 ** -source.random()) for _ in range(batch)]
    with device.memory() as memory:
        geometry = heads.geometry(layout, memory.chunk_bytes)
        blocks = [-(-length // geometry.block_tokens) for length in lengths]
        if sum(blocks) * geometry.block_bytes > device.free_bytes() * 9 // 10:
            return None
        table = FrameTable(geometry.chunks_per_block(memory.chunk_bytes))
        manager = VirtualTensorManager(memory, table, geometry, requests=batch, max_tokens=longest, limit=sum(blocks))
        before = device.free_bytes()
        shared = min(longest // 16, *lengths) // geometry.block_tokens if batch > 1 else 0
        prefix: Sequence[FrameId] = ()
        for number, length in enumerate(lengths):
            tensor = manager.create()
            if prefix and number % _PREFIX_SHARE == 0:
                manager.match(tensor, prefix)
            if not grow(manager, tensor, length):
                raise RuntimeError(f"a request of {length} tokens did not get its memory")
            if number == 0:
                prefix = manager.record(tensor, 0, shared)
        held = table.count * geometry.block_bytes
        counted = before - device.free_bytes() if device.kind != "cpu" else held
        manager.forget(prefix)
        manager.close()
    preallocated = batch * -(-longest // geometry.block_tokens) * geometry.block_bytes
    return {
        "layout": layout,
        "batch": batch,
        "tokens": sum(lengths),
        "token_bytes_used": sum(lengths) * geometry.token_bytes,
        "held_bytes": held,
        "driver_bytes": counted,
        "private_bytes": sum(blocks) * geometry.block_bytes,
        "preallocated_bytes": preallocated,
        "ratio": round(held / preallocated, 4),
    }


def _counted(answer: Mapping[str, Any]) -> float | None:
    """The worst of the batches: bytes by the driver's count over those that requests hold."""
    ratios: list[float] = [max(p["driver_bytes"], 1) / p["held_bytes"] for p in answer.get("points", ())]
    worst = max(ratios, key=lambda ratio: abs(ratio - 1), default=None)
    return None if worst is None else round(worst, 4)


PREDICTIONS = (
    Prediction("the driver's count of what requests hold", "1.00 times ours", _counted, at_least=0.99, at_most=1.01),
)

PART = Part("memory_held", 8, measure, predictions=PREDICTIONS)
