from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap.errors import MemoryMisuseError
from prefixd_swap.geometry import KvGeometry
from prefixd_swap.vmem import (
    FrameId,
    FramePool,
    VirtualMemory,
    VirtualTensor,
    VirtualTensorPool,
    create_memory,
)

Settle = Callable[[], None]
MAX_TOKENS = 22  # five blocks of four tokens, and half a block


@pytest.fixture
def pool(memory: VirtualMemory, geometry: KvGeometry) -> FramePool:
    return FramePool(memory, geometry, 12)


@pytest.fixture
def tensors(pool: FramePool) -> VirtualTensorPool:
    return VirtualTensorPool(pool.memory, pool.geometry, MAX_TOKENS, pool.first_chunk)


def take(pool: FramePool, count: int) -> list[FrameId]:
    frames = pool.allocate(count)
    assert frames is not None
    return frames


def frame_bytes(pool: FramePool, frame: FrameId) -> torch.Tensor:
    """A frame as numbers, as the daemon sees it in its window."""
    start = pool.span(frame).address - pool._window.base
    return pool._window.tensor((pool.geometry.block_bytes // 4,), torch.float32, offset=start)


def test_shape_and_strides(tensors: VirtualTensorPool, geometry: KvGeometry) -> None:
    kv = tensors.acquire().kv
    heads, dim = geometry.kv_heads, geometry.head_dim
    assert kv.shape == (MAX_TOKENS, geometry.layers, 2, heads, dim) and kv.dtype == torch.float32
    if geometry.layout == "token":
        assert kv.is_contiguous()
    else:
        assert kv[:, 1].is_contiguous(), "a layer's tokens lie in one run"


def test_blocks_are_appended_in_order(tensors: VirtualTensorPool, pool: FramePool) -> None:
    tensor = tensors.acquire()
    assert (tensor.blocks, tensor.capacity_tokens) == (0, 0)
    every = take(pool, 6)
    scattered = [every[4], every[1], every[3]]
    tensor.extend(scattered[:1])
    tensor.kv[:4] = 1
    tensor.extend(scattered[1:])
    tensor.kv[4:8] = 2
    tensor.kv[8:12] = 3
    assert (tensor.blocks, tensor.capacity_tokens, tensor.frames) == (3, 12, tuple(scattered))
    for frame, value in zip(scattered, (1, 2, 3), strict=True):
        assert frame_bytes(pool, frame).eq(value).all()


def test_a_block_is_its_pieces_one_after_the_other(tensors: VirtualTensorPool, pool: FramePool) -> None:
    """What a frame holds is what leaves the GPU tier, so its order is part of the format."""
    shape = pool.geometry
    tensor = tensors.acquire()
    frames = take(pool, 2)
    tensor.extend(frames)
    numbers = torch.arange(8 * shape.token_bytes // 4, dtype=torch.float32).view(8, *tensor.kv.shape[1:])
    tensor.kv[:8] = numbers.to(tensor.kv.device)
    block = numbers[4:8] if shape.layout == "token" else numbers[4:8].transpose(0, 1)
    assert torch.equal(frame_bytes(pool, frames[1]).cpu(), block.reshape(-1))


def test_a_prefix_is_shared_without_a_copy(tensors: VirtualTensorPool, pool: FramePool) -> None:
    prefix = take(pool, 2)
    one, two = tensors.acquire(), tensors.acquire()
    one.extend(prefix + take(pool, 1))
    two.extend(prefix + take(pool, 2))
    one.kv[:8] = 1
    one.kv[8:12] = 2
    two.kv[8:16] = 3
    assert two.kv[:8].eq(1).all(), "the prefix is the same memory"
    assert one.kv[8:12].eq(2).all(), "what follows is not"
    assert pool.used_count == 5
    two.kv[3, 1, 0, 1, 2] = 9
    assert one.kv[3, 1, 0, 1, 2].item() == 9


def test_a_released_range_is_reused_for_another_request(
    tensors: VirtualTensorPool, pool: FramePool, settle: Settle
) -> None:
    first, other = take(pool, 2), take(pool, 3)
    tensor = tensors.acquire()
    kv = tensor.kv
    tensor.extend(first)
    kv[:8] = 1
    settle()
    done: list[int] = []
    tensors.release(tensor, on_unmapped=lambda: done.append(pool.used_count))
    assert done == [5] and tensors.idle_count == 1
    again = tensors.acquire()
    assert again is tensor and again.kv is kv and again.blocks == 0
    again.extend(other)
    kv[:12] = 2
    assert frame_bytes(pool, first[0]).eq(1).all(), "the old request's frames are as it left them"
    assert frame_bytes(pool, other[2]).eq(2).all()


def test_only_so_many_ranges_are_kept(pool: FramePool) -> None:
    tensors = VirtualTensorPool(pool.memory, pool.geometry, MAX_TOKENS, pool.first_chunk, keep=1)
    both = [tensors.acquire(), tensors.acquire()]
    for tensor in both:
        tensors.release(tensor)
    assert tensors.idle_count == 1
    with pytest.raises(MemoryMisuseError, match="range is closed"):
        both[1].extend(take(pool, 1))
    tensors.close()
    assert tensors.idle_count == 0


def test_the_last_block_may_be_longer_than_the_tensor(tensors: VirtualTensorPool, pool: FramePool) -> None:
    tensor = tensors.acquire()
    tensor.extend(take(pool, 6))
    assert tensor.capacity_tokens == MAX_TOKENS
    tensor.kv[:] = 1
    with pytest.raises(MemoryMisuseError, match="1 more blocks do not fit: 6 of 6"):
        tensor.extend(take(pool, 1))


@pytest.mark.parametrize("bad", [12, 99, -1])
def test_a_frame_that_does_not_exist_leaves_nothing_mapped(
    tensors: VirtualTensorPool, pool: FramePool, bad: int
) -> None:
    tensor = tensors.acquire()
    good = take(pool, 2)
    tensor.extend(good[:1])
    with pytest.raises(MemoryMisuseError):
        tensor.extend([good[1], FrameId(bad)])
    pool.memory.check_integrity()
    assert tensor.frames == (good[0],)
    tensor.extend(good[1:])
    tensor.kv[:8] = 1


def test_a_failure_in_a_later_piece_undoes_the_earlier_ones(memory: VirtualMemory) -> None:
    """With one run a layer, one layer can be mapped when the next one fails."""
    geometry = KvGeometry(2, 2, memory.chunk_bytes // 64, "float32", 4, "layer")
    pool = FramePool(memory, geometry, 2)
    tensor = VirtualTensor(memory, geometry, 8)
    # A frame number whose first chunk exists and whose second does not.
    last = memory.create(1)
    with pytest.raises(MemoryMisuseError, match=f"chunk {last.stop} does not exist"):
        tensor.extend([FrameId(2)])
    assert tensor.blocks == 0
    memory.check_integrity()
    tensor.extend(take(pool, 2))


def test_impossible_sizes_are_refused(memory: VirtualMemory, geometry: KvGeometry) -> None:
    with pytest.raises(MemoryMisuseError, match="0 tokens"):
        VirtualTensor(memory, geometry, 0)


def test_attention_over_a_shared_prefix_is_that_over_plain_tensors(tensors: VirtualTensorPool, pool: FramePool) -> None:
    torch.manual_seed(0)
    prefix = take(pool, 2)
    lengths = (11, 14)
    requests = []
    for length in lengths:
        tensor = tensors.acquire()
        tensor.extend(prefix)
        tensor.extend(take(pool, -(-length // 4) - 2))
        requests.append(tensor)
    requests[0].kv[:8].normal_()
    for tensor, length in zip(requests, lengths, strict=True):
        tensor.kv[8:length].normal_()
        query = torch.randn(1, 2, 1, pool.geometry.head_dim, device=tensor.kv.device)
        plain = tensor.kv[:length].clone(memory_format=torch.contiguous_format)
        for layer in range(2):
            views, copies = (
                torch.nn.functional.scaled_dot_product_attention(
                    query,
                    kv[:length, layer, 0].transpose(0, 1)[None],
                    kv[:length, layer, 1].transpose(0, 1)[None],
                )
                for kv in (tensor.kv, plain)
            )
            torch.testing.assert_close(views, copies, rtol=1e-4, atol=1e-4)


@given(data=st.data())
@settings(max_examples=30)
@pytest.mark.parametrize("layout", ["token", "layer"])
def test_many_requests_see_exactly_their_own_frames(layout: str, data: st.DataObject) -> None:
    """Requests come, extend and go; each must read back, block by block, what its frames hold."""
    geometry = KvGeometry(2, 1, 512, "float16", block_tokens=2, layout=layout)  # type: ignore[arg-type]
    with create_memory("cpu", 4096) as memory:
        pool = FramePool(memory, geometry, 16)
        every = take(pool, 16)
        for frame in every:
            pool._window.tensor(
                (geometry.block_bytes // 2,),
                torch.float16,
                offset=pool.span(frame).address - pool._window.base,
            ).fill_(frame)
        tensors = VirtualTensorPool(memory, geometry, 16, keep=2)
        running: list[VirtualTensor] = []
        for step in data.draw(st.lists(st.sampled_from(["start", "extend", "end"]), max_size=20)):
            if step == "start":
                running.append(tensors.acquire())
            elif running:
                tensor = data.draw(st.sampled_from(running))
                if step == "end":
                    running.remove(tensor)
                    tensors.release(tensor)
                else:
                    tensor.extend(data.draw(st.lists(st.sampled_from(every), max_size=8 - tensor.blocks)))
            for tensor in running:
                for block, frame in enumerate(tensor.frames):
                    assert tensor.kv[2 * block : 2 * block + 2].eq(frame).all()
            memory.check_integrity()
        mapped = sum(tensor.blocks for tensor in running) * pool._frame_chunks
        assert int(memory._mapped.sum()) == mapped + memory.chunk_count
