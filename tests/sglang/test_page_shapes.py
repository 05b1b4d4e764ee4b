"""Known keys and values in the pages of SGLang's real host pools are found in the arena by the shape of a page."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.engines.sglang_controller import Shape, host_pool, mamba_pool
from prefixd.integrations.sglang.page_shapes import page_shape
from prefixd.integrations.sglang.pool_pages import BufferPages, FlatPages, PoolPages, pages_of
from prefixd_swap.codecs import part_shape as swap

LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]
SHAPE = Shape(page_tokens=16, layers=3, heads=2, head_dim=8, pages=5)
SIZES = (SHAPE.layers, 2, SHAPE.page_tokens, SHAPE.heads, SHAPE.head_dim)


def pool_of(layout: str, kind: str = "mha") -> Any:
    return host_pool(Shape(kind, layout, page_tokens=16, layers=3, heads=2, head_dim=8, pages=5))


def fill(pool: Any, page: int) -> torch.Tensor:
    """Writes known numbers into a page, by what SGLang says of its tensor; [layer, kv, token, head, channel]."""
    numbers = (torch.arange(math.prod(SIZES)) % 251).reshape(SIZES).to(torch.bfloat16)
    tokens, of_page = slice(16 * page, 16 * page + 16), slice(page, page + 1)
    sizes = {"L": 3, "T": 16, "H": 2, "C": 8}

    def axes(order: str) -> torch.Tensor:
        return numbers.permute(["LKTHC".index(axis) for axis in order])

    match pool.layout:
        case "layer_first":
            pool.kv_buffer[:, :, tokens] = axes("KLTHC")
        case "page_first":
            pool.kv_buffer[:, tokens] = axes("KTLHC")
        case "page_first_direct":
            assert pool.kv_buffer.shape[2:] == (sizes["L"], sizes["T"], sizes["H"], sizes["C"])
            pool.kv_buffer[:, of_page] = axes("KLTHC")[:, None]
        case "page_head":
            assert pool.kv_buffer.shape[2:] == (sizes["H"], sizes["T"], sizes["L"], sizes["C"])
            pool.kv_buffer[:, of_page] = axes("KHTLC")[:, None]
    return numbers


@pytest.mark.parametrize("flat", [False, True], ids=["buffers", "flat"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_numbers_of_a_page_lie_as_its_shape_says(layout: str, flat: bool) -> None:
    pool = pool_of(layout)
    pages = pages_of(pool, flat=flat)
    assert isinstance(pages, FlatPages if flat else BufferPages)
    shape = page_shape(pages)
    if not hasattr(pool, "_buffer_infos"):
        assert shape is None, "0.5.22 does not tell how the device's rows lie"
        return
    assert shape is not None
    numbers = fill(pool, 3)
    arena = np.zeros(pages.page_bytes, np.uint8)
    pages.at(torch.arange(48, 64), 1).save(arena, [(0, 0)], lambda: None)
    stored = swap.PartShape(shape.dtype, shape.layers, shape.tokens, shape.heads, shape.channels, shape.order)
    array = torch.from_numpy(arena).view(torch.bfloat16).reshape(stored.sizes)
    assert torch.equal(array.permute([shape.order.index(axis) for axis in swap.AXES]), numbers)


def test_keys_and_values_by_layer_in_the_arena_are_those_that_sglangs_own_views_show() -> None:
    pool = pool_of("layer_first")
    numbers = fill(pool, 1)
    for layer in range(3):
        assert torch.equal(pool.k_buffer[layer, 16:32], numbers[layer, 0])
        assert torch.equal(pool.v_buffer[layer, 16:32], numbers[layer, 1])


@pytest.mark.parametrize("pool", [pool_of("page_first", "mla"), mamba_pool(5)], ids=["latents", "states"])
def test_latents_and_states_have_no_shape(pool: Any) -> None:
    assert page_shape(pages_of(pool)) is None


class MHATokenToKVPoolHost:
    """A pool like SGLang's, of which a test changes something."""

    layout, page_size, size = "layer_first", 4, 32
    layer_num, head_num, head_dim, v_head_dim = 3, 2, 8, 8
    dtype = torch.float16

    def __init__(self, rows: str = "nhd", **changes: Any) -> None:
        self._buffer_infos = (SimpleNamespace(buffers=SimpleNamespace(layout=SimpleNamespace(value=rows))),)
        for name, value in changes.items():
            setattr(self, name, value)

    def pages(self) -> PoolPages:
        pages = FlatPages(self, 3 * 2 * 4 * 2 * 8 * 2)
        assert pages.page_tokens == 4
        return pages


class Quantized(MHATokenToKVPoolHost):
    pass


@pytest.mark.parametrize(
    "pool",
    [
        MHATokenToKVPoolHost("hnd"),
        MHATokenToKVPoolHost("vectorized_5d"),
        MHATokenToKVPoolHost(_buffer_infos=()),
        MHATokenToKVPoolHost(dtype=torch.float8_e4m3fn),
        MHATokenToKVPoolHost(dtype=torch.float32),
        MHATokenToKVPoolHost(v_head_dim=4),
        MHATokenToKVPoolHost(layout="page_unified"),
        Quantized(),
    ],
    ids=["hnd", "aiter", "no rows", "fp8", "other size", "narrow values", "unified", "another kind"],
)
def test_what_is_not_known_has_no_shape(pool: MHATokenToKVPoolHost) -> None:
    assert page_shape(MHATokenToKVPoolHost().pages()) is not None
    assert page_shape(pool.pages()) is None
