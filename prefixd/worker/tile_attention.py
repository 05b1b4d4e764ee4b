"""Attention on a CPU: every result is a function of the token's position and of what lies before it, to the last bit.

It does not depend on what else is in the batch nor on how the prompt was cut: so a cached prefix gives the logits that
computing it would have given. Two properties of matrix products on a CPU, both measured, decide the form of the loop:

- a row's result does not depend on the other rows, as soon as there are eight of them;
- it does depend on the number of keys, even where the surplus is masked (the sum over keys is split differently).

So queries are taken in tiles aligned to absolute positions, a tile reads the keys up to its own end, whether it is
computed at once or a token at a time, and a small tile is filled up by repeating its last query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from prefixd.worker.kv_memory import Segment, StepKv

MIN_ROWS = 8
MAX_TILE = 16


def tile_tokens(block_tokens: int) -> int:
    """Positions in a tile: at most 16, and a divisor of the block: a tile's end has memory with its start."""
    return math.gcd(block_tokens, MAX_TILE)


class TileAttention:
    """The backend.

    block_tokens: of the KV memory.  group: query heads that share a KV head.
    """

    def __init__(self, block_tokens: int, group: int, dtype: torch.dtype) -> None:
        self._tile = tile_tokens(block_tokens)
        self._group = group
        self._masks = TileMasks(self._tile, dtype)

    def begin(self, step: StepKv) -> TileStep:
        """Cut the pass's segments into tiles, and zero what is read behind the last tokens."""
        ends = [-(-segment.stop // self._tile) * self._tile for segment in step.segments]
        for index, (segment, end) in enumerate(zip(step.segments, ends, strict=True)):
            if segment.start <= end - self._tile:  # the tile begins in this pass: later ones write over the zeros
                step.scrub(index, end)
        return TileStep(step, ends, _cut(step.segments, self._masks, self._tile, self._group))


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries [first, last) of the batch, all in one tile of one segment."""

    segment: int
    first: int
    last: int
    repeats: int  # of the last query, to have MIN_ROWS
    keys: int
    mask: torch.Tensor  # [group * (last - first + repeats), keys], 0 or -inf


class TileStep:
    """One pass; see `StepAttention`."""

    def __init__(self, step: StepKv, ends: Sequence[int], tiles: Sequence[_Tile]) -> None:
        self._step = step
        self._ends = ends
        self._tiles = tiles

    def attend(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """See `StepAttention.attend`."""
        heads, rows, head_dim = query.shape[1:]
        output = query.new_zeros((rows, heads, head_dim))
        read = self._step.read(layer, self._ends)
        for tile in self._tiles:
            part = query[0, :, tile.first : tile.last]
            if tile.repeats:
                part = torch.cat((part, part[:, -1:].expand(-1, tile.repeats, -1)), dim=1)
            keys, values = read[tile.segment]
            result = _grouped(part, keys[:, : tile.keys], values[:, : tile.keys], tile.mask, scaling)
            result = result.reshape(heads, -1, head_dim)[:, : tile.last - tile.first]
            output[tile.first : tile.last] = result.transpose(0, 1)
        return output.unsqueeze(0)


class TileMasks:
    """Causal masks of tiles, cut from one that grows with the longest prompt seen."""

    def __init__(self, tile: int, dtype: torch.dtype) -> None:
        self._tile = tile
        self._dtype = dtype
        self._base = self._make(0)

    def rows(self, positions: list[int], keys: int) -> torch.Tensor:
        """[len(positions), keys] for positions (in any order, all in the tile that ends at `keys`)."""
        if keys > self._base.shape[1]:
            self._base = self._make(2 * keys)
        return self._base[[position % self._tile for position in positions], -keys:]

    def _make(self, width: int) -> torch.Tensor:
        last = torch.full((self._tile, self._tile), -math.inf, dtype=self._dtype).triu(1)
        return torch.cat([torch.zeros(self._tile, width, dtype=self._dtype), last], dim=1)


def _cut(segments: Sequence[Segment], masks: TileMasks, tile: int, group: int) -> list[_Tile]:
    """Cut every segment at the multiples of `tile`."""
    tiles = []
    row = 0
    for index, segment in enumerate(segments):
        start = segment.start
        while start < segment.stop:
            end = (start // tile + 1) * tile
            stop = min(end, segment.stop)
            repeats = max(0, -(-MIN_ROWS // group) - (stop - start))
            positions = [*range(start, stop), *[stop - 1] * repeats]
            mask = masks.rows(positions * group, end)
            tiles.append(_Tile(index, row, row + stop - start, repeats, end, mask))
            row += stop - start
            start = stop
    return tiles


def _grouped(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Query heads of one KV head as further queries: [heads, n, dim] to [1, kv_heads, group * n, dim].

    Two and a half times as fast as `enable_gqa=True` on a CPU, and never copies the keys.
    """
    kv_heads, _, head_dim = keys.shape
    grouped = query.reshape(1, kv_heads, -1, head_dim)
    return scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask, scale=scaling)
