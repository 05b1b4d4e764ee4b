"""The ways to compute attention that are measured against each other.

On virtual tensors:

contiguous    flash attention in one call for all sequences, with the longest one's keys as `max_k`
stride        the same with a row's length as `max_k`
alone         flash attention in a call for each sequence
split4, ...   the keys of each sequence in 4 (8, 16) pieces, merged
request       torch's `scaled_dot_product_attention` for each sequence
triton        the kernel in Triton
flex          FlexAttention

On block tables:

paged         the kernel in Triton, through the table
extents       the kernel in Triton, over runs of adjacent blocks
gathered      every layer's blocks copied together for flash attention
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.engines.extent_reference import extent_reference
from benchmarks.engines.varlen_reference import alone_reference, varlen_reference
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.kv import Heads
from prefixd.worker.attention.attention import AttentionBackend
from prefixd.worker.attention.choice.pass_plan import PassPlan
from prefixd.worker.attention.extent_attention import ExtentAttention, why_not_group
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.attention.flex_attention import FlexAttention
from prefixd.worker.attention.kernels.extent_call import ExtentKernel
from prefixd.worker.attention.kernels.extent_check import find_extent_kernel
from prefixd.worker.attention.kernels.flash_kernels import (
    AloneKernel,
    find_kernel,
    flash_alone,
    why_no_lse,
    why_not_alone,
)
from prefixd.worker.memory.kv_memory import StepKv
from prefixd.worker.memory.paged_kv import PagedStep
from prefixd.worker.memory.virtual_kv import VirtualStep
from prefixd_swap.group_shape import KvGeometry

PAGED_WAYS = ("paged", "extents", "gathered")
_IN_TRITON = ("triton", "paged", "extents")

Attend = Callable[[torch.Tensor, int], torch.Tensor]
"""Query ``[1, heads, tokens, head_dim]`` and a layer to ``[tokens, heads, head_dim]``."""


def splits_of(way: str) -> int | None:
    """The pieces of a way that splits keys."""
    return int(way.removeprefix("split")) if way.startswith("split") else None


class Ways:
    """The ways with the kernels of a device, or their stand-ins."""

    def __init__(self, device: Device, heads: Heads, geometry: KvGeometry) -> None:
        self._scale = heads.head_dim**-0.5
        self._block_tokens = geometry.block_tokens
        self._alone: AloneKernel = alone_reference
        self._varlen: Callable[..., Any] | None = varlen_reference
        self._extents: ExtentKernel | None = extent_reference
        self._why_no_triton = why_not_group(heads.query_heads // heads.kv_heads) or ""
        self._why_no_split: str | None = None
        self._why_not_alone: str | None = None
        if device.measures:
            where = (heads.head_dim, torch.bfloat16, device.torch_device)
            self._alone, self._varlen = flash_alone, find_kernel(*where)
            if self._varlen is not None:
                self._why_no_split = why_no_lse(self._varlen, *where)
            self._why_not_alone = why_not_alone(self._alone, *where)
            self._extents, reason = find_extent_kernel(heads.query_heads, heads.kv_heads, *where)
            self._why_no_triton = self._why_no_triton or reason

    def missing(self, wanted: Sequence[str]) -> dict[str, str]:
        """Those of `wanted` that this device and its software cannot do, with the reason."""
        found = {}
        for way in wanted:
            if way in _IN_TRITON:
                reason: str | None = self._why_no_triton
            elif way in ("flex", "request"):
                reason = None
            else:
                reason = "no flash attention for bfloat16" if self._varlen is None else None
                if splits_of(way) is not None:
                    reason = reason or self._why_no_split
                elif way == "alone":
                    reason = reason or self._why_not_alone
            if reason:
                found[way] = reason
        return found

    def attend(self, way: str, step: StepKv) -> Attend:
        """How the way computes a layer of a pass."""
        if way == "request":
            return _RequestByRequest(step, self._scale).attend
        if way == "gathered":
            assert isinstance(step, PagedStep)
            step = GatheredStep(step)
        if way == "stride":
            assert isinstance(step, VirtualStep)
            step = _StrideStep(step)
        begun = self._backend(way).begin(step)
        return lambda query, layer: begun.attend(query, layer, self._scale)[0]

    def _backend(self, way: str) -> AttentionBackend:
        if way == "flex":
            return FlexAttention(self._block_tokens)
        if way in _IN_TRITON:
            assert self._extents is not None, "it is missing"
            return ExtentAttention(self._extents, extents=way == "extents")
        assert self._varlen is not None, "it is missing"
        pieces = splits_of(way)

        def plan(queries: Sequence[int], keys: Sequence[int], captured: bool = False) -> PassPlan:
            every = tuple(range(len(queries)))
            return PassPlan(alone=every) if pieces is None else PassPlan(split=every, pieces=pieces)

        if way == "alone" or pieces is not None:
            return FlashAttention(self._varlen, plan, self._alone)
        return FlashAttention(self._varlen)


class _StrideStep:
    """A pass whose `max_k` is the length of a row, as if the longest sequence filled it."""

    def __init__(self, step: VirtualStep) -> None:
        self.segments = step.segments
        self._step = step
        self.write, self.scrub, self.read = step.write, step.scrub, step.read

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        layer, arguments = self._step.varlen_arguments()
        return layer, {**arguments, "max_k": self._step.row_tokens}


class _RequestByRequest:
    """An ordinary kernel for every request, as where each has a reservation of its own."""

    def __init__(self, step: StepKv, scale: float) -> None:
        self._step = step
        self._scale = scale
        self._spans = tuple((0, segment.stop) for segment in step.segments)

    def attend(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        outputs = []
        first = 0
        for (keys, values), segment in zip(self._step.read(layer, self._spans), self._step.segments, strict=True):
            part = query[:, :, first : first + len(segment)]
            first += len(segment)
            mask: Any = causal_lower_right(len(segment), segment.stop) if len(segment) > 1 else None
            attended = F.scaled_dot_product_attention(
                part, keys[None], values[None], attn_mask=mask, scale=self._scale, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1))
        return torch.cat(outputs)


class GatheredStep:
    """A pass over block tables for a kernel without them: every layer's blocks are copied together.

    It reads as `StepKv`; nothing is written through it.
    """

    def __init__(self, step: PagedStep) -> None:
        self.segments = step.segments
        self._pool = step._pool
        block = self._pool.shape[1]
        tables = [segment.sequence.frames[: -(-segment.stop // block)] for segment in step.segments]  # type: ignore[attr-defined]
        device = self._pool.device
        self._blocks = torch.tensor([frame for table in tables for frame in table], device=device)
        starts = [0, *itertools.accumulate(len(table) * block for table in tables)]
        self._arguments: dict[str, object] = {
            "cu_seq_k": torch.tensor(starts, dtype=torch.int32, device=device),
            "max_k": max(len(table) * block for table in tables),
            "seqused_k": torch.tensor([part.stop for part in step.segments], dtype=torch.int32, device=device),
        }
        self.write, self.scrub, self.read = step.write, step.scrub, step.read

    def varlen_arguments(self) -> tuple[Callable[[int], tuple[torch.Tensor, torch.Tensor]], dict[str, object]]:
        """Keys and values of a layer are copies."""

        def layer(number: int) -> tuple[torch.Tensor, torch.Tensor]:
            gathered = self._pool[:, :, number].index_select(0, self._blocks).flatten(0, 1)
            return gathered[:, 0], gathered[:, 1]

        return layer, self._arguments
