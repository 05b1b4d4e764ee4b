"""Parts of vLLM's pages as int8 objects that are made on the device: sizes, where kernels find numbers, refusals."""

from __future__ import annotations

import asyncio
import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.copying.cuda_device import object_copies_of
from prefixd.integrations.engine.copying.group_pages import GroupPages
from prefixd.integrations.engine.geometry import Group
from prefixd.integrations.vllm.coded_groups import paged_layers
from prefixd.integrations.vllm.geometry import read_geometry
from prefixd.integrations.vllm.options import ConnectorOptions
from prefixd_swap.codecs.coding import Coded, Coding, code
from prefixd_swap.codecs.object_header import header_nbytes, read_header
from prefixd_swap.codecs.on_device.certified import object_nbytes
from prefixd_swap.codecs.on_device.paged_parts import PagedLayers, PagedParts
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import GeometryError
from tests.integrations.vllm.test_geometry import (
    MLAAttentionSpec,
    SlidingWindowSpec,
    a_cache,
    a_config,
    a_group,
    a_tensor,
)
from tests.integrations.vllm.test_part_shapes import (
    DTYPE,
    HEADS,
    LAYERS,
    LAYOUTS,
    NAMES,
    TOKENS,
    Engine,
    engine_of,
    fill,
)

CHANNELS = 16
CODED: dict[str, Any] = {"channels": CHANNELS, "codec_on_device": "int8"}
ENGINES = [
    *((layout, tokens, heads, TOKENS) for layout in LAYOUTS for tokens in (TOKENS, 2 * TOKENS) for heads in (1, HEADS)),
    *((layout, 2 * TOKENS, HEADS, TOKENS // 4) for layout in ("LBNHC", "LBHNC")),
]


def coded_engine(layout: str, block_tokens: int, heads: int, kernel_tokens: int) -> tuple[Engine, PagedLayers]:
    """An engine with the option, and what kernels get of it."""
    engine = engine_of(layout, block_tokens=block_tokens, heads=heads, kernel_tokens=kernel_tokens, **CODED)
    assert engine.plain.issuperset(NAMES)
    return engine, paged_layers(*engine_pages(engine), plain=True)


def engine_pages(engine: Engine) -> tuple[Group, GroupPages, list[torch.Tensor]]:
    return engine.geometry.groups[0], engine.pages[0], list(engine.tensors.values())


def numbers_of(paged: PagedParts) -> torch.Tensor:
    """What a kernel reads of part 0, [layers, 2, tokens, heads, channels]."""
    shape, (of_page, of_token, of_head) = paged.shape, paged.strides
    numbers = torch.empty((shape.layers, 2, shape.tokens, shape.heads, shape.channels), dtype=DTYPE)
    for layer, kv, token, head in np.ndindex(*numbers.shape[:4]):
        page = int(paged.ids[0, token // paged.page_tokens])
        place = page * of_page + token % paged.page_tokens * of_token + head * of_head
        address = int(paged.addresses[layer, kv]) + place * DTYPE.itemsize
        data = np.frombuffer((ctypes.c_uint16 * shape.channels).from_address(address), np.int16)
        numbers[layer, kv, token, head] = torch.from_numpy(data.copy()).view(DTYPE)
    return numbers


@pytest.mark.parametrize(("layout", "block_tokens", "heads", "kernel_tokens"), ENGINES)
def test_kernels_find_keys_and_values_where_the_connector_copies_them_from(
    layout: str, block_tokens: int, heads: int, kernel_tokens: int
) -> None:
    engine, layers = coded_engine(layout, block_tokens, heads, kernel_tokens)
    blocks = [3, 1][: block_tokens // TOKENS]
    numbers = fill(engine, blocks)
    assert torch.equal(numbers_of(layers.parts(np.array([blocks], np.int64))), numbers)
    assert layers.blocks == len(blocks)
    left_out = layers.parts(np.full((1, len(blocks)), -1, np.int64))
    assert (left_out.ids < 0).all()


@pytest.mark.parametrize(("layout", "block_tokens", "heads", "kernel_tokens"), ENGINES)
def test_kernels_make_the_objects_that_the_codec_makes_of_the_copied_bytes(
    layout: str, block_tokens: int, heads: int, kernel_tokens: int
) -> None:
    from tests.swap.codecs.test_on_device import triton_kernels

    if triton_kernels()[1].type != "cpu":
        pytest.skip("the caches of this test are in host memory")
    engine, layers = coded_engine(layout, block_tokens, heads, kernel_tokens)
    blocks = [3, 1][: block_tokens // TOKENS]
    numbers = fill(engine, blocks)
    data = numbers.contiguous().view(torch.uint8).numpy().reshape(-1)
    made = code(data, Coding(find_codec("int8"), layers.shape, most_error=np.inf))
    assert isinstance(made, Coded)
    copies = object_copies_of([layers])
    stored = np.zeros(engine.geometry.groups[0].part_bytes, np.uint8)
    ids, addresses = np.array([blocks], np.int64), np.array([stored.ctypes.data], np.int64)
    assert asyncio.run(copies.gather(0, ids, addresses)) == [None]
    copies.close()
    at = header_nbytes(LAYERS)
    np.testing.assert_array_equal(stored[at:], made.data[at:])
    ours, theirs = read_header(stored), read_header(made.data)
    assert (ours.shape, ours.checksum) == (theirs.shape, theirs.checksum)


def test_a_namespace_of_objects_has_their_bytes_and_another_layout_and_states_no_shape() -> None:
    exact = engine_of("LBNHC", channels=CHANNELS)
    coded, layers = coded_engine("LBNHC", TOKENS, HEADS, TOKENS)
    spec, other = (each.geometry.spec("model", b"", (), "exact") for each in (coded, exact))
    assert spec.parts[0].nbytes == object_nbytes(layers.shape) < other.parts[0].nbytes
    assert (spec.layout, other.layout) == ("vllm-int8", "vllm")
    assert spec.parts[0].shape is None and spec.codec == "exact"
    assert coded.geometry.block_bytes == object_nbytes(layers.shape)
    assert coded.geometry.groups[0].page_bytes == exact.geometry.block_bytes


def refusal(group: Any, block_tokens: int = 16) -> str:
    names = group.layer_names
    page = group.kv_cache_spec.page_size_bytes
    cache = a_cache([group], [a_tensor(names, 5 * page, page)])
    options = ConnectorOptions(block_tokens=block_tokens, codec_on_device="int8")
    with pytest.raises(ConfigError, match='codec_on_device = "int8": KV cache group 0') as caught:
        read_geometry(a_config(), cache, options)
    return str(caught.value)


def spec_of(dtype: torch.dtype = DTYPE, heads: int = HEADS, channels: int = CHANNELS, **more: Any) -> Any:
    page = heads * 16 * 2 * channels * DTYPE.itemsize
    given = {"page": page, "dtype": dtype, "num_kv_heads": heads, "head_size": channels, **more}
    return a_group(["a"], **given)


def test_groups_that_are_no_plain_keys_and_values_of_16_bits_are_refused() -> None:
    assert "latents" in refusal(spec_of(kind=MLAAttentionSpec))
    assert "latents" in refusal(a_group(["a"]))
    assert "is of float32, not of bfloat16" in refusal(spec_of(torch.float32))
    assert "is of uint8" in refusal(spec_of(torch.uint8))
    assert "padded, packed or quantized" in refusal(spec_of(page=4096))
    assert "objects of them would have" in refusal(spec_of(block_size=1, page=64, heads=1), 1)
    differing = spec_of()
    differing.kv_cache_spec.kv_cache_specs = {
        name: spec_of(heads=heads).kv_cache_spec for name, heads in (("a", HEADS), ("b", 2 * HEADS))
    }
    assert "several shapes" in refusal(differing)


def test_windows_may_have_objects() -> None:
    group = spec_of(kind=SlidingWindowSpec, sliding_window=64)
    page = group.kv_cache_spec.page_size_bytes
    options = ConnectorOptions(block_tokens=16, codec_on_device="int8")
    geometry = read_geometry(a_config(), a_cache([group], [a_tensor(["a"], 5 * page, page)]), options)
    assert geometry is not None and geometry.groups[0].coded_shape is not None
    assert geometry.groups[0].rule is not None


def test_pages_in_which_kernels_would_not_find_keys_and_values_are_refused() -> None:
    group, pages, tensors = engine_pages(engine_of("LBNHC", **CODED))
    for given, plain in (
        (tensors, False),
        ([tensor[0] for tensor in tensors], True),
        ([tensor[..., 1:] for tensor in tensors], True),
    ):
        with pytest.raises(ConfigError, match="does not know where keys and values lie"):
            paged_layers(group, pages, given, plain)


def test_tensors_that_are_not_what_vllm_says_of_them_are_refused() -> None:
    group, pages, tensors = engine_pages(engine_of("LBNHC", **CODED))
    with pytest.raises(ConfigError, match="lie elsewhere"):
        paged_layers(group, pages, tensors[::-1], plain=True)
    with pytest.raises(ConfigError, match="lie elsewhere"):
        paged_layers(group, pages, [tensor[::2] for tensor in tensors], plain=True)
    layers = paged_layers(group, pages, [tensor[:, :1] for tensor in tensors], plain=True)
    with pytest.raises(GeometryError, match="a part of 1 pages has dtype"):
        layers.parts(np.zeros((1, 1), np.int64))


def test_a_device_without_kernels_is_refused() -> None:
    pytest.importorskip("triton")
    from prefixd_swap.codecs.on_device import int8_triton

    if int8_triton.INTERPRETED:
        pytest.skip("Triton's interpreter runs the kernels here")
    _, layers = coded_engine("LBNHC", TOKENS, HEADS, TOKENS)
    with pytest.raises(ConfigError, match="Triton runs no kernels on a device of type cpu"):
        object_copies_of([layers])
