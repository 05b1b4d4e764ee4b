"""The shapes of parts in vLLM's own KV caches: its views in each layout, and what its attention on a CPU writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from prefixd.integrations.vllm.options import ConnectorOptions
from tests.integrations.vllm import test_part_shapes as stand_ins
from tests.integrations.vllm.test_part_shapes import DTYPE, NAMES, Engine, Layer, found

BLOCKS, HEADS = 5, 2


def engine_of(
    layout: KVCacheLayout, layer: Any, *, page_tokens: int = 16, kernel: int = 16, size: int = 32, **options: Any
) -> Engine:
    """Two blocks to a part, in memory that vLLM has laid out."""
    spec = FullAttentionSpec(block_size=page_tokens, num_kv_heads=HEADS, head_size=size, dtype=DTYPE)
    of_block = len(NAMES) * spec.page_size_bytes if layout.is_block_outermost else None
    fixed = (None, of_block, None, None, None)
    of_layer, of_block, *_ = compute_layout_strides(spec, BLOCKS, len(NAMES), layout, fixed_strides=fixed)
    tensor = KVCacheTensor(BLOCKS * len(NAMES) * spec.page_size_bytes, NAMES, of_layer, of_block)
    cache = KVCacheConfig(BLOCKS, [tensor], [KVCacheGroupSpec(NAMES, spec)])
    tensors = allocate_kv_cache(cache, torch.device("cpu"), layout, [kernel])
    return Engine(cache, tensors, layer, ConnectorOptions(block_tokens=2 * page_tokens, **options))


@pytest.mark.parametrize("layout", KVCacheLayout, ids=lambda layout: layout.name)
def test_the_numbers_of_a_part_lie_as_its_shape_says(layout: KVCacheLayout) -> None:
    engine = engine_of(layout, Layer(HEADS, 32))
    shape = engine.shape()
    if layout.name in ("LBHNC", "BLHNC"):
        assert shape is None, "heads before tokens, in two pages"
        return
    assert shape is not None and (shape.dtype, shape.heads, shape.channels) == ("float16", HEADS, 32)
    numbers = stand_ins.fill(engine, [3, 1])
    assert torch.equal(found(engine.part(3, 1), shape), numbers)


def test_pages_that_kernels_read_in_smaller_blocks() -> None:
    engine = engine_of(KVCacheLayout.LBNHC, Layer(HEADS, 32), page_tokens=64)
    assert engine.tensors[NAMES[0]].shape[2] == 16
    shape = engine.shape()
    assert shape is not None
    numbers = stand_ins.fill(engine, [3, 1])
    assert torch.equal(found(engine.part(3, 1), shape), numbers)


@pytest.mark.parametrize("isa", ["vec", "vec16"])
def test_what_attention_on_a_cpu_packs_has_no_shape(isa: str) -> None:
    layer = SimpleNamespace(num_kv_heads=HEADS, head_size=32, isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
    ours = SimpleNamespace(attn_type="decoder", kv_cache_dtype="auto")
    written = []

    def update(*arguments: Any) -> None:
        CPUAttentionBackendImpl.do_kv_cache_update(ours, *arguments)
        written.append(arguments[3].abs().sum())

    layer.impl = SimpleNamespace(do_kv_cache_update=update)
    engine = engine_of(KVCacheLayout.LBHNC, layer, page_tokens=64, kernel=64)
    assert written and all(written), "vLLM wrote nothing"
    assert engine.shape() is None
