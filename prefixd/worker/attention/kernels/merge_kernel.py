"""Joins attention over parts of a sequence's keys, by log-sum-exp: exact but for rounding (FlashAttention, section 3).

A query has attended to parts of its keys, apart. With outputs o_p and log-sum-exps l_p, its attention to all of them is
sum(exp(l_p) o_p) / sum(exp(l_p)). One Triton kernel, where Triton is there and the tensors are on a GPU; else torch.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Attention over parts: ``output[row, kv head, group, dim]`` and ``lse[row, kv head, group]``, with any strides.

    A log-sum-exp that is infinite, of either sign, is of a part without keys.
    """

    output: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class OwnPart:
    """A further part: row `rows[i]` of `parts` is result i's; ``[results]`` in int32."""

    parts: Parts
    rows: torch.Tensor


def merge(output: torch.Tensor, target: torch.Tensor, parts: Parts, own: OwnPart | None = None) -> None:
    """Write result i, of n, into row `target[i]` of output ``[rows, heads, dim]``.

    Its parts are the rows i, n + i, 2n + i and so on of `parts`, and its row of `own`. Query head h of the output is
    ``(h // group, h % group)`` of the parts. target: ``[n]`` in int32.
    """
    if output.is_cuda and _triton_is_there():
        from prefixd.worker.attention.kernels import merge_triton

        merge_triton.merge(output, target, parts, own)
    else:
        merge_in_torch(output, target, parts, own)


def merge_in_torch(output: torch.Tensor, target: torch.Tensor, parts: Parts, own: OwnPart | None = None) -> None:
    """As `merge`, in a dozen operators of torch."""
    lse, values = (states.unflatten(0, (-1, len(target))).flatten(2, 3) for states in (parts.lse, parts.output))
    if own is not None:
        lse = torch.cat((lse, own.parts.lse.index_select(0, own.rows).flatten(1, 2)[None]))
        values = torch.cat((values, own.parts.output.index_select(0, own.rows).flatten(1, 2)[None]))
    weights = lse.masked_fill(lse.isinf(), -torch.inf).softmax(dim=0)[..., None]
    merged = (weights * values.masked_fill(weights == 0, 0)).sum(dim=0)
    output.index_copy_(0, target.long(), merged.to(output.dtype))


@functools.cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec("triton") is not None
