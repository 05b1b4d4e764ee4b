"""Known keys and values in vLLM's pages are found in prefixd's parts by the shape that the connector states.

The tensors are those of vLLM 0.32 (`create_kv_cache_views`): views [blocks, heads, tokens, 2 * channels] of one
allocation, whose axes lie in memory in the order that a layout is named for.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prefixd.client import PartShape
from prefixd.integrations.engine.geometry import Geometry
from prefixd.integrations.vllm.geometry import layer_names, read_geometry, read_pages
from prefixd.integrations.vllm.naming.page_packing import probe_pages
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd.integrations.vllm.page_axes import part_shape
from prefixd_swap.codecs import part_shape as swap
from tests.integrations.vllm.test_geometry import a_cache, a_config, a_group, a_tensor

LAYOUTS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
LAYERS, BLOCKS, HEADS, TOKENS, CHANNELS = 3, 5, 2, 16, 4
NAMES = [f"layer {number}" for number in range(LAYERS)]
DTYPE = torch.float16
Bytes = npt.NDArray[np.uint8]
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], None]


def plain(page: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot: int, tokens: int) -> None:
    page[slot // tokens, :, slot % tokens] = torch.cat([keys[slot], values[slot]], dim=-1)


def values_first(page: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot: int, tokens: int) -> None:
    plain(page, values, keys, slot, tokens)


def channels_turned(page: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot: int, tokens: int) -> None:
    plain(page, keys.flip(-1), values, slot, tokens)


def keys_of_a_page_first(page: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slot: int, tokens: int) -> None:
    """As vLLM's attention for CPUs has it: in a head, keys of all tokens and then values of all tokens."""
    halves = page.reshape(*page.shape[:2], 2, tokens, -1)
    for half, numbers in enumerate((keys, values)):
        halves[slot // tokens, :, half, slot % tokens] = numbers[slot]
    page.copy_(halves.reshape(page.shape))


class Layer:
    """Writes keys and values, [tokens, heads, channels], at slots of pages."""

    def __init__(self, heads: int = HEADS, channels: int = CHANNELS, write: Write = plain) -> None:
        self.impl, self._write = self, write
        self.num_kv_heads, self.head_size = heads, channels

    def do_kv_cache_update(
        self, layer: Any, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
    ) -> None:
        for slot in slots.tolist():
            self._write(pages, keys, values, slot, pages.shape[2])


class Engine:
    """A KV cache as vLLM configures it, with the tensors of its layers, whose backend is `layer`."""

    def __init__(self, cache: Any, tensors: dict[str, torch.Tensor], layer: Any, options: ConnectorOptions) -> None:
        self.cache, self.tensors = cache, tensors
        geometry = read_geometry(a_config(), cache, options)
        assert geometry is not None
        self.geometry: Geometry = geometry
        self.pages = read_pages(cache, tensors, geometry)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, layer)),
            model_config=SimpleNamespace(dtype=DTYPE),
        )
        self.plain = probe_pages(config, tensors, "").plain

    def shape(self) -> PartShape | None:
        """As the connector states it."""
        (group,) = self.geometry.groups
        assert layer_names(self.cache, group) == NAMES
        if not self.plain.issuperset(NAMES):
            return None
        return part_shape(self.geometry, group, self.pages[0], list(self.tensors.values()))

    def part(self, *blocks: int) -> Bytes:
        """The bytes of a part of these blocks, as the connector saves them."""
        arena = np.zeros(self.geometry.groups[0].page_bytes, np.uint8)
        for theirs, ours in self.pages[0].pairs(arena.ctypes.data, blocks):
            ctypes.memmove(ours.address, theirs.address, ours.nbytes)
        return arena


def engine_of(
    layout: str,
    *,
    block_tokens: int = TOKENS,
    heads: int = HEADS,
    kernel_tokens: int = TOKENS,
    write: Write = plain,
    channels: int = CHANNELS,
    **options: Any,
) -> Engine:
    """An engine with one of vLLM's layouts. `kernel_tokens`: of the blocks of its tensors, a part of a page."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": heads, "N": TOKENS, "C": 2 * channels}
    memory = torch.zeros([sizes[axis] for axis in layout], dtype=DTYPE)
    logical = memory.permute([layout.index(axis) for axis in "LBHNC"])
    page = heads * TOKENS * 2 * channels * DTYPE.itemsize
    of_layer, of_block = (logical.stride(dim) * DTYPE.itemsize for dim in (0, 1))
    group = a_group(NAMES, TOKENS, page, dtype=DTYPE, num_kv_heads=heads, head_size=channels)
    cache = a_cache([group], [a_tensor(NAMES, of_layer, of_block)])
    tensors = logical
    if kernel_tokens != TOKENS:
        inside = (kernel_tokens, heads) if layout == "LBNHC" else (heads, kernel_tokens)
        split = memory.reshape(LAYERS, -1, *inside, 2 * channels)
        tensors = split.transpose(2, 3) if layout == "LBNHC" else split
    layer = Layer(heads, channels, write)
    chosen = ConnectorOptions(block_tokens=block_tokens, **options)
    return Engine(cache, dict(zip(NAMES, tensors, strict=True)), layer, chosen)


def fill(engine: Engine, blocks: list[int]) -> torch.Tensor:
    """Writes keys and values into blocks; the numbers, [layers, 2, tokens, heads, channels]."""
    (group,) = engine.geometry.groups
    tokens = group.block_tokens * len(blocks)
    _, heads, of_kernel, both = next(iter(engine.tensors.values())).shape
    shape = (len(engine.tensors), 2, tokens, heads, both // 2)
    numbers = (torch.arange(math.prod(shape)) % 1999).reshape(shape).to(DTYPE)
    for layer, pages in enumerate(engine.tensors.values()):
        for token in range(tokens):
            slot = blocks[token // group.block_tokens] * group.block_tokens + token % group.block_tokens
            halves = [numbers[layer, half, token] for half in (0, 1)]
            pages[slot // of_kernel, :, slot % of_kernel] = torch.cat(halves, dim=-1)
    return numbers


def found(data: Bytes, shape: PartShape) -> torch.Tensor:
    """The numbers of a part by its shape, [layers, 2, tokens, heads, channels]."""
    as_stored = swap.PartShape(shape.dtype, shape.layers, shape.tokens, shape.heads, shape.channels, shape.order)
    assert as_stored.nbytes == data.nbytes
    array = torch.from_numpy(data).view(DTYPE).reshape(as_stored.sizes)
    return array.permute([shape.order.index(axis) for axis in swap.AXES])


EXPRESSIBLE = [
    *((layout, TOKENS, HEADS) for layout in LAYOUTS),
    *((layout, 2 * TOKENS, HEADS) for layout in LAYOUTS if "HN" not in layout),
    *((layout, 2 * TOKENS, 1) for layout in LAYOUTS),
]


@pytest.mark.parametrize(("layout", "block_tokens", "heads"), EXPRESSIBLE)
def test_the_numbers_of_a_part_lie_as_its_shape_says(layout: str, block_tokens: int, heads: int) -> None:
    engine = engine_of(layout, block_tokens=block_tokens, heads=heads)
    shape = engine.shape()
    assert shape is not None
    blocks = [3, 1][: block_tokens // TOKENS]
    numbers = fill(engine, blocks)
    assert torch.equal(found(engine.part(*blocks), shape), numbers)
    (part,) = engine.geometry.spec("model", b"", [shape], "int8").parts
    assert part.shape == shape and engine.geometry.spec("model", b"").parts[0].shape is None


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_two_pages_with_heads_before_tokens_are_no_dense_array(layout: str) -> None:
    assert engine_of(layout, block_tokens=2 * TOKENS).shape() is None


def test_pages_that_kernels_read_in_smaller_blocks() -> None:
    engine = engine_of("LBNHC", block_tokens=2 * TOKENS, kernel_tokens=TOKENS // 4)
    shape = engine.shape()
    assert shape is not None
    numbers = fill(engine, [3, 1])
    assert torch.equal(found(engine.part(3, 1), shape), numbers)
    assert engine_of("LBHNC", kernel_tokens=TOKENS // 4).shape() is None


@pytest.mark.parametrize("write", [values_first, channels_turned, keys_of_a_page_first])
def test_a_backend_that_packs_in_its_own_way_has_no_shape(write: Write) -> None:
    assert engine_of("LBHNC").shape() is not None
    assert engine_of("LBHNC", write=write).shape() is None


def test_padded_pages_have_no_shape() -> None:
    engine = engine_of("LBNHC")
    engine.cache.kv_cache_groups[0].kv_cache_spec.page_size_bytes *= 2
    engine.cache.kv_cache_tensors[0] = a_tensor(NAMES, 2 * BLOCKS * 512, 1024)
    engine.geometry = read_geometry(a_config(), engine.cache, ConnectorOptions(block_tokens=TOKENS))  # type: ignore[assignment]
    assert engine.geometry.groups[0].part_bytes == LAYERS * 1024
    assert engine.shape() is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_quantized_pages_have_no_shape(dtype: torch.dtype) -> None:
    engine = engine_of("LBNHC")
    engine.tensors = {name: torch.zeros(BLOCKS, HEADS, TOKENS, 2 * CHANNELS, dtype=dtype) for name in NAMES}
    assert engine.shape() is None


def test_layers_that_differ_have_no_shape() -> None:
    engine = engine_of("LBNHC")
    engine.tensors[NAMES[1]] = torch.zeros(BLOCKS, 2 * HEADS, TOKENS, CHANNELS, dtype=DTYPE)
    assert engine.shape() is None
