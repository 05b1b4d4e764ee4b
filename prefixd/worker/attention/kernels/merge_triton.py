"""The Triton kernel of `merge_kernel`: one program a row and head."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from prefixd.worker.attention.kernels.merge_kernel import OwnPart, Parts


@triton.jit
def _add_part(most, total, result, value_at, lse_at, dim, dims):
    lse = tl.load(lse_at).to(tl.float32)
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    values = tl.load(value_at + dim, mask=dim < dims, other=0.0).to(tl.float32)
    larger = tl.maximum(most, lse)
    shift = tl.where(larger == float("-inf"), 0.0, larger)  # no key so far: -inf minus -inf is not a number
    before, weight = tl.exp(most - shift), tl.exp(lse - shift)
    # A part without keys may hold anything.
    return larger, total * before + weight, result * before + tl.where(weight > 0, values * weight, 0.0)


# These differ from pass to pass; a kernel made for some of their values would be compiled while requests wait.
_OF_THE_PASS = ["results", "pieces", "lse_row", "lse_kv", "lse_group", "own_lse_row", "own_lse_kv", "own_lse_group"]


@triton.jit(do_not_specialize=_OF_THE_PASS)
def _merge(
    output,
    output_row,
    target,
    parts,
    part_row,
    part_kv,
    part_group,
    lse,
    lse_row,
    lse_kv,
    lse_group,
    own,
    own_row,
    own_kv,
    own_group,
    own_lse,
    own_lse_row,
    own_lse_kv,
    own_lse_group,
    own_of,
    results,
    pieces,
    group,
    dims,
    HAS_OWN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    kv, member = (head // group).to(tl.int64), (head % group).to(tl.int64)
    dim = tl.arange(0, BLOCK)
    most, total = tl.full((), float("-inf"), tl.float32), tl.full((), 0.0, tl.float32)
    result = tl.zeros((BLOCK,), tl.float32)
    for piece in range(pieces):
        at = (piece * results + row).to(tl.int64)
        most, total, result = _add_part(
            most,
            total,
            result,
            parts + at * part_row + kv * part_kv + member * part_group,
            lse + at * lse_row + kv * lse_kv + member * lse_group,
            dim,
            dims,
        )
    if HAS_OWN:
        mine = tl.load(own_of + row).to(tl.int64)
        most, total, result = _add_part(
            most,
            total,
            result,
            own + mine * own_row + kv * own_kv + member * own_group,
            own_lse + mine * own_lse_row + kv * own_lse_kv + member * own_lse_group,
            dim,
            dims,
        )
    into = output + tl.load(target + row).to(tl.int64) * output_row + head * dims + dim
    tl.store(into, (result / total).to(output.dtype.element_ty), mask=dim < dims)


def merge(output: torch.Tensor, target: torch.Tensor, parts: Parts, own: OwnPart | None) -> None:
    """As `merge_kernel.merge`."""
    further = parts if own is None else own.parts
    heads, dims = output.shape[1:]
    results = len(target)
    _merge[(results, heads)](
        output,
        output.stride(0),
        target,
        parts.output,
        *parts.output.stride()[:3],
        parts.lse,
        *parts.lse.stride(),
        further.output,
        *further.output.stride()[:3],
        further.lse,
        *further.lse.stride(),
        target if own is None else own.rows,
        results,
        parts.lse.shape[0] // results,
        parts.output.shape[2],
        dims,
        HAS_OWN=own is not None,
        BLOCK=triton.next_power_of_2(dims),
        num_warps=1,
    )
