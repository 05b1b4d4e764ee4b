"""Padded tokens in rows of addresses: what a tensor holds is what packing a block's frames gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from prefixd_swap import KvGeometry
from prefixd_swap.errors import GeometryError
from prefixd_swap.group_shape import Layout
from prefixd_swap.padded_rows import PaddedRows
from prefixd_swap.vmem import FrameId, FramePool, create_memory
from prefixd_swap.vtensor import VirtualTensorManager

PAGE = 4096


@pytest.mark.parametrize(
    ("layout", "tokens", "stride", "frames"),
    [("token", 16, 512, 1), ("layer", 16, 256, 1), ("token", 16, 768, 3)],
    ids=["token", "layer", "frames that end inside tokens"],
)
def test_packed_frames_are_the_tensors_numbers(layout: Layout, tokens: int, stride: int, frames: int) -> None:
    """2 layers of 192 bytes a token: [layers][tokens] in the layout "layer", else [tokens, layers]."""
    geometry = KvGeometry(2, 1, 24, "float32", tokens, layout, token_stride=stride)
    frame_bytes = geometry.block_bytes // frames
    assert frame_bytes % PAGE == 0 and geometry.kv_bytes < geometry.block_bytes
    with create_memory("cpu", PAGE) as memory:
        pool = FramePool(memory, frame_bytes, 4 * frames)
        manager = VirtualTensorManager(
            memory, pool.table, geometry, requests=2, max_tokens=4 * tokens, frames_per_block=frames
        )
        numbers = [FrameId(number) for number in reversed(range(2 * frames))]
        tensors = [manager.create() for _ in range(2)]
        for tensor in tensors:
            manager.extend(tensor, numbers)
        whole = pool._window.tensor((pool.capacity * frame_bytes,), torch.uint8)
        whole.fill_(0xAB)
        written = torch.randn(2 * tokens, 2, 2, 1, 24)
        tensors[0].kv[: 2 * tokens].copy_(written)
        assert torch.equal(tensors[1].kv[: 2 * tokens], written), "both have the frames"
        assert torch.equal(manager.kv.flatten(0, 1)[tensors[1].row * manager.virtual.tokens :][: 2 * tokens], written)
        for block in range(2):
            own = written[block * tokens : (block + 1) * tokens]
            expected = (own if layout == "token" else own.transpose(0, 1)).contiguous().view(torch.uint8).flatten()
            packed: list[Any] = []
            for at, frame in enumerate(numbers[block * frames : (block + 1) * frames]):
                rows = PaddedRows(geometry.stride, geometry.piece_token_bytes, frame_bytes, at * frame_bytes % stride)
                nbytes = whole[frame * frame_bytes : (frame + 1) * frame_bytes].numpy()
                kept = [
                    nbytes[run.padded + row * stride :][: run.width] for run in rows.runs() for row in range(run.rows)
                ]
                packed += kept
                assert int(np.count_nonzero(nbytes == 0xAB)) >= frame_bytes - rows.packed_bytes, "padding is untouched"
            assert np.array_equal(np.concatenate(packed), expected.numpy())
        manager.check_integrity()
        manager.close()
        pool.close()


@pytest.mark.parametrize(("stride", "right"), [(383, False), (384, True), (385, False), (392, False), (400, True)])
def test_a_stride_is_that_of_the_token_or_a_larger_multiple_of_what_kernels_load(stride: int, right: bool) -> None:
    if right:
        assert KvGeometry(2, 1, 24, "float32", 16, token_stride=stride).stride == stride
        return
    with pytest.raises(GeometryError, match=f"token_stride is {stride}; it must be 0, or a multiple of 16"):
        KvGeometry(2, 1, 24, "float32", 16, token_stride=stride)
