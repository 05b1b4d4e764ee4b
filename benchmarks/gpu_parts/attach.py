"""What it takes to give a request a cached prefix: map it, find it still mapped, copy it, or name it in a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common.plots import lines
from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.kv import GQA, LAYOUTS, SMALL, Heads, Tensors, virtual_tensors
from benchmarks.gpu_parts.rig.part import Budget, Part
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.kv_memory import Segment
from prefixd.worker.memory.paged_kv import PagedKv, PagedStep
from prefixd.worker.to_device import to_device
from prefixd_swap.group_shape import KvGeometry, Layout
from prefixd_swap.vmem import FrameId, VirtualMemory
from prefixd_swap.vtensor import VirtualTensor

_TOKENS = (1024, 4096, 16384, 65536)
_SMALL_TOKENS = (512, 1024)
_WAYS = ("map", "remap", "reuse", "copy", "table")
_CHUNKS = (CHUNK_BYTES, 8 << 20, 32 << 20, 128 << 20)
_SMALL_CHUNKS = (CHUNK_BYTES, 4 << 20)
_SIZED_TOKENS = 16384


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds until a prefix of so many tokens can be read, five ways and in both layouts.

    map: `extend` of a fresh row.  remap: of a row on which another prefix is mapped.  reuse: `create` and `match` on
    the row that still maps it.  copy: `copy_tokens` into frames of the request's own, which are mapped already.  table:
    all frames are mapped once side by side, and the prefix is a block table on the device.  extents: as table, but runs
    of adjacent frames, of which there is one here; in the layout "token".

    sizes: the same in the layout "token" for one length and chunks of other sizes, with as long blocks as these need.
    """
    heads, tokens, rounds = (GQA, _TOKENS, 7) if device.measures else (SMALL[0], _SMALL_TOKENS, 2)
    sizes, sized = (_CHUNKS, _SIZED_TOKENS) if device.measures else (_SMALL_CHUNKS, _SMALL_TOKENS[-1])
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
    larger = []
    for chunk_bytes in sizes:
        if budget.allows(name := f"chunks of {chunk_bytes} bytes"):
            with budget.attempt(name), device.memory(chunk_bytes) as memory:
                need = -(-2 * sized // (block := heads.geometry("token", chunk_bytes)).block_tokens) + 1
                if 2 * need * block.block_bytes > device.free_bytes() * 9 // 10:
                    budget.skipped.append(f"{name}: not enough memory")
                    continue
                chunks = memory.create(need * block.block_bytes // chunk_bytes)
                times = _point(device, memory, chunks, "token", heads, sized, rounds)
                larger.append({"chunk_bytes": chunk_bytes, "tokens": sized, **times})
    return {"token_bytes": token_bytes, "points": points, "sizes": larger}


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
                manager.unused.reclaim()

        def other() -> None:
            made.append(manager.create(own))
            manager.match(made[-1], own)
            manager.wait(made)
            end(unmap=False)

        mapping = device.wall_us(lambda: attach(wanted=False), rounds, after=lambda: end(unmap=True))
        taken = manager.create(())  # the other row, which has nothing mapped
        other()

        def again() -> None:
            end(unmap=True)
            other()

        remapping = device.wall_us(lambda: attach(wanted=False), rounds, after=again)
        manager.release(taken)
        manager.unused.reclaim()
        attach(wanted=False)
        end(unmap=False)
        reused = manager.mapping.counts.reused
        reuse = device.wall_us(lambda: attach(wanted=True), rounds, after=lambda: end(unmap=False))
        if manager.mapping.counts.reused == reused:
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
        tables = _tables_us(device, tensors, geometry, prefix, rounds)
        return {"map_us": mapping, "remap_us": remapping, "reuse_us": reuse, "copy_us": copy, **tables}


def _tables_us(
    device: Device, tensors: Tensors, geometry: KvGeometry, prefix: Sequence[FrameId], rounds: int
) -> dict[str, float]:
    """Open a block table with the prefix, and put it onto the device as a pass does, or its extents."""
    window = FrameWindow(tensors.manager.memory, tensors.table, geometry.block_bytes, len(tensors.frames))
    try:
        tokens = len(prefix) * geometry.block_tokens
        paged = PagedKv(window, geometry, max_tokens=tokens)

        def attach(put: Callable[[PagedStep], object]) -> None:
            sequence = paged.open(prefix)
            put(paged.step([Segment(sequence, tokens - 1, tokens)]))
            paged.close(sequence, lambda: None)

        def put_extents(step: PagedStep) -> None:
            found = step.extents()
            assert found is not None, "adjacent blocks are one run of tokens in this layout"
            to_device(np.concatenate(found[0]), torch.int32, device.torch_device)

        times = {"table_us": device.wall_us(lambda: attach(PagedStep.varlen_arguments), rounds)}
        if geometry.layout == "token":
            times["extents_us"] = device.wall_us(lambda: attach(put_extents), rounds)
        return times
    finally:
        device.synchronize()
        window.end()


def _draw(axes: Any, result: Mapping[str, Any]) -> None:
    series: dict[str, tuple[list[float], list[float]]] = {}
    for layout in LAYOUTS:
        points = [point for point in result["points"] if point["layout"] == layout]
        tokens = [point["tokens"] for point in points]
        series |= {f"{way}, {layout}": (tokens, [point[f"{way}_us"] / 1e3 for point in points]) for way in _WAYS}
    lines(axes, series, "tokens of the prefix", "ms until it can be read", "Attaching a cached prefix to a request")


def _in_chunks(chunk_bytes: int, way: str) -> Callable[[Mapping[str, Any]], float | None]:
    def find(answer: Mapping[str, Any]) -> float | None:
        found = (point for point in answer.get("sizes", ()) if point["chunk_bytes"] == chunk_bytes)
        return next((point[f"{way}_us"] / 1e3 for point in found), None)

    return find


PREDICTIONS = (
    Prediction("16,384 tokens mapped in chunks of 32 MiB", "2.2 ms at most", _in_chunks(32 << 20, "map"), at_most=4.0),
    Prediction(
        "16,384 tokens mapped in chunks of 32 MiB where others were",
        "3.5 ms at most",
        _in_chunks(32 << 20, "remap"),
        at_most=6.0,
    ),
    Prediction("16,384 tokens mapped in chunks of 2 MiB", "28 to 35 ms", _in_chunks(CHUNK_BYTES, "map"), at_most=42.0),
    Prediction("16,384 tokens as a block table", "0.5 ms at most", _in_chunks(CHUNK_BYTES, "table"), at_most=1.0),
    Prediction("16,384 tokens as extents", "0.5 ms at most", _in_chunks(CHUNK_BYTES, "extents"), at_most=1.0),
)

PART = Part("attach", 15, measure, _draw, PREDICTIONS)
