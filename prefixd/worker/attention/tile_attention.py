"""Attention on a CPU: every result depends only on the token's position and on the tokens before it, to the last bit.

It does not depend on other requests in the batch nor on how the prompt was cut, so a cached prefix gives the same
logits as computing it. Two measured properties of matrix products on a CPU decide the form of the loop:

- a row's result does not depend on the other rows, as soon as there are eight of them (with ``MKL_CBWR=AUTO,STRICT``,
  which the daemon sets for its worker; without it heads of 192 and more need sixteen);
- it does depend on the number of keys, even where the surplus is masked (the sum over keys is split differently).

So queries are taken in tiles aligned to absolute positions. A tile reads the keys up to its own end, whether it is
computed at once or a token at a time, and a small tile is filled up by repeating its last query. Tokens of an image
that attend both ways have tiles of their own, which read up to the end of the tile that the image ends in. With a
window, a tile's first key is a multiple of the tile, too:

    tile 8, window 11, queries 29 and 30 of the tile [24, 32):

      keys      8        16       24       32
       given up | masked  visible          |
                ^ first_key(24): the oldest key that query 24 sees is 14
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from prefixd.worker.attention.attention import FULL_ATTENTION, AttentionKind
from prefixd.worker.memory.kv_memory import Segment, Spans, StepKv
from prefixd.worker.spec.tiles import first_key, tile_tokens, tiles_before

MIN_ROWS = 8

_KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class TileAttention:
    """The backend; it computes every kind of attention.

    block_tokens: of the KV memory.  expanded: the layers whose keys and values are given (`AttentionKind.expanded`).
    """

    def __init__(self, block_tokens: int, dtype: torch.dtype, expanded: Collection[int] = ()) -> None:
        self._tile = tile_tokens(block_tokens)
        self._dtype = dtype
        self._expanded = frozenset(expanded)
        self._masks: dict[int | None, TileMasks] = {}

    def begin(self, step: StepKv) -> TileStep:
        """Zero the memory behind the last tokens that tiles read. Tiles are cut by the first layer of each kind."""
        for index, segment in enumerate(step.segments):
            end = _round_up(segment.stop, self._tile)
            if segment.start <= end - self._tile:  # the tile begins in this pass; later passes overwrite the zeros
                step.scrub(index, end)
        return TileStep(self, step)

    def refuses(self, kind: AttentionKind) -> str | None:
        """Refuses nothing."""
        del kind
        return None

    def expands(self, layer: int) -> bool:
        """Whether the layer's keys and values are to be given (`AttentionKind.expanded`)."""
        return layer in self._expanded

    def spans(self, segments: Sequence[Segment], window: int | None) -> Spans:
        """The tokens that the tiles of each segment read."""
        tile = self._tile
        return tuple((first_key(part.start, window, tile), _round_up(part.stop, tile)) for part in segments)

    def cut(self, segments: Sequence[Segment], window: int | None, group: int) -> list[_Tile]:
        """Cut every segment at the multiples of the tile. group: query heads that share a KV head."""
        if window not in self._masks:
            self._masks[window] = TileMasks(self._tile, window, self._dtype)
        masks, tile = self._masks[window], self._tile
        tiles = []
        row = 0
        for index, segment in enumerate(segments):
            start = segment.start
            span = first_key(start, window, tile)
            images = iter([*segment.both_ways, (segment.stop, segment.stop)])
            image = next(images)
            while start < segment.stop:
                if start == image[1]:
                    image = next(images)
                end = (start // tile + 1) * tile
                both_ways = image[0] <= start
                stop = min(end, image[1] if both_ways else image[0])
                repeats = max(0, -(-MIN_ROWS // group) - (stop - start))
                positions = [*range(start, stop), *[stop - 1] * repeats]
                first = first_key(start, window, tile)
                if both_ways:
                    end = _round_up(image[1], tile)
                    mask = _both_ways(positions * group, range(first, end), image[1], window, self._dtype)
                else:
                    mask = masks.rows(positions * group, end - first)
                keys = slice(first - span, end - span)
                tiles.append(_Tile(index, row, row + stop - start, repeats, keys, mask))
                row += stop - start
                start = stop
        return tiles


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries [first, last) of the batch, all in one tile of one segment."""

    segment: int
    first: int
    last: int
    repeats: int  # of the last query, to have MIN_ROWS
    keys: slice  # of the tokens in the segment's span
    mask: torch.Tensor  # [group * (last - first + repeats), keys], 0 or -inf


class TileStep:
    """One pass; see `StepAttention`."""

    def __init__(self, backend: TileAttention, step: StepKv) -> None:
        self._backend = backend
        self._step = step
        self._spans: dict[int | None, Spans] = {}  # by window
        self._tiles: dict[tuple[int | None, int], list[_Tile]] = {}  # by window and group

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory."""
        return self._attend(query, self._step.read(layer, self._spans_of(kind.window)), scaling, kind)

    def expands(self, layer: int) -> bool:
        """Whether the layer's keys and values are to be given (`AttentionKind.expanded`)."""
        return self._backend.expands(layer)

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """[1, heads, rows, key_dim] to [1, rows, heads, value_dim], by these keys and values. The rest of a segment's
        last tile is filled up with zeros."""
        given = []
        row = 0
        for segment, (start, end) in zip(self._step.segments, self._spans_of(kind.window), strict=True):
            rows = slice(row + start, row + segment.stop)
            keys, values = (pad(states[0, :, rows], (0, 0, 0, end - segment.stop)) for states in (key, value))
            given.append((keys, values))
            row += segment.stop
        return self._attend(query, given, scaling, kind)

    def _attend(
        self, query: torch.Tensor, read: Sequence[_KeysAndValues], scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """read: every segment's keys and values in its span, ``[kv_heads, tokens, dim]``."""
        heads, rows, key_dim = query.shape[1:]
        kv_heads, _, value_dim = read[0][1].shape
        output = query.new_zeros((rows, heads, value_dim))
        plain = kind.softcap is None and kind.sinks is None and key_dim == value_dim
        if not plain:  # converted once for all tiles; tensors in float32 are not copied
            read = [(keys.float(), values.float()) for keys, values in read]
        for tile in self._tiles_of(kind.window, heads // kv_heads):
            part = query[0, :, tile.first : tile.last]
            if tile.repeats:
                part = torch.cat((part, part[:, -1:].expand(-1, tile.repeats, -1)), dim=1)
            keys, values = (states[:, tile.keys] for states in read[tile.segment])
            if plain:
                result = fused_attention(part, keys, values, tile.mask, scaling)
            else:
                result = _by_definition(part, keys, values, tile.mask, scaling, kind)
            result = result.reshape(heads, -1, value_dim)[:, : tile.last - tile.first]
            output[tile.first : tile.last] = result.transpose(0, 1)
        return output.unsqueeze(0)

    def _spans_of(self, window: int | None) -> Spans:
        if window not in self._spans:
            self._spans[window] = self._backend.spans(self._step.segments, window)
        return self._spans[window]

    def _tiles_of(self, window: int | None, group: int) -> list[_Tile]:
        if (window, group) not in self._tiles:
            self._tiles[window, group] = self._backend.cut(self._step.segments, window, group)
        return self._tiles[window, group]


class TileMasks:
    """Masks of tiles: cut from one that grows with the longest prompt seen, or is as wide as a window needs."""

    def __init__(self, tile: int, window: int | None, dtype: torch.dtype) -> None:
        self._tile = tile
        self._window = window
        self._dtype = dtype
        self._base = self._make(0 if window is None else tiles_before(window, tile) * tile)

    def rows(self, positions: list[int], keys: int) -> torch.Tensor:
        """[len(positions), keys] for positions (in any order, all in the tile that ends at the last of the keys)."""
        if keys > self._base.shape[1]:
            self._base = self._make(2 * keys)
        return self._base[[position % self._tile for position in positions], -keys:]

    def _make(self, width: int) -> torch.Tensor:
        """For a tile that `width` keys lie before."""
        query = torch.arange(width, width + self._tile)[:, None]
        key = torch.arange(width + self._tile)
        hidden = key > query
        if self._window is not None:
            hidden |= key <= query - self._window
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -math.inf)


def _both_ways(
    positions: list[int], keys: range, image_end: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[len(positions), keys]: a query sees all keys to its image's end, and those before it that its window reaches."""
    key = torch.arange(keys.start, keys.stop)
    hidden = (key >= image_end)[None]
    if window is not None:
        hidden = hidden | (key <= torch.tensor(positions)[:, None] - window)
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
    return mask.expand(len(positions), -1)


def fused_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Query heads of one KV head as further queries: [heads, n, dim] to [1, kv_heads, group * n, dim].

    Two and a half times as fast as `enable_gqa=True` on a CPU, and never copies the keys.
    """
    kv_heads, _, head_dim = keys.shape
    grouped = query.reshape(1, kv_heads, -1, head_dim)
    return scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask, scale=scaling)


def _by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    kind: AttentionKind,
) -> torch.Tensor:
    """As `fused_attention`, in float32, for softcaps, sinks and values of another size, which torch's function lacks.

    [heads, n, dim] to [kv_heads, group * n, dim].

    keys and values are in float32.
    """
    kv_heads, _, key_dim = keys.shape
    grouped = query.float().reshape(kv_heads, -1, key_dim)
    scores = torch.matmul(grouped, keys.transpose(1, 2)).mul_(scaling)
    if kind.softcap is not None:
        scores = scores.div_(kind.softcap).tanh_().mul_(kind.softcap)
    scores += mask
    if kind.sinks is not None:
        sinks = kind.sinks.float().repeat_interleave(query.shape[1]).reshape(kv_heads, -1, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    return torch.matmul(weights, values)


def _round_up(tokens: int, tile: int) -> int:
    return -(-tokens // tile) * tile
