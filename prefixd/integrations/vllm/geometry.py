"""Reads from vLLM's configuration which KV cache groups prefixd keeps, and where their pages lie.

Imports nothing of vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from prefixd.base.errors import ConfigError
from prefixd.base.rules.rules import RecurrentState, SlidingWindow
from prefixd.integrations.engine.copying.group_pages import GroupPages, PageRun
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.engine.options import DEFAULT_BLOCK_TOKENS
from prefixd.integrations.vllm.coded_groups import coded_group
from prefixd.integrations.vllm.options import ConnectorOptions

_SPLIT_BLOCKS = (
    "each rank has some of a block's tokens, and PrefixdConnector keeps whole blocks of every rank; set it to 1"
)
_REFUSED_PARALLELISM = {  # fields of vLLM's parallel_config, of the same names from 0.29 to 0.33
    "pipeline_parallel_size": (
        "each stage has other layers, and PrefixdConnector keeps ranks that all have the same ones; "
        "use tensor_parallel_size instead"
    ),
    "decode_context_parallel_size": _SPLIT_BLOCKS,
    "prefill_context_parallel_size": _SPLIT_BLOCKS,
}


def read_geometry(vllm_config: Any, kv_cache_config: Any, options: ConnectorOptions) -> Geometry | None:
    """The geometry; None for a model that prefixd does not keep (states and no attention, KV in host memory).

    Raises ConfigError that names an option with which the connector cannot work.
    """
    parallel = vllm_config.parallel_config
    for what, why in _REFUSED_PARALLELISM.items():
        if (size := getattr(parallel, what, 1)) > 1:
            raise ConfigError(f"{what} = {size}: {why}, or leave out --kv-transfer-config")
    if vllm_config.kv_transfer_config.kv_role != "kv_both":
        raise ConfigError(
            f'kv_role = "{vllm_config.kv_transfer_config.kv_role}": PrefixdConnector loads and saves; set "kv_both", '
            'and "save": false in kv_connector_extra_config for an engine that is to read only'
        )
    if options.load == "layerwise":
        _check_layerwise(vllm_config, kv_cache_config.kv_cache_groups)
    every = kv_cache_config.kv_cache_groups
    specs = {index: every[index].kv_cache_spec for index in kv_cache_config.transfer_group_ids}
    specs = {index: spec for index, spec in specs.items() if spec.prefix_cacheable}
    states = {index for index, spec in specs.items() if _is_state(spec)}
    for spec in (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups):
        if _is_state(spec) and (mode := layer_specs(spec)[0].mamba_cache_mode) != "align":
            raise ConfigError(
                f'mamba_cache_mode = "{mode}": vLLM keeps no state that another request could use; set '
                "--enable-prefix-caching --mamba-cache-mode align, or leave out --kv-transfer-config"
            )
    if len(states) == len(specs):
        return None
    if any(getattr(group, "host_resident", False) for group in kv_cache_config.kv_cache_groups):
        return None  # HiSparse has its blocks in a pool of their own, which vLLM hides from the connector
    unit = math.lcm(*(spec.block_size for spec in specs.values()))
    block_tokens = options.block_tokens or unit * math.ceil(DEFAULT_BLOCK_TOKENS / unit)
    if block_tokens % unit:
        raise ConfigError(f"block_tokens = {block_tokens} is no multiple of {unit}, the tokens of a vLLM block here")
    if states:
        # vLLM has states where its own blocks end, and makes a prompt's last one at the last such place.
        lengths = {specs[index].block_size for index in states}
        if lengths != {unit}:
            raise ConfigError(
                f"mamba_block_size = {min(lengths)}: the connector needs {unit}, the attention's block size"
            )
        if options.block_tokens and block_tokens != unit:
            raise ConfigError(f"block_tokens = {block_tokens}: vLLM has this model's states every {unit}; leave it out")
        block_tokens = unit
    windows = {index: tokens for index, spec in specs.items() if (tokens := _window_tokens(spec)) is not None}
    if windows:
        # vLLM frees blocks before a window. It would free the first part of a block longer than the window before it
        # computes the last part, so the block's bytes would never be complete.
        window = min(windows.values())
        longest = max(unit, window // unit * unit)
        if options.block_tokens and block_tokens > longest:
            raise ConfigError(
                f"block_tokens = {block_tokens} is more than this model's sliding window of {window} tokens holds; "
                f"set {longest} or less"
            )
        block_tokens = min(block_tokens, longest)
    runs = _page_runs(kv_cache_config)
    groups = []
    for index, spec in specs.items():
        names = [name for name in kv_cache_config.kv_cache_groups[index].layer_names if name in runs]
        page_bytes = sum(run.nbytes for name in names for run in runs[name])
        part_bytes = block_tokens // spec.block_size * page_bytes
        rule = RecurrentState() if index in states else SlidingWindow(windows[index]) if index in windows else None
        group = Group(index, spec.block_size, part_bytes, rule, _is_replicated(spec))
        if options.codec_on_device is not None:
            group = coded_group(group, layer_specs(spec), len(names), block_tokens)
        groups.append(group)
    # Groups that are not kept here count too: vLLM refuses ids of failed blocks where it has several groups. With a
    # window it would go on behind the first block that failed, where it has no bytes of the window before that block.
    by_block = len(kv_cache_config.kv_cache_groups) == 1 and not windows
    layout = "vllm" if options.codec_on_device is None else f"vllm-{options.codec_on_device}"
    return Geometry(tuple(groups), block_tokens, unit, parallel.tensor_parallel_size, layout, by_block)


def cross_layer_layout(vllm_config: Any, heads_first: bool) -> str | None:
    """The name of vLLM's layout in which the layers of a block lie together (`KVCacheLayout`, 0.29 to 0.33).

    Args:
        vllm_config: vLLM's.
        heads_first: whether attention wants heads before tokens in a page.

    Returns:
        None for states and latents, whose layout vLLM decides by their sizes.
    """
    model = vllm_config.model_config
    if model.is_hybrid or model.use_mla:
        return None
    return "BLHNC" if heads_first else "BLNHC"


def check_failure_policy(kv_transfer_config: Any) -> None:
    """Raises ConfigError if vLLM fails requests after a failed load of their prefix.

    Args:
        kv_transfer_config: vLLM's own, which decides, and not the one of a child of MultiConnector.
    """
    if kv_transfer_config.kv_load_failure_policy != "recompute":
        raise ConfigError(
            'kv_load_failure_policy = "fail" makes vLLM fail requests whose prefix could not be loaded; set '
            f'"kv_load_failure_policy": "recompute" beside "kv_connector": "{kv_transfer_config.kv_connector}"'
        )


def _is_state(spec: Any) -> bool:
    return type(layer_specs(spec)[0]).__name__ == "MambaSpec"


def layer_specs(spec: Any) -> list[Any]:
    """A group's spec; the specs of its layers if they differ."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def _derives(spec: Any, *names: str) -> bool:
    """Whether the class of a layer's spec, or a base of it, has one of these names."""
    return any(kind.__name__ in names for kind in type(spec).__mro__)


def _is_replicated(spec: Any) -> bool:
    """Whether every tensor-parallel rank has the same bytes: latents (`MLAAttentionSpec`, `SlidingWindowMLASpec`), from
    which each rank makes its heads. Since 0.32 vLLM also marks them with `max_tp_shards` = 1."""
    return all(
        getattr(layer, "max_tp_shards", None) == 1 or _derives(layer, "MLAAttentionSpec", "SlidingWindowMLASpec")
        for layer in layer_specs(spec)
    )


def _window_tokens(spec: Any) -> int | None:
    """Tokens that the next token of a group attends to, itself included; None if it needs all before it.

    vLLM keeps the last `sliding_window - 1` tokens, and for some drafts `extra_retained_tokens` more
    (`SlidingWindowManager.get_num_skipped_tokens`). A `FullAttentionSpec` may name a window too: vLLM then keeps all
    blocks of the group, since layers of both kinds share it. Chunked local attention counts as full attention for now.
    """
    layers = layer_specs(spec)
    if not all(_derives(layer, "SlidingWindowSpec") for layer in layers):
        return None
    return max(int(layer.sliding_window) + int(getattr(layer, "extra_retained_tokens", 0)) for layer in layers)


def has_window(spec: Any) -> bool:
    """Whether the layers of a group need the end of a prefix only."""
    return _window_tokens(spec) is not None


def _check_layerwise(vllm_config: Any, groups: Sequence[Any]) -> None:
    """Raises ConfigError where vLLM does not undo a step that computed on bytes of a failed load: the user would get a
    wrong token."""
    if len(groups) > 1:
        raise ConfigError(
            f'load = "layerwise" needs a model with one KV cache group, and this one has {len(groups)}; use "async"'
        )
    if groups and _window_tokens(groups[0].kv_cache_spec) is not None:
        raise ConfigError(
            'load = "layerwise" and a sliding window: vLLM computes on from the first block that did not come, and has '
            'not the window before it; use load = "async"'
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            'load = "layerwise" and asynchronous scheduling: vLLM keeps the token of the step after one whose load '
            'failed; start with --no-async-scheduling, or use load = "async"'
        )
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            'load = "layerwise" and speculative decoding: vLLM samples before the layers of the draft model have come; '
            'use load = "async"'
        )


def computes_from_the_middle(vllm_config: Any) -> bool:
    """Whether vLLM can compute behind a prefix that it did not compute in the same step.

    Where it cannot (multi-head latent attention on a CPU without AMX), it turns both options off itself.
    """
    return bool(vllm_config.cache_config.enable_prefix_caching or vllm_config.scheduler_config.enable_chunked_prefill)


def read_pages(kv_cache_config: Any, kv_caches: Mapping[str, Any], geometry: Geometry) -> list[GroupPages]:
    """The addresses of every group's pages, from the tensors that vLLM has allocated (layer's name to tensor)."""
    runs = _page_runs(kv_cache_config)
    pages = []
    for group in geometry.groups:
        layers = []
        on_device = False
        for name in kv_cache_config.kv_cache_groups[group.index].layer_names:
            if name not in runs:
                continue
            base = kv_caches[name].untyped_storage()
            on_device = kv_caches[name].device.type != "cpu"
            end = max(run.address + (kv_cache_config.num_blocks - 1) * run.stride + run.nbytes for run in runs[name])
            if end > base.nbytes():
                raise ConfigError(f"the KV cache of {name} has {base.nbytes()} bytes where {end} were expected")
            layers.append(tuple(PageRun(base.data_ptr() + run.address, run.stride, run.nbytes) for run in runs[name]))
        pages.append(GroupPages(tuple(layers), on_device))
        if pages[-1].block_bytes * (geometry.block_tokens // group.block_tokens) != group.page_bytes:
            raise ConfigError(
                f"KV cache group {group.index} is laid out on this rank otherwise than vLLM's scheduler says"
            )
    return pages


def layer_names(kv_cache_config: Any, group: Group) -> list[str]:
    """The layers of a group in the order of `GroupPages.layers`."""
    runs = _page_runs(kv_cache_config)
    return [name for name in kv_cache_config.kv_cache_groups[group.index].layer_names if name in runs]


def _page_runs(kv_cache_config: Any) -> dict[str, tuple[PageRun, ...]]:
    """Every layer's runs of pages; addresses count from the start of the layer's allocation.

    vLLM places layer `l` of a tensor at `offset + l * layer_stride`, its block `b` a further `b * block_stride` on.
    Layers outermost: a region a layer, or several, one a group of heads. Blocks outermost: the layers of a block
    together, a layer's page in one piece, or in several with the other layers' between them, one a group of heads.
    """
    page_bytes: dict[str, int] = {}
    content_bytes: dict[str, int] = {}  # of pages that are padded: states lie at the beginning
    for group in kv_cache_config.kv_cache_groups:
        of_layers = getattr(group.kv_cache_spec, "kv_cache_specs", {})  # where the layers of a group differ
        for name in group.layer_names:
            spec = of_layers.get(name, group.kv_cache_spec)
            page_bytes[name] = spec.page_size_bytes
            content_bytes[name] = spec.state_content_size_bytes if _is_state(spec) else spec.page_size_bytes
    runs: dict[str, tuple[PageRun, ...]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        span = kv_cache_config.num_blocks * tensor.block_stride
        for place, name in enumerate(tensor.layers):
            if name not in page_bytes:
                continue
            start = tensor.offset + place * tensor.layer_stride
            if tensor.layer_stride >= span:
                pieces = range(start, start + tensor.layer_stride - span + 1, span)
                nbytes = tensor.block_stride
            else:
                apart = len(tensor.layers) * tensor.layer_stride
                pieces = range(start, start + max(1, page_bytes[name] // tensor.layer_stride) * apart, apart)
                nbytes = min(page_bytes[name], tensor.layer_stride)
            if len(pieces) * nbytes < page_bytes[name]:
                raise ConfigError(
                    f"the KV cache of {name} lies in a way that PrefixdConnector does not know: "
                    f"{len(pieces)} x {nbytes} bytes for a page of {page_bytes[name]}; set VLLM_KV_CACHE_LAYOUT"
                )
            if len(pieces) == 1:
                nbytes = min(nbytes, content_bytes[name])
            runs[name] = tuple(PageRun(piece, tensor.block_stride, nbytes) for piece in pieces)
    return runs
