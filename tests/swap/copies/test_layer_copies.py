"""Blocks that are copied layer by layer: the same bytes as whole, the first layers of all blocks first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap import CpuArena, FramePool
from prefixd_swap.block_layers import BlockLayers
from prefixd_swap.copies.copy_engine import CopyEngine, HostCopyEngine, create_copy_engine
from prefixd_swap.errors import GeometryError
from prefixd_swap.group_shape import Layout
from prefixd_swap.spans import Span
from prefixd_swap.tiers import CpuTier, GpuTier, MemoryCopies, MemoryTier
from prefixd_swap.transfers import Transfers, Urgency
from prefixd_swap.vmem import VirtualMemory

Bytes = npt.NDArray[np.uint8]
BLOCKS = st.builds(
    lambda layers, tokens, layer_bytes, padding, layout: BlockLayers(
        layers, tokens, layer_bytes, layer_bytes * (layers if layout == "token" else 1) + padding, layout
    ),
    *(st.integers(1, 6), st.integers(1, 4), st.integers(1, 9), st.integers(0, 12)),
    st.sampled_from(["token", "layer"]),
)


def numbers_of(block: BlockLayers, padded: bool) -> npt.NDArray[np.int64]:
    """[layers, tokens, layer_bytes]: where each byte of a block lies, by definition."""
    pitch = block.stride if padded else block.piece_token_bytes
    layer, token = np.ogrid[: block.layers, : block.tokens]
    if block.layout == "token":
        first = token * pitch + layer * block.layer_bytes
    else:
        first = (layer * block.tokens + token) * pitch
    return first[..., None] + np.arange(block.layer_bytes)


def memory_bytes(block: BlockLayers, padded: bool) -> int:
    pitch = block.stride if padded else block.piece_token_bytes
    return pitch * block.tokens * (1 if block.layout == "token" else block.layers)


def tier_of(data: Bytes, level: int) -> MemoryTier:
    """A tier whose slots are rows of `data`."""
    first, pitch = data.ctypes.data, data.strides[0]
    tier = SimpleNamespace(name=f"tier {level}", level=level, on_device=False)
    tier.addresses = lambda slots: first + slots * pitch
    return cast(MemoryTier, tier)


@pytest.fixture(scope="module")
def host() -> Iterator[HostCopyEngine]:
    engine = HostCopyEngine(threads=2)
    yield engine
    engine.close()


@settings(max_examples=60, deadline=None)
@given(
    block=BLOCKS,
    cuts=st.sets(st.integers(1, 5)),
    blocks=st.integers(1, 5),
    padded=st.booleans(),
    up=st.booleans(),
    piece_bytes=st.sampled_from([1, 64, 1 << 20]),
)
def test_slabs_of_every_split_are_the_whole_block(
    host: HostCopyEngine, block: BlockLayers, cuts: set[int], blocks: int, padded: bool, up: bool, piece_bytes: int
) -> None:
    slabs = list(pairwise([0, *sorted(cut for cut in cuts if cut < block.layers), block.layers]))
    near = np.random.default_rng(1).integers(0, 256, (8, memory_bytes(block, True)), np.uint8)
    far = np.random.default_rng(2).integers(0, 256, (8, memory_bytes(block, not padded)), np.uint8)
    into, out = np.random.default_rng(3).permuted(np.tile(np.arange(8), (2, 1)), axis=1)[:, :blocks]
    sides = [(near, numbers_of(block, True), 0), (far, numbers_of(block, not padded), 1)]
    (target, to, to_level), (source, at, at_level) = sides if up else sides[::-1]
    before, seen = target.copy(), list[int]()

    def arrived(layers: int) -> None:
        seen.append(layers)
        for slot, other in zip(into.tolist(), out.tolist(), strict=True):
            assert np.array_equal(target[slot][to[:layers]], source[other][at[:layers]])

    async def copy() -> list[Any]:
        copies = MemoryCopies(host, Transfers(), piece_bytes=piece_bytes)
        tiers = tier_of(source, at_level), out, tier_of(target, to_level), into
        return await copies.submit_layers(*tiers, block, slabs, arrived, Urgency.DEMAND, padded=padded).finish()

    assert asyncio.run(copy()) == [None] * blocks
    assert seen == sorted(seen) and set(seen) <= {last for _, last in slabs} and seen[-1] == block.layers
    expected = before
    expected[into[:, None], to.ravel()] = source[out[:, None], at.ravel()]
    assert np.array_equal(target, expected), "padding and other blocks stay"


@pytest.mark.parametrize("layout", ["token", "layer"])
@pytest.mark.parametrize("padding", [0, 1024])
async def test_layers_come_up_from_the_arena_in_few_calls(
    device: str, memory: VirtualMemory, layout: Layout, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA adjacent blocks of the layout "token" are one call a slab; of the layout "layer" each is a call."""
    layers, count = 4, 3
    pieces = 1 if layout == "token" else layers
    stride = 4096 * layers // pieces
    tokens = memory.chunk_bytes // (stride * pieces)
    block = BlockLayers(layers, tokens, (stride - padding) * pieces // layers, stride, layout)
    with ExitStack() as stack:
        pool = FramePool(memory, memory.chunk_bytes, count)
        stack.callback(pool.close)
        arena = CpuArena(count * memory.chunk_bytes)
        stack.callback(arena.close)
        engine: Any = create_copy_engine(device, threads=1)
        stack.callback(engine.close)
        gpu, cpu = GpuTier(pool), CpuTier(arena)
        into, out = gpu.allocate((memory.chunk_bytes,), count), cpu.allocate((block.nbytes,), count)
        stack.callback(lambda: (gpu.free(into), cpu.free(out)))
        fill = np.random.default_rng(4).integers(0, 256, (count, block.nbytes), np.uint8)
        for slot, data in zip(out.ravel().tolist(), fill, strict=True):
            arena.array(slot, block.nbytes)[:] = data
        calls: list[str] = []
        if device == "cuda":
            call = engine._cuda.call
            monkeypatch.setattr(engine._cuda, "call", lambda name, *given: (calls.append(name), call(name, *given))[1])
        seen: list[int] = []
        slabs = [(0, 1), (1, 4)]
        copies = MemoryCopies(engine, Transfers()).submit_layers(
            *(cpu, out[:, 0], gpu, into[:, 0], block, slabs, seen.append, Urgency.DEMAND), padded=padding > 0
        )
        assert await copies.finish() == [None] * count
        assert seen[-1] == layers
        found = await downloaded(engine, gpu, into[:, 0], memory.chunk_bytes)
        near, far = numbers_of(block, True), numbers_of(block, not padding)
        for ours, theirs in zip(found, fill, strict=True):
            assert np.array_equal(ours[near], theirs[far])
        if device == "cuda":
            apart = layout == "token" and out[1, 0] - out[0, 0] != block.nbytes  # slots are whole pages
            copied = [name for name in calls if name.startswith("cuMemcpyHtoD") or name == "cuMemcpy2DAsync"]
            assert len(copied) == (2 if layout == "token" and not apart else 2 * count)


async def downloaded(engine: CopyEngine, tier: MemoryTier, slots: npt.NDArray[np.int64], nbytes: int) -> list[Bytes]:
    found = []
    for address in tier.addresses(slots).tolist():
        found.append(np.zeros(nbytes, np.uint8))
        await engine.copy([(Span(found[-1].ctypes.data, nbytes), Span(address, nbytes, tier.on_device))])
    return found


LLAMA_8B = BlockLayers(32, 16, 4096, 131072)
QWEN_HALF_B = BlockLayers(24, 64, 512, 32768)


@pytest.mark.parametrize(
    ("block", "blocks", "slabs"),
    [
        (LLAMA_8B, 2048, 4),
        (LLAMA_8B, 48, 3),
        (LLAMA_8B, 31, 1),  # 62 MiB
        (QWEN_HALF_B, 1000, 1),  # rows of 12 KiB
        (BlockLayers(24, 1024, 512, 512, "layer"), 1000, 4),
        (BlockLayers(2, 16, 65536, 131072), 2048, 2),
    ],
)
def test_as_few_slabs_as_pay(block: BlockLayers, blocks: int, slabs: int) -> None:
    found = block.slabs(blocks)
    assert len(found) == slabs
    assert [0, *(last for _, last in found)] == [*(first for first, _ in found), block.layers]
    assert len(block.slabs(1, least=True)) == min(4, block.layers)


def test_a_block_without_a_valid_shape_is_refused() -> None:
    with pytest.raises(GeometryError, match="layers is 0"):
        BlockLayers(0, 1, 1, 1)
    with pytest.raises(GeometryError, match="stride is 7; give at least a token's 8"):
        BlockLayers(2, 1, 4, 7)
