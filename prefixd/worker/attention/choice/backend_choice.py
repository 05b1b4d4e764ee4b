"""The attention backend of a model: by its device, the kinds of its layers, and `worker.attention`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from prefixd.worker.attention.attention import AttentionBackend, AttentionKind, GroupedAttention, refusal
from prefixd.worker.attention.choice.cost_table import read_costs
from prefixd.worker.attention.choice.pass_plan import CheapestPlan, Plan, split_long
from prefixd.worker.attention.chunked_attention import ChunkedAttention
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.flex_attention import FlexAttention, check_reach
from prefixd.worker.attention.kernels.flash_kernels import VarlenKernel, find_kernel, flash_alone, why_no_lse
from prefixd.worker.attention.tile_attention import TileAttention
from prefixd.worker.spec.model_spec import ModelSpec
from prefixd.worker.spec.probe import AttentionLayer
from prefixd.worker_protocol.errors import ModelError
from prefixd_swap.group_shape import KvGeometry


def choose_attention(spec: ModelSpec, *, paged: bool = False) -> AttentionBackend:
    """The attention backend for the model's device. Raises ModelError if none can compute it."""
    both_ways = spec.images is not None and spec.images.both_ways
    kinds = {layer.layer: _kind(layer, both_ways) for layer in spec.attention}
    dtype = getattr(torch, spec.dtype)
    if paged and spec.draft is not None:
        raise ModelError(
            f"model {str(spec.path)!r} has a draft beside it, and block tables hold one model's KV: set worker.kv to "
            '"virtual" or leave worker.draft_model out'
        )
    if spec.device.type == "cpu":
        tiles = TileAttention(spec.block_tokens, dtype, [layer for layer in kinds if kinds[layer].expanded])
        return _with_chunks(tiles, kinds.values())
    if not spec.attention:
        return TileAttention(spec.block_tokens, dtype)  # never called
    if not spec.groups.own.alone:
        return GroupedAttention(_choose_on_cuda(spec, kinds, paged=paged))
    return _choose_on_cuda(spec, kinds, paged=paged)


def _choose_on_cuda(spec: ModelSpec, kinds: Mapping[int, AttentionKind], *, paged: bool) -> AttentionBackend:
    dtype = getattr(torch, spec.dtype)
    geometry = max((group.geometry for group in spec.groups.own.attention), key=lambda shape: shape.head_dim)
    kernel = find_kernel(geometry.head_dim, dtype, spec.device, block_table=paged)
    if kernel is None and paged:
        raise ModelError(
            f'worker.kv = "paged" needs a kernel that takes block tables: torch 2.12 or newer (this is '
            f"{torch.__version__}), 16-bit KV and a head size of up to 256 in eights (this is {geometry.dtype}, "
            f'{geometry.head_dim}); set worker.kv to "virtual"'
        )
    if kernel is not None:
        made = FlashAttention(kernel) if paged else _flash(spec, kernel, geometry)
        flash = _with_chunks(made, kinds.values())
        refused = refusal(flash, kinds.values())
        if refused is None:
            return flash
        if paged:
            raise ModelError(f'{refused}; set worker.kv to "virtual"')
    flex = _with_chunks(FlexAttention(geometry.block_tokens), kinds.values())
    if refused := refusal(flex, kinds.values()):
        raise ModelError(refused)
    for group in spec.groups.own.attention:
        check_reach(group.geometry, spec.sequence_capacity)
    return flex


def _with_chunks(backend: AttentionBackend, kinds: Iterable[AttentionKind]) -> AttentionBackend:
    return ChunkedAttention(backend) if any(kind.chunk is not None for kind in kinds) else backend


def _flash(spec: ModelSpec, kernel: VarlenKernel, geometry: KvGeometry) -> FlashAttention:
    """Flash attention that plans its passes as `worker.attention` says."""
    if spec.attention_way == "plain":
        return FlashAttention(kernel)
    reason = why_no_lse(kernel, geometry.head_dim, getattr(torch, spec.dtype), spec.device)
    plan: Plan
    if spec.attention_way == "split":
        if reason is not None:
            raise ModelError(
                f'worker.attention = "split" merges by log-sum-exp, and {reason} (torch {torch.__version__}); set it '
                'to "auto" or "plain"'
            )
        plan = split_long
    else:
        heads = max(layer.query_heads for layer in spec.attention)
        name = torch.cuda.get_device_name(spec.device) if torch.cuda.is_available() else ""
        costs = read_costs(name, spec.attention_costs).of(heads, geometry.kv_heads, geometry.head_dim, spec.layout)
        plan = CheapestPlan(costs, can_split=reason is None, can_alone=True)
    return FlashAttention(kernel, plan, flash_alone)


def _kind(layer: AttentionLayer, both_ways: bool) -> AttentionKind:
    """The kind of a layer's attention; its sinks are a meta tensor."""
    sinks = torch.empty(layer.query_heads, device="meta") if layer.sinks else None
    return AttentionKind(layer.window, layer.softcap, sinks, layer.expanded, both_ways, layer.chunk)
