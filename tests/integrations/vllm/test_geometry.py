"""What is read of vLLM's configuration: where pages lie, and what cannot work.

The stand-ins have the shape of vLLM 0.32's own objects (`vllm/v1/kv_cache_interface.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from prefixd.base.errors import ConfigError
from prefixd.client import RecurrentState, SlidingWindow
from prefixd.integrations.vllm.geometry import (
    check_failure_policy,
    cross_layer_layout,
    layer_names,
    read_geometry,
    read_pages,
)
from prefixd.integrations.vllm.options import ConnectorOptions

BLOCKS, PAGE = 5, 64


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class SlidingWindowMLASpec(SlidingWindowSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class ChunkedLocalAttentionSpec(SimpleNamespace):
    pass


def a_group(
    layers: Sequence[str], block_size: int = 16, page: int = PAGE, kind: type = FullAttentionSpec, **spec: Any
) -> SimpleNamespace:
    kv_cache_spec = kind(block_size=block_size, page_size_bytes=page, prefix_cacheable=True, **spec)
    return SimpleNamespace(layer_names=list(layers), kv_cache_spec=kv_cache_spec)


def a_window_group(layers: Sequence[str], window: int, block_size: int = 16) -> SimpleNamespace:
    return a_group(layers, block_size, kind=SlidingWindowSpec, sliding_window=window, extra_retained_tokens=0)


def a_tensor(layers: Sequence[str], layer_stride: int, block_stride: int, offset: int = 0) -> SimpleNamespace:
    return SimpleNamespace(layers=list(layers), layer_stride=layer_stride, block_stride=block_stride, offset=offset)


def a_cache(groups: Sequence[SimpleNamespace], tensors: Sequence[SimpleNamespace]) -> SimpleNamespace:
    return SimpleNamespace(
        num_blocks=BLOCKS,
        kv_cache_groups=list(groups),
        kv_cache_tensors=list(tensors),
        transfer_group_ids=tuple(range(len(groups))),
    )


def a_config(
    role: str = "kv_both",
    asynchronous: bool = False,
    speculative: object = None,
    **parallel: int,
) -> SimpleNamespace:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, **parallel}),
        kv_transfer_config=SimpleNamespace(kv_role=role),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        speculative_config=speculative,
    )


AB = ["a", "b"]
LAYERS_OUTERMOST = a_cache([a_group(AB)], [a_tensor(AB, BLOCKS * PAGE, PAGE)])


def runs_of(cache: Any, group: int = 0) -> list[list[tuple[int, int, int]]]:
    """(address, stride, bytes) of each layer's runs, from the start of the allocation."""
    geometry = read_geometry(a_config(), cache, ConnectorOptions())
    assert geometry is not None
    raw = torch.zeros(1 << 16, dtype=torch.uint8)
    names = [name for each in cache.kv_cache_groups for name in each.layer_names]
    pages = read_pages(cache, dict.fromkeys(names, raw), geometry)[group]
    assert not pages.on_device
    return [[(run.address - raw.data_ptr(), run.stride, run.nbytes) for run in layer] for layer in pages.layers]


def test_layers_outermost() -> None:
    assert runs_of(LAYERS_OUTERMOST) == [[(0, 64, 64)], [(320, 64, 64)]]


def test_blocks_outermost() -> None:
    assert runs_of(a_cache([a_group(AB)], [a_tensor(AB, PAGE, 2 * PAGE)])) == [[(0, 128, 64)], [(64, 128, 64)]]


@pytest.mark.parametrize(
    ("hybrid", "latents", "heads_first", "layout"),
    [
        (False, False, False, "BLNHC"),
        (False, False, True, "BLHNC"),
        (True, False, False, None),
        (False, True, True, None),
    ],
)
def test_the_layout_with_a_blocks_layers_together_is_asked_for_models_of_attention_alone(
    hybrid: bool, latents: bool, heads_first: bool, layout: str | None
) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(is_hybrid=hybrid, use_mla=latents))
    assert cross_layer_layout(config, heads_first) == layout


def test_heads_outside_the_blocks() -> None:
    """A layer is a region a head."""
    cache = a_cache([a_group(AB)], [a_tensor(AB, BLOCKS * PAGE, PAGE // 2)])
    assert runs_of(cache) == [[(0, 32, 32), (160, 32, 32)], [(320, 32, 32), (480, 32, 32)]]


def test_heads_outside_the_layers_of_a_block() -> None:
    """A page is in pieces, with the other layers' between them."""
    cache = a_cache([a_group(AB)], [a_tensor(AB, PAGE // 2, 2 * PAGE)])
    assert runs_of(cache) == [[(0, 128, 32), (64, 128, 32)], [(32, 128, 32), (96, 128, 32)]]


def test_a_group_with_fewer_layers_than_a_block_has_room_for() -> None:
    groups = [a_group(AB), a_group(["w"], block_size=8)]
    cache = a_cache(groups, [a_tensor(AB, PAGE, 2 * PAGE), a_tensor(["w"], PAGE, 2 * PAGE)])
    assert runs_of(cache, 1) == [[(0, 128, 64)]], "its own page, not the whole block"


def test_layers_of_a_group_that_differ() -> None:
    group = a_group(AB)
    group.kv_cache_spec.kv_cache_specs = {
        "a": SimpleNamespace(page_size_bytes=64),
        "b": SimpleNamespace(page_size_bytes=32),
    }
    cache = a_cache([group], [a_tensor(["a"], 64, 96), a_tensor(["b"], 32, 96, offset=64)])
    assert runs_of(cache) == [[(0, 96, 64)], [(64, 96, 32)]]


def test_pages_that_lie_in_an_unknown_way_are_refused_and_not_saved_in_part() -> None:
    cache = a_cache([a_group(AB)], [a_tensor(AB, BLOCKS * PAGE // 2, PAGE // 2)])
    with pytest.raises(ConfigError, match="KV cache of a lies in a way") as refused:
        read_geometry(a_config(), cache, ConnectorOptions())
    assert "\n" not in str(refused.value)


def test_an_allocation_that_is_too_small_is_refused() -> None:
    geometry = read_geometry(a_config(), LAYERS_OUTERMOST, ConnectorOptions())
    assert geometry is not None
    with pytest.raises(ConfigError, match="has 100 bytes where 320 were expected"):
        read_pages(LAYERS_OUTERMOST, dict.fromkeys(AB, torch.zeros(100, dtype=torch.uint8)), geometry)


def test_a_rank_that_is_laid_out_otherwise_is_refused() -> None:
    geometry = read_geometry(a_config(), LAYERS_OUTERMOST, ConnectorOptions())
    assert geometry is not None
    other = a_cache([a_group(AB, page=32)], [a_tensor(AB, BLOCKS * 32, 32)])
    with pytest.raises(ConfigError, match="laid out on this rank otherwise"):
        read_pages(other, dict.fromkeys(AB, torch.zeros(1 << 16, dtype=torch.uint8)), geometry)


# -- sizes ----------------------------------------------------------------------------------------------------------


def test_blocks_parts_and_ranks() -> None:
    groups = [a_group(AB, block_size=16), a_group(["w"], block_size=48)]
    tensors = [a_tensor(AB, PAGE, 2 * PAGE), a_tensor(["w"], PAGE, 2 * PAGE)]
    cache = a_cache(groups, tensors)
    geometry = read_geometry(a_config(tensor_parallel_size=2), cache, ConnectorOptions(block_tokens=96))
    assert geometry is not None
    assert (geometry.unit_tokens, geometry.block_tokens, geometry.ranks) == (48, 96, 2)
    assert [group.part_bytes for group in geometry.groups] == [6 * 2 * PAGE, 2 * PAGE]
    assert geometry.block_bytes == 2 * (12 + 2) * PAGE
    spec = geometry.spec("model", b"salt")
    assert [(part.group, part.rank) for part in spec.parts] == [
        ("group0", 0),
        ("group1", 0),
        ("group0", 1),
        ("group1", 1),
    ]
    assert geometry.parts_of(1) == [2, 3] and not geometry.by_block
    assert [layer_names(cache, group) for group in geometry.groups] == [AB, ["w"]]


@pytest.mark.parametrize(
    "spec",
    [
        {"kind": MLAAttentionSpec},
        {"kind": FullAttentionSpec, "max_tp_shards": 1},
        {"kind": FullAttentionSpec, "kv_cache_specs": {name: MLAAttentionSpec(page_size_bytes=PAGE) for name in AB}},
    ],
    ids=["by its class", "as vLLM says", "layers that differ"],
)
def test_what_all_ranks_have_alike_is_one_part(spec: dict[str, Any]) -> None:
    groups = [a_group(AB, **spec), a_group(["w"])]
    cache = a_cache(groups, [a_tensor(AB, PAGE, 2 * PAGE), a_tensor(["w"], PAGE, 2 * PAGE)])
    geometry = read_geometry(a_config(tensor_parallel_size=2), cache, ConnectorOptions(block_tokens=64))
    assert geometry is not None
    parts = geometry.spec("model", b"").parts
    assert [(part.group, part.rank) for part in parts] == [("group0", 0), ("group1", 0), ("group1", 1)]
    assert [geometry.parts_of(rank) for rank in (0, 1)] == [[0, 1], [0, 2]]
    assert geometry.block_bytes == geometry.nbytes(1) == sum(part.nbytes for part in parts) == (8 + 2 * 4) * PAGE
    prompts = [bytes([seed]) * 4 * 64 for seed in range(16)]
    saved = [[geometry.saved_by(rank, prompt, (0, 1)) for rank in (0, 1)] for prompt in prompts]
    assert all(sorted(of_ranks) == [(0, 1), (1,)] for of_ranks in saved)
    assert len({tuple(of_ranks) for of_ranks in saved}) == 2, "the work is shared"
    longer = [[geometry.saved_by(rank, prompt + b"more", (0, 1)) for rank in (0, 1)] for prompt in prompts]
    assert longer == saved, "one rank saves all of a prefix"


def test_layers_of_which_some_are_split_are_a_part_of_every_rank() -> None:
    layers = {"a": MLAAttentionSpec(page_size_bytes=PAGE), "b": FullAttentionSpec(page_size_bytes=PAGE)}
    cache = a_cache([a_group(AB, kv_cache_specs=layers)], LAYERS_OUTERMOST.kv_cache_tensors)
    geometry = read_geometry(a_config(tensor_parallel_size=2), cache, ConnectorOptions())
    assert geometry is not None and [part.rank for part in geometry.spec("model", b"").parts] == [0, 1]


@pytest.mark.parametrize(
    ("block_size", "chosen", "tokens"), [(16, None, 32), (48, None, 48), (128, None, 128), (16, 64, 64)]
)
def test_tokens_of_a_block(block_size: int, chosen: int | None, tokens: int) -> None:
    cache = a_cache([a_group(AB, block_size=block_size)], LAYERS_OUTERMOST.kv_cache_tensors)
    geometry = read_geometry(a_config(), cache, ConnectorOptions(block_tokens=chosen))
    assert geometry is not None and geometry.block_tokens == tokens


@pytest.mark.parametrize(
    ("window", "chosen", "tokens"), [(128, None, 32), (30, None, 16), (8, None, 16), (128, 128, 128)]
)
def test_a_block_is_no_longer_than_a_window(window: int, chosen: int | None, tokens: int) -> None:
    """Of a longer one vLLM would have let go of the first part before the last is computed."""
    cache = a_cache([a_window_group(AB, window)], LAYERS_OUTERMOST.kv_cache_tensors)
    geometry = read_geometry(a_config(), cache, ConnectorOptions(block_tokens=chosen))
    assert geometry is not None and geometry.block_tokens == tokens


@pytest.mark.parametrize(
    ("spec", "tokens"),
    [
        (SlidingWindowSpec(sliding_window=1024), 1024),
        (SlidingWindowSpec(sliding_window=1024, extra_retained_tokens=3), 1027),
        (SlidingWindowMLASpec(sliding_window=128), 128),
        (SimpleNamespace(kv_cache_specs={"a": SlidingWindowSpec(sliding_window=512)}), 512),
        (FullAttentionSpec(), None),
        (FullAttentionSpec(sliding_window=1024), None),
        (MLAAttentionSpec(), None),
        (ChunkedLocalAttentionSpec(attention_chunk_size=8192), None),
    ],
    ids=[
        "window",
        "draft that reads further back",
        "latent attention",
        "layers that differ",
        "full",
        "layers of both kinds share its blocks",
        "latent attention that sees all",
        "chunks",
    ],
)
def test_the_rule_of_a_group(spec: SimpleNamespace, tokens: int | None) -> None:
    spec.block_size, spec.page_size_bytes, spec.prefix_cacheable = 16, PAGE, True
    for layer in getattr(spec, "kv_cache_specs", {}).values():
        layer.page_size_bytes = PAGE
    window = SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)
    cache = a_cache([window, a_group(["b"])], [a_tensor(["a"], PAGE, 2 * PAGE), a_tensor(["b"], PAGE, 2 * PAGE)])
    geometry = read_geometry(a_config(), cache, ConnectorOptions())
    assert geometry is not None and geometry.needs_end == (tokens is not None)
    rule = None if tokens is None else SlidingWindow(tokens)
    assert [group.rule for group in geometry.groups] == [rule, None]
    assert [part.rule for part in geometry.spec("model", b"").parts] == [rule, None]


def test_with_a_window_a_load_that_fails_names_no_blocks() -> None:
    """vLLM would go on behind the first block that failed, where it has no bytes of the window before that block."""
    cache = a_cache([a_window_group(AB, 128)], LAYERS_OUTERMOST.kv_cache_tensors)
    geometry = read_geometry(a_config(), cache, ConnectorOptions())
    assert geometry is not None and not geometry.by_block
    geometry = read_geometry(a_config(), LAYERS_OUTERMOST, ConnectorOptions())
    assert geometry is not None and geometry.by_block


def test_a_group_that_is_not_kept_still_makes_ids_ambiguous() -> None:
    cache = a_cache([a_group(AB), a_group(["w"])], [a_tensor(AB, PAGE, 2 * PAGE), a_tensor(["w"], PAGE, 2 * PAGE)])
    cache.kv_cache_groups[1].kv_cache_spec.prefix_cacheable = False
    geometry = read_geometry(a_config(), cache, ConnectorOptions())
    assert geometry is not None and len(geometry.groups) == 1 and not geometry.by_block


class MambaSpec(SimpleNamespace):
    pass


def a_state_group(layers: Sequence[str], block_size: int = 16, mode: str = "align") -> SimpleNamespace:
    return a_group(layers, block_size, kind=MambaSpec, mamba_cache_mode=mode, state_content_size_bytes=40)


def a_state_model(block_size: int = 16, mode: str = "align") -> SimpleNamespace:
    groups = [a_group(AB), a_state_group(["s"], block_size, mode)]
    return a_cache(groups, [a_tensor(AB, PAGE, 2 * PAGE), a_tensor(["s"], PAGE, 2 * PAGE)])


def test_states_are_kept_where_vllm_has_them_and_without_their_padding() -> None:
    geometry = read_geometry(a_config(), a_state_model(), ConnectorOptions())
    assert geometry is not None and geometry.block_tokens == 16 and geometry.needs_end
    assert [group.part_bytes for group in geometry.groups] == [2 * PAGE, 40]
    assert [part.rule for part in geometry.spec("model", b"").parts] == [None, RecurrentState()]
    assert runs_of(a_state_model(), 1) == [[(0, 2 * PAGE, 40)]]
    assert geometry.nbytes(10) == 10 * 2 * PAGE + 40


def test_a_model_of_states_alone_is_not_kept() -> None:
    """vLLM has states where it ends a step, and prefixd's blocks would have no bytes between them."""
    assert read_geometry(a_config(), a_cache([a_state_group(AB)], []), ConnectorOptions()) is None
    assert read_geometry(a_config(), a_cache([], []), ConnectorOptions()) is None


def test_a_model_whose_kv_vllm_keeps_in_host_memory_is_not_kept() -> None:
    """The ids of its blocks are those of another pool than the one whose blocks are pinned while they are saved."""
    groups = [a_group(AB), a_group(["w"])]
    groups[1].host_resident = True
    tensors = [a_tensor(AB, PAGE, 2 * PAGE), a_tensor(["w"], PAGE, 2 * PAGE)]
    assert read_geometry(a_config(), a_cache(groups, tensors), ConnectorOptions()) is None


TWO_GROUPS = a_cache([a_group(AB), a_group(["w"])], [a_tensor(AB, PAGE, 2 * PAGE), a_tensor(["w"], PAGE, 2 * PAGE)])

WINDOW_OF_100 = a_cache([a_window_group(AB, 100)], LAYERS_OUTERMOST.kv_cache_tensors)


@pytest.mark.parametrize(
    ("config", "cache", "options", "message"),
    [
        (a_config(), LAYERS_OUTERMOST, {"block_tokens": 24}, "block_tokens = 24 is no multiple of 16"),
        (
            a_config(pipeline_parallel_size=2),
            LAYERS_OUTERMOST,
            {},
            "pipeline_parallel_size = 2: each stage has other layers",
        ),
        (a_config(decode_context_parallel_size=4), LAYERS_OUTERMOST, {}, "decode_context_parallel_size = 4: each rank"),
        (a_config(prefill_context_parallel_size=2), LAYERS_OUTERMOST, {}, "2: each rank has some of a block's tokens"),
        (a_config(), TWO_GROUPS, {"load": "layerwise"}, 'use "async"'),
        (a_config(), WINDOW_OF_100, {"block_tokens": 128}, "sliding window of 100 tokens holds; set 96 or less"),
        (a_config(), a_state_model(mode="none"), {}, "set --enable-prefix-caching --mamba-cache-mode align"),
        (a_config(), a_state_model(block_size=8), {}, "mamba_block_size = 8: the connector needs 16"),
        (a_config(), a_state_model(), {"block_tokens": 32}, "block_tokens = 32: vLLM has this model's states every 16"),
        (a_config(), WINDOW_OF_100, {"load": "layerwise"}, 'layerwise" and a sliding window'),
        (a_config(asynchronous=True), LAYERS_OUTERMOST, {"load": "layerwise"}, "--no-async-scheduling"),
        (a_config(speculative=object()), LAYERS_OUTERMOST, {"load": "layerwise"}, "speculative decoding"),
        (a_config(role="kv_producer"), LAYERS_OUTERMOST, {}, 'kv_role = "kv_producer"'),
        (a_config(role="kv_consumer"), LAYERS_OUTERMOST, {}, '"save": false'),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(config: Any, cache: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_geometry(config, cache, ConnectorOptions(**options))
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_failure_policy_that_fails_requests_is_refused() -> None:
    check_failure_policy(SimpleNamespace(kv_connector="PrefixdConnector", kv_load_failure_policy="recompute"))
    with pytest.raises(ConfigError, match='"recompute" beside "kv_connector": "MultiConnector"'):
        check_failure_policy(SimpleNamespace(kv_connector="MultiConnector", kv_load_failure_policy="fail"))
