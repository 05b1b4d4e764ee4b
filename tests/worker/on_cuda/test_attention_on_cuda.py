"""Attention's kernels on memory of which only what a sequence needs is mapped.

With a GPU these are its kernels: flash attention, the one in Triton, and FlexAttention compiled. Against the stand-in
driver (`tests/swap/test_cuda_stand_in.py`) it is the definition of attention over what the driver maps.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import pytest
import torch

from benchmarks.engines.extent_reference import extent_reference
from benchmarks.engines.varlen_reference import alone_reference, varlen_reference
from benchmarks.gpu_parts.rig.attention_ways import GatheredStep
from prefixd.worker.attention.attention import AttentionBackend, AttentionKind
from prefixd.worker.attention.choice.pass_plan import PassPlan
from prefixd.worker.attention.extent_attention import ExtentAttention
from prefixd.worker.attention.flash_attention import READ_BLOCK, FlashAttention
from prefixd.worker.attention.flex_attention import FlexAttention
from prefixd.worker.attention.kernels.extent_call import ExtentKernel
from prefixd.worker.attention.kernels.extent_check import find_extent_kernel
from prefixd.worker.attention.kernels.flash_kernels import VarlenKernel, find_kernel, flash_alone, why_no_lse
from prefixd.worker.attention.split_prefix import PIECE_MULTIPLE
from prefixd.worker.memory.frame_window import FrameWindow
from prefixd.worker.memory.kv_memory import KvMemory, Segment
from prefixd.worker.memory.paged_kv import PagedKv
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd_swap.block_size import fill_chunks
from prefixd_swap.group_shape import KvGeometry
from prefixd_swap.vmem import FrameId, FrameTable, create_memory
from prefixd_swap.vtensor import VirtualTensorManager

STAND_IN = "PREFIXD_TEST_STAND_IN" in os.environ
DEVICE = torch.device("cpu" if STAND_IN else "cuda")
VIRTUAL = ["flash", "planned"] if STAND_IN else ["flash", "planned", "triton"]
# FlexAttention without its compiled kernel reads all keys, also those that are not mapped.
WAYS = [*VIRTUAL, "paged", "extents", *([] if STAND_IN else ["gathered", "flex"])]
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 16, 8, 128
SCALE = HEAD_DIM**-0.5
FRAMES = 12

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STAND_IN and not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]


def kernel() -> VarlenKernel:
    found = varlen_reference if STAND_IN else find_kernel(HEAD_DIM, torch.bfloat16, torch.device("cuda", 0))
    if found is None:
        pytest.skip("this torch or this GPU has no flash attention for bfloat16")
    return found


def extent_kernel() -> ExtentKernel:
    if STAND_IN:
        return extent_reference
    found, reason = find_extent_kernel(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, torch.device("cuda", 0))
    if found is None and reason.startswith("Triton is not installed"):
        pytest.skip(reason)
    assert found is not None, reason
    return found


def every_way(queries: Sequence[int], keys: Sequence[int], captured: bool = False) -> PassPlan:
    """A plan with each of its ways, as far as there are segments for them."""
    numbers = range(len(queries))
    split = [number for number in numbers if keys[number] >= 2 * PIECE_MULTIPLE][:1]
    rest = [number for number in numbers if number not in split]
    alone, rest = rest[:1], rest[1:]
    return PassPlan(
        together=tuple(number for number in rest if queries[number] > 1),
        decodes=tuple(number for number in rest if queries[number] == 1),
        alone=tuple(alone),
        split=tuple(split),
        pieces=3 if split else 0,
    )


def backend_of(way: str, block: int) -> AttentionBackend:
    if way == "flex":
        return FlexAttention(block)
    if way in ("triton", "paged", "extents"):
        return ExtentAttention(extent_kernel(), extents=way == "extents")
    if way == "planned":
        reason = None if STAND_IN else why_no_lse(kernel(), HEAD_DIM, torch.bfloat16, torch.device("cuda", 0))
        assert reason is None, reason
        return FlashAttention(kernel(), every_way, alone_reference if STAND_IN else flash_alone)
    return FlashAttention(kernel())


class Rig:
    """Both memories over one set of frames, which hold NaN wherever nothing was written."""

    def __init__(self, layout: str) -> None:
        self.memory = create_memory("cuda")
        asked = KvGeometry(LAYERS, KV_HEADS, HEAD_DIM, "bfloat16", 16, layout)
        self.geometry = fill_chunks(asked, self.memory.chunk_bytes)
        self.block = self.geometry.block_tokens
        table = FrameTable(self.geometry.chunks_per_block(self.memory.chunk_bytes))
        table.add([FrameId(frame) for frame in range(FRAMES)], self.memory.create(FRAMES * table.frame_chunks))
        self.manager = VirtualTensorManager(self.memory, table, self.geometry, requests=5, max_tokens=3 * self.block)
        self.virtual = VirtualKv(self.manager)
        window = FrameWindow(self.memory, table, self.geometry.block_bytes, FRAMES)
        self.paged = PagedKv(window, self.geometry, max_tokens=3 * self.block)
        self.paged.pool.fill_(float("nan"))

    def close(self) -> None:
        if not STAND_IN:
            torch.cuda.synchronize()
        self.manager.close()
        self.paged.end()
        self.memory.close()


@pytest.fixture(params=["token", "layer"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(request.param)
    yield made
    made.close()


def pairs_of(sequence: int, layer: int, tokens: int) -> torch.Tensor:
    """Keys and values, ``[tokens, 2, kv_heads, head_dim]``."""
    generator = torch.Generator().manual_seed(100 * sequence + layer)
    return torch.randn(tokens, 2, KV_HEADS, HEAD_DIM, generator=generator).bfloat16()


def fill(memory: KvMemory, lengths: Sequence[int], block: int, order: Sequence[int]) -> list[Segment]:
    """Sequences with the memory of their tokens and not a block more, opened in `order`."""
    opened: dict[int, Segment] = {}
    frame = FRAMES
    for index in order:
        blocks = -(-lengths[index] // block)
        frame -= blocks
        sequence = memory.open(range(frame, frame + blocks))
        memory.wait(sequence, lengths[index])
        opened[index] = Segment(sequence, 0, lengths[index])
    segments = [opened[index] for index in range(len(lengths))]
    step = memory.step(segments)
    for layer in range(LAYERS):
        step.write(layer, torch.cat([pairs_of(i, layer, n) for i, n in enumerate(lengths)]).to(DEVICE))
    return segments


def expected(
    query: torch.Tensor, lengths: Sequence[int], new: Sequence[int], layer: int, window: int = 0
) -> torch.Tensor:
    keys, values = torch.cat([pairs_of(i, layer, n) for i, n in enumerate(lengths)]).float().unbind(1)
    starts = [torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32) for counts in (new, lengths)]
    return varlen_reference(
        query[0].transpose(0, 1).float().cpu(),
        keys,
        values,
        *starts,
        max(new),
        max(lengths),
        scale=SCALE,
        window_size=(window - 1, 0),
        enable_gqa=True,
        seqused_k=torch.tensor(lengths, dtype=torch.int32),
    )


@pytest.mark.parametrize("new", [[3, 40, 5, 1], [1, 1, 1, 1]], ids=["prompts", "decoding"])
@pytest.mark.parametrize("way", WAYS)
def test_kernels_read_what_is_mapped_and_nothing_behind_the_last_token(rig: Rig, way: str, new: list[int]) -> None:
    """Ends inside a block, at the end of one, and in the first; behind the last block of a row nothing is mapped."""
    block = rig.block
    lengths = [block + 37, 2 * block, 5, block // 2 + 1]
    memory = rig.virtual if way in (*VIRTUAL, "flex") else rig.paged
    segments = fill(memory, lengths, block, order=[2, 0, 3, 1])
    last = [Segment(part.sequence, part.stop - count, part.stop) for part, count in zip(segments, new, strict=True)]
    step = memory.step(last)
    backend = backend_of(way, block)
    generator = torch.Generator().manual_seed(1)
    rows = -(-sum(new) // 16) * 16
    query = torch.randn(1, HEADS, rows, HEAD_DIM, generator=generator).bfloat16()
    attention = backend.begin(GatheredStep(step) if way == "gathered" else step)
    for layer in range(LAYERS):
        found = attention.attend(query.to(DEVICE), layer, SCALE)[0].float().cpu()
        theirs = expected(query[:, :, : sum(new)], lengths, new, layer)
        assert not found[sum(new) :].any(), "padding comes out as zeros"
        error = float((found[: sum(new)] - theirs).norm() / theirs.norm())
        assert error <= 0.02, f"layer {layer}: relative error {error:.2g}"
    if not STAND_IN:
        torch.cuda.synchronize()
    for part in segments:
        memory.close(part.sequence, lambda: None)
    assert memory.poll(wait=True) == 0


@pytest.mark.parametrize("new", [[3, 40, 5], [1, 1, 1]], ids=["prompts", "decoding"])
@pytest.mark.parametrize("way", [way for way in WAYS if way in (*VIRTUAL, "flex")])
def test_kernels_read_nothing_before_the_block_where_a_window_begins(rig: Rig, way: str, new: list[int]) -> None:
    """Memory there holds NaN, as what was given up may. One layer has a window; in the other everything is read."""
    block, window = rig.block, 100
    lengths = [block + 37, 2 * block, 5]
    segments = fill(rig.virtual, lengths, block, order=[2, 0, 1])
    last = [Segment(part.sequence, part.stop - count, part.stop) for part, count in zip(segments, new, strict=True)]
    step = rig.virtual.step(last)
    gone = tuple((0, max(0, part.start - window + 1) // READ_BLOCK * READ_BLOCK) for part in last)
    assert max(gone)[1] >= block
    for states in step.read(1, gone):
        for each in states:
            each.fill_(float("nan"))
    backend = backend_of(way, block)
    query = torch.randn(1, HEADS, sum(new), HEAD_DIM, generator=torch.Generator().manual_seed(2)).bfloat16()
    attention = backend.begin(step)
    for layer, kind in enumerate((AttentionKind(), AttentionKind(window=window))):
        found = attention.attend(query.to(DEVICE), layer, SCALE, kind)[0].float().cpu()
        theirs = expected(query, lengths, new, layer, window=kind.window or 0)
        error = float((found - theirs).norm() / theirs.norm())
        assert error <= 0.02, f"layer {layer}: relative error {error:.2g}"
    if not STAND_IN:
        torch.cuda.synchronize()
    for part in segments:
        rig.virtual.close(part.sequence, lambda: None)
    assert rig.virtual.poll(wait=True) == 0
