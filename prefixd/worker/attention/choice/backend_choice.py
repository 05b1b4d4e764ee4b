"""The attention backend of a model: by its device, the kinds of its layers, and `worker.attention`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from prefixd.worker.attention.attention import AttentionBackend, AttentionKind, GroupedAttention, refusal
from prefixd.worker.attention.choice.cost_table import read_costs
from prefixd.worker.attention.choice.pass_plan import CheapestPlan, Plan, split_long
from prefixd.worker.attention.chunked_attention import ChunkedAttention
from prefixd.worker.attention.extent_attention import ExtentAttention, why_not_group
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.flex_attention import FlexAttention, check_reach
from prefixd.worker.attention.kernels.extent_call import ExtentKernel
from prefixd.worker.attention.kernels.extent_check import find_extent_kernel
from prefixd.worker.attention.kernels.flash_kernels import (
    VarlenKernel,
    find_kernel,
    flash_alone,
    why_no_lse,
    why_not_alone,
)
from prefixd.worker.attention.tile_attention import TileAttention
from prefixd.worker.spec.model_spec import ModelSpec
from prefixd.worker.spec.probe import AttentionLayer
from prefixd.worker_protocol.errors import ModelError
from prefixd_swap.group_shape import KvGeometry


def choose_attention(
    spec: ModelSpec, *, paged: bool = False, note: Callable[[str], None] = lambda line: None
) -> AttentionBackend:
    """The attention backend for the model's device. Raises ModelError if none can compute it.

    note: gets a line for the log where a slower backend is taken, with the reason.
    """
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
    chosen = _with_chunks(_choose_on_cuda(spec, list(kinds.values()), paged, note), kinds.values())
    if refused := refusal(chosen, kinds.values()):
        raise ModelError(refused)
    return chosen if spec.groups.own.alone else GroupedAttention(chosen)


def _choose_on_cuda(
    spec: ModelSpec, kinds: Sequence[AttentionKind], paged: bool, note: Callable[[str], None]
) -> AttentionBackend:
    """The first of flash attention, the Triton kernel and FlexAttention that computes all kinds."""
    way = spec.attention_way
    geometry = max((group.geometry for group in spec.groups.own.attention), key=lambda shape: shape.head_dim)
    heads = max(layer.query_heads for layer in spec.attention)
    if paged or way in ("triton", "extents"):
        kernel, why_not = _extent_kernel(spec, geometry, heads)
        if kernel is None:
            asked = 'worker.kv = "paged"' if paged else f'worker.attention = "{way}"'
            remedy = 'worker.kv to "virtual"' if paged else 'it to "auto"'
            raise ModelError(f"{asked} needs the kernel in Triton, and {why_not}; set {remedy}")
        return ExtentAttention(kernel, extents=way == "extents")
    if way != "flex":
        varlen = find_kernel(geometry.head_dim, getattr(torch, spec.dtype), spec.device)
        if varlen is not None:
            flash = _flash(spec, varlen, geometry, note)
            if refusal(_with_chunks(flash, kinds), kinds) is None:
                return flash
        kernel, why_not = _extent_kernel(spec, geometry, heads)
        if kernel is not None:
            extents = ExtentAttention(kernel)
            if refusal(_with_chunks(extents, kinds), kinds) is None:
                return extents
        else:
            note(f"attention by FlexAttention, which is slower: {why_not}")
    for group in spec.groups.own.attention:
        check_reach(group.geometry, spec.sequence_capacity)
    return FlexAttention(geometry.block_tokens)


def _extent_kernel(spec: ModelSpec, geometry: KvGeometry, heads: int) -> tuple[ExtentKernel | None, str]:
    if reason := why_not_group(heads // geometry.kv_heads):
        return None, reason
    return find_extent_kernel(heads, geometry.kv_heads, geometry.head_dim, getattr(torch, spec.dtype), spec.device)


def _with_chunks(backend: AttentionBackend, kinds: Iterable[AttentionKind]) -> AttentionBackend:
    return ChunkedAttention(backend) if any(kind.chunk is not None for kind in kinds) else backend


def _flash(
    spec: ModelSpec, kernel: VarlenKernel, geometry: KvGeometry, note: Callable[[str], None] = lambda line: None
) -> FlashAttention:
    """Flash attention that plans its passes as `worker.attention` says."""
    if spec.attention_way == "plain":
        return FlashAttention(kernel)
    where = (geometry.head_dim, getattr(torch, spec.dtype), spec.device)
    reason = why_no_lse(kernel, *where)
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
        table = read_costs(name, spec.attention_costs)
        if name and table.device != name:
            why = "by worker.attention_costs" if spec.attention_costs else "there are none (worker.attention_costs)"
            note(f"attention is chosen by the costs of {table.device}, not of this {name}: {why}")
        costs = table.of(heads, geometry.kv_heads, geometry.head_dim, spec.layout)
        why_not = why_not_alone(flash_alone, *where)
        for line in (reason, why_not):
            if line is not None:
                note(f"attention of long prompts is slower: {line}")
        plan = CheapestPlan(costs, can_split=reason is None, can_alone=why_not is None)
    return FlashAttention(kernel, plan, flash_alone)


def _kind(layer: AttentionLayer, both_ways: bool) -> AttentionKind:
    """The kind of a layer's attention; its sinks are a meta tensor."""
    sinks = torch.empty(layer.query_heads, device="meta") if layer.sinks else None
    return AttentionKind(layer.window, layer.softcap, sinks, layer.expanded, both_ways, layer.chunk)
