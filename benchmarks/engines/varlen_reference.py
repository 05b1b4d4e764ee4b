"""Variable-length attention by its definition, for machines without the GPU kernel.

It takes what `torch.nn.attention.varlen.varlen_attn` takes and reads what that may read: keys up to `seqused_k` of each
sequence and none behind; with a window none before the `READ_BLOCK` of the first key that is seen. It
refuses what the kernel would refuse.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from prefixd.worker.attention.flash_attention import READ_BLOCK


def varlen_reference(
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
    """``[tokens, heads, head_dim]``: causal attention, each sequence's last query seeing all of its keys.

    With the window (-1, -1) every query sees all keys. With `return_lse` also the log-sum-exp, ``[heads, tokens]``.

    Raises ValueError for arguments that the kernel does not take.
    """
    causal = window_size != (-1, -1)
    if window_size[1] != 0 and causal:
        raise ValueError(f"this stands in for causal attention, or none masked, not for the window {window_size}")
    if not enable_gqa and query.shape[1] != key.shape[-2]:
        raise ValueError(f"{query.shape[1]} query heads, {key.shape[-2]} KV heads, and enable_gqa is off")
    lengths = [cu_seq_q, seqused_k, cu_seq_k]
    if any(tensor.dtype != torch.int32 for tensor in lengths) or key.stride(-1) != 1 or query.stride(-1) != 1:
        raise ValueError("lengths must be int32 and heads contiguous")
    sequences = len(cu_seq_q) - 1
    if len(seqused_k) != sequences or len(cu_seq_k) != sequences + 1:
        raise ValueError(f"{sequences} sequences, but {len(seqused_k)} lengths")
    output = torch.empty_like(query)
    lse = torch.full((query.shape[1], query.shape[0]), torch.inf, dtype=query.dtype)
    bounds = cu_seq_q.tolist()
    for index, (first, last) in enumerate(itertools.pairwise(bounds)):
        used = int(seqused_k[index])
        if last - first > max_q or used > max_k:
            raise ValueError(f"sequence {index} has {last - first} queries and {used} keys, over {max_q} and {max_k}")
        start = int(cu_seq_k[index])
        keys, values = key[start : start + used], value[start : start + used]
        before = used if window_size[0] < 0 else window_size[0]
        start = max(0, used - (last - first) - before) // READ_BLOCK * READ_BLOCK
        if not used:
            output[first:last] = 0
        elif last > first:
            found = _attend(query[first:last], keys[start:], values[start:], scale, before, causal)
            output[first:last], lse[:, first:last] = found
    return (output, lse) if return_lse else output


def alone_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
    """Causal attention of one sequence, as `flash_alone`."""
    return _attend(query, key, value, scale, len(key), True)[0]


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, before: int, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp ``[heads, queries]``. before: keys that a query sees before its own."""
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1).transpose(0, 1) for states in (key, value))
    scores = query.transpose(0, 1) @ key.transpose(1, 2) * scale
    if causal:
        offset = key.shape[1] - query.shape[0]
        hidden = ~torch.ones(scores.shape[1:], dtype=torch.bool).tril(offset).triu(offset - before)
        scores = scores.masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1), scores.logsumexp(-1)
