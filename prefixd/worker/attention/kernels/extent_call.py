"""What a kernel over blocks or extents of keys is called with: the same for all layers of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Where keys are: token t of sequence i lies in page ``table[i, t // block_tokens]``; int32."""

    table: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Where keys are: sequence i has the runs [first[i], first[i + 1]), in the order of its tokens; int32.

    Run r has the tokens [token[r], stop[r]), of which the first is the first of page `page[r]`; the others follow it at
    the distance of two tokens. A virtual tensor is one run. Every run but a sequence's last ends at a multiple of the
    block.
    """

    first: torch.Tensor
    token: torch.Tensor
    stop: torch.Tensor
    page: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Queries that a thread block computes: tile i has `count[i]` rows of the batch from `row[i]` on, all of sequence
    `sequence[i]`; int32.

    block: rows of a tile's matrix, for all query heads of a KV head: at least ``count * group``; a power of two.
    """

    sequence: torch.Tensor
    row: torch.Tensor
    count: torch.Tensor
    block: int


@dataclass(frozen=True, slots=True, eq=False)
class ExtentCall:
    """A pass.

    places: where the keys are.
    tiles: of its queries.
    positions: of each row in its sequence, lasts: the last key that it sees, ``[rows]`` in int32.
    block_tokens: tokens of a block, which lie together.
    span: most keys that a tile reads, without a window.
    """

    places: Blocks | Runs
    tiles: Tiles
    positions: torch.Tensor
    lasts: torch.Tensor
    block_tokens: int
    span: int


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What becomes of the scores; see `AttentionKind`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


ExtentKernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, ExtentCall, Scores, torch.Tensor], None]
"""``kernel(query, keys, values, call, scores, output)``: query and output ``[rows, heads, head_dim]``; keys and values
``[tokens, kv_heads, head_dim]``, in which a page is a token, or ``[pages, block_tokens, kv_heads, head_dim]``. Rows in
no tile are left as they are."""
