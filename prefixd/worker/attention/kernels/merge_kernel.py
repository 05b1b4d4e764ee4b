"""Joins attention over parts of a sequence's keys, by log-sum-exp: exact but for rounding (FlashAttention, section 3).

A query has attended to parts of its keys, apart. With outputs o_p and log-sum-exps l_p, its attention to all of them is
sum(exp(l_p) o_p) / sum(exp(l_p)). One Triton kernel, where Triton is there and the tensors are on a GPU; else torch.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

from prefixd.worker.to_device import uploaded


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Attention over parts: ``output[row, kv head, group, dim]`` and ``lse[row, kv head, group]``, with any strides.

    A log-sum-exp that is infinite, of either sign, is of a part without keys.
    """

    output: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MergeRows:
    """Which rows of the parts make each row of the result, all ``[results]`` in int32.

    The parts of result i are ``first[i] + p * step[i]`` for p below ``count[i]``, and row ``own[i]`` of further parts
    if that is not negative. ``target[i]`` is its row in the output.
    """

    first: torch.Tensor
    step: torch.Tensor
    count: torch.Tensor
    own: torch.Tensor
    target: torch.Tensor
    most: int

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int, int]], device: torch.device) -> MergeRows:
        """From (first, step, count, own, target) of each result; one upload."""
        columns = [list(column) for column in zip(*rows, strict=True)]
        first, step, count, own, target = uploaded(columns, torch.int32, device)
        return cls(first, step, count, own, target, max(columns[2]))


def merge(output: torch.Tensor, rows: MergeRows, parts: Parts, own: Parts | None = None) -> None:
    """Write the results into ``output[row, heads, dim]``; query head h is ``(h // group, h % group)`` of the parts."""
    if output.is_cuda and _triton_is_there():
        from prefixd.worker.attention.kernels import merge_triton

        merge_triton.merge(output, rows, parts, own)
    else:
        merge_in_torch(output, rows, parts, own)


def merge_in_torch(output: torch.Tensor, rows: MergeRows, parts: Parts, own: Parts | None = None) -> None:
    """As `merge`, in a dozen operators of torch."""
    part = torch.arange(rows.most, device=output.device, dtype=torch.int32)
    seen = part < rows.count[:, None]
    index = torch.where(seen, rows.first[:, None] + part * rows.step[:, None], 0).flatten()
    shape = (len(rows.first), rows.most, output.shape[1])
    lse = parts.lse.index_select(0, index).reshape(shape)
    values = parts.output.index_select(0, index).reshape(*shape, output.shape[2])
    lse = lse.masked_fill(~seen[:, :, None] | lse.isinf(), -torch.inf)
    if own is not None:
        has_own = rows.own >= 0
        mine = rows.own.clamp(min=0)
        own_lse = own.lse.index_select(0, mine).reshape(shape[0], 1, shape[2])
        own_lse = own_lse.masked_fill(~has_own[:, None, None] | own_lse.isinf(), -torch.inf)
        lse = torch.cat((lse, own_lse), dim=1)
        own_values = own.output.index_select(0, mine).reshape(shape[0], 1, *output.shape[1:])
        values = torch.cat((values, own_values), dim=1)
    weights = lse.softmax(dim=1)[..., None]
    merged = (weights * values.masked_fill(weights == 0, 0)).sum(dim=1)
    output.index_copy_(0, rows.target.long(), merged.to(output.dtype))


@functools.cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None
