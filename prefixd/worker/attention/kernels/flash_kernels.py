"""torch's flash attention: the operator below its public functions, and a check of the log-sum-exp that it returns.

The operator has known `seqused_k` since torch 2.5, `varlen_attn` only since 2.12. With FlashAttention 2 it divides the
keys of a sequence among thread blocks in two cases alone: a batch of single queries whose heads share KV heads, and a
call without `cu_seq_k`, for one sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

VarlenKernel = Callable[..., Any]
"""Attention of a batch of sequences; the arguments of `torch.nn.attention.varlen.varlen_attn`.

``kernel(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, seqused_k)`` with query
``[rows, heads, head_dim]`` and keys and values ``[tokens, kv_heads, head_dim]``. A kernel that also takes `return_lse`
returns with it (output, log-sum-exp), ``[rows, heads, head_dim]`` and ``[heads, rows]``; and then also computes
``window_size=(-1, -1)``, in which all queries see all keys. A sequence without keys has an infinite log-sum-exp of
either sign.
"""
AloneKernel = Callable[..., torch.Tensor]
"""Causal attention of one sequence: ``kernel(query, key, value, *, scale)`` with query ``[rows, heads, head_dim]``, and
keys and values ``[tokens, kv_heads, head_dim]``, of which the last `rows` are the queries' own."""

_CHECK_TOLERANCE = 0.03
_CHECK_QUERIES, _CHECK_KEYS = (3, 1, 70), (5, 0, 140)


def find_kernel(head_dim: int, dtype: torch.dtype, device: torch.device) -> VarlenKernel | None:
    """The kernel for this shape on this device; None without one.

    Flash attention takes 16-bit types and heads of up to 256 in eights, on GPUs from Ampere on.
    """
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return None
    if torch.cuda.get_device_capability(device) < (8, 0):
        return None
    return _varlen_kernel()


@functools.cache
def _varlen_kernel() -> VarlenKernel | None:
    operator = torch.ops.aten._flash_attention_forward.default
    known = {argument.name for argument in operator._schema.arguments}
    if "seqused_k" not in known:
        return None
    # Keys split among thread blocks are read in larger blocks, which may begin before a window's memory.
    unsplit: dict[str, object] = {"num_splits": 1} if "num_splits" in known else {}

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,
        return_lse: bool = False,
    ) -> Any:
        assert window_size[1] == 0 or window_size == (-1, -1)
        assert enable_gqa or query.shape[1] == key.shape[1]
        windowed = window_size[0] >= 0
        output, lse, *_ = operator(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            0.0,
            window_size[1] == 0,
            False,
            scale=scale,
            window_size_left=window_size[0] if windowed else None,
            seqused_k=seqused_k,
            **(unsplit if windowed else {}),
        )
        return (output, lse) if return_lse else output

    return kernel


def flash_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
    """`AloneKernel` of torch: FlashAttention 2 splits the keys of any number of queries here."""
    output: torch.Tensor = torch.ops.aten._flash_attention_forward.default(
        query[None], key[None], value[None], None, None, query.shape[0], key.shape[0], 0.0, True, False, scale=scale
    )[0]
    return output[0]


@functools.cache
def why_no_lse(kernel: VarlenKernel, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a kernel's log-sum-exp cannot be used; None if a small batch shows that it is what `VarlenKernel` says.

    torch documents ``[rows, heads]``, allocates ``[heads, rows]``, and had ``[sequences, heads, longest]`` before.
    """
    generator = torch.Generator().manual_seed(3)
    heads, rows, tokens = 2, sum(_CHECK_QUERIES), sum(_CHECK_KEYS)
    query = torch.randn((rows, heads, head_dim), generator=generator).to(dtype)
    keys, values = torch.randn((2, tokens, heads, head_dim), generator=generator).to(dtype)
    starts = [0, _CHECK_QUERIES[0], _CHECK_QUERIES[0] + _CHECK_QUERIES[1], rows]
    first_keys = [0, _CHECK_KEYS[0], _CHECK_KEYS[0] + _CHECK_KEYS[1]]
    try:
        output, lse = kernel(
            query.to(device),
            keys.to(device),
            values.to(device),
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor([*first_keys, tokens], dtype=torch.int32, device=device),
            max(_CHECK_QUERIES),
            max(_CHECK_KEYS),
            scale=head_dim**-0.5,
            window_size=(-1, -1),
            enable_gqa=False,
            seqused_k=torch.tensor(_CHECK_KEYS, dtype=torch.int32, device=device),
            return_lse=True,
        )
    except RuntimeError as failure:
        return f"the kernel cannot return it: {_line(failure)}"
    if lse.shape != (heads, rows):
        return f"the kernel returns a log-sum-exp of shape {list(lse.shape)} for {heads} heads and {rows} queries"
    for start, queries, first, used in zip(starts, _CHECK_QUERIES, first_keys, _CHECK_KEYS, strict=False):
        found = lse[:, start : start + queries].float().cpu()
        if not used:
            if not found.isinf().all():
                return "the log-sum-exp of a sequence without keys is a number"
            continue
        part, own = query[start : start + queries].float(), slice(first, first + used)
        scores = torch.einsum("qhd,khd->hqk", part, keys[own].float()) * head_dim**-0.5
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values[own].float())
        wrong = (found - scores.logsumexp(-1)).abs().max() > _CHECK_TOLERANCE
        error = (output[start : start + queries].float().cpu() - expected).norm() / expected.norm()
        if wrong or not error <= _CHECK_TOLERANCE:
            return f"output or log-sum-exp of {queries} queries that see all of {used} keys is wrong"
    return None


@functools.cache
def why_not_alone(kernel: AloneKernel, head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a kernel for one sequence cannot be used; None if it computes a small one right, with shared KV heads that
    lie apart."""
    generator = torch.Generator().manual_seed(4)
    queries, tokens, kv_heads, group = 3, 70, 2, 2
    query = torch.randn((queries, kv_heads * group, head_dim), generator=generator).to(dtype)
    pairs = torch.randn((tokens, 2, kv_heads, head_dim), generator=generator).to(dtype)
    there = pairs.to(device)
    try:
        found = kernel(query.to(device), there[:, 0], there[:, 1], scale=head_dim**-0.5).float().cpu()
    except RuntimeError as failure:
        return f"the kernel for one sequence cannot run: {_line(failure)}"
    keys, values = pairs.float().repeat_interleave(group, dim=2).unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * head_dim**-0.5
    hidden = torch.arange(tokens) > torch.arange(tokens - queries, tokens)[:, None]
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    error = float((found - expected).norm() / expected.norm())
    return None if error <= _CHECK_TOLERANCE else f"the kernel for one sequence is wrong: relative error {error:.2g}"


def _line(failure: RuntimeError) -> str:
    return (str(failure).strip() or type(failure).__name__).splitlines()[0]
