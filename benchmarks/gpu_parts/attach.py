"""What it takes to give a request a cached prefix: map it, find it still mapped, or copy it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.common.plots import lines
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.kv import GQA, LAYOUTS, SMALL, Heads, virtual_tensors
from benchmarks.gpu_parts.rig.part import Budget, Part
from prefixd_swap.group_shape import Layout
from prefixd_swap.vmem import VirtualMemory
from prefixd_swap.vtensor import VirtualTensor

_TOKENS = (1024, 4096, 16384, 65536)
_SMALL_TOKENS = (512, 1024)
_WAYS = ("map", "reuse", "copy")


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds until a prefix of so many tokens can be read, three ways and in both layouts.

    map: `extend` of a fresh row.  reuse: `create` and `match` on the row that still maps it.  copy: `copy_tokens` into
    frames of the request's own, which are mapped already.
    """
    heads, tokens, rounds = (GQA, _TOKENS, 7) if device.measures else (SMALL[0], _SMALL_TOKENS, 2)
    points = []
    with device.memory() as memory:
        token_bytes = heads.geometry("token", memory.chunk_bytes).token_bytes
        room = device.free_bytes() * 9 // 10
        lengths = [length for length in tokens if 2 * length * token_bytes <= room]
        budget.skipped += [f"{length} tokens: not enough memory" for length in tokens if length not in lengths]
        if not lengths:
            return {"token_bytes": token_bytes, "points": []}
        # Two prefixes of the longest length, and a block of any layout to round up with.
        spare = heads.geometry("layer", memory.chunk_bytes).block_bytes
        chunks = memory.create(2 * -(-(lengths[-1] * token_bytes + spare) // memory.chunk_bytes))
        for layout in LAYOUTS:
            for length in lengths:
                if budget.allows(name := f"{layout} {length}"):
                    with budget.attempt(name):
                        times = _point(device, memory, chunks, layout, heads, length, rounds)
                        points.append({"layout": layout, "tokens": length, **times})
    return {"token_bytes": token_bytes, "points": points}


def _point(
    device: Device, memory: VirtualMemory, chunks: range, layout: Layout, heads: Heads, tokens: int, rounds: int
) -> dict[str, float]:
    geometry = heads.geometry(layout, memory.chunk_bytes)
    blocks = -(-tokens // geometry.block_tokens)
    with virtual_tensors(device, memory, chunks, geometry, 2, blocks * geometry.block_tokens) as tensors:
        manager = tensors.manager
        prefix, own = tensors.frames[:blocks], tensors.frames[blocks : 2 * blocks]
        made: list[VirtualTensor] = []

        def attach(wanted: bool) -> None:
            made.append(manager.create(prefix if wanted else ()))
            manager.match(made[-1], prefix)

        def end(unmap: bool) -> None:
            manager.release(made.pop())
            if unmap:
                manager.reclaim()

        mapping = device.wall_us(lambda: attach(wanted=False), rounds, after=lambda: end(unmap=True))
        attach(wanted=False)
        end(unmap=False)
        reused = manager.counts.reused
        reuse = device.wall_us(lambda: attach(wanted=True), rounds, after=lambda: end(unmap=False))
        if manager.counts.reused == reused:
            raise RuntimeError("the row that still maps the prefix was not found")
        attach(wanted=True)
        manager.wait(made)
        target = manager.create(own)
        manager.extend(target, own)
        manager.wait([target])
        made[-1].kv[:tokens].normal_()
        copy = device.wall_us(lambda: manager.copy_tokens(made[-1], target, 0, tokens), rounds)
        if not (made[-1].kv[tokens - 1] == target.kv[tokens - 1]).all():
            raise RuntimeError("the copy of the prefix is another one")
        return {"map_us": mapping, "reuse_us": reuse, "copy_us": copy}


def _draw(axes: Any, result: Mapping[str, Any]) -> None:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for layout in LAYOUTS:
        points = [point for point in result["points"] if point["layout"] == layout]
        tokens = [point["tokens"] for point in points]
        series |= {f"{way}, {layout}": (tokens, [point[f"{way}_us"] / 1e3 for point in points]) for way in _WAYS}
    lines(axes, series, "tokens of the prefix", "ms until it can be read")


PART = Part("attach", 25, measure, _draw)
