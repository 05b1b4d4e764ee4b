"""Attention of a flattened batch over virtual tensors, registered with transformers as "prefixd".

On a CPU every result is a function of the token's position and of what lies before it, to the last bit,
whatever else is in the batch and however the prompt was cut: so a cached prefix gives the logits that
computing it would have given. Two properties of matrix products there, both measured, decide the form of the
loop:

- a row's result does not depend on the other rows, as soon as there are eight of them;
- it does depend on the number of keys, even where the surplus is masked (the sum over keys is split
  differently).

So queries are taken in tiles aligned to absolute positions, a tile reads the keys up to its own end, whether
it is computed at once or a token at a time, and a small tile is filled up by repeating its last query.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from prefixd.worker.errors import ModelError
from prefixd.worker.kv_cache import Segment, StepCache

ATTENTION_NAME = "prefixd"
MIN_ROWS = 8
MAX_TILE = 16

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


def _find_varlen() -> Callable[..., Any] | None:
    """Torch's variable-length attention, where it is new enough to take grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    wanted = {"scale", "window_size", "enable_gqa"}
    return varlen_attn if wanted <= set(inspect.signature(varlen_attn).parameters) else None


_VARLEN = _find_varlen()


def tile_tokens(block_tokens: int) -> int:
    """Positions in a tile: at most 16, and a divisor of the block: a tile's end is mapped with its start."""
    return math.gcd(block_tokens, MAX_TILE)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Queries [first, last) of the batch, all in one tile of one segment."""

    segment: int
    first: int
    last: int
    repeats: int  # of the last query, to have MIN_ROWS
    keys: int
    mask: torch.Tensor  # [group * (last - first + repeats), keys], 0 or -inf


class TileMasks:
    """Causal masks of tiles, cut from one that grows with the longest prompt seen."""

    def __init__(self, tile: int, dtype: torch.dtype, device: torch.device) -> None:
        self._tile = tile
        self._dtype, self._device = dtype, device
        self._base = self._make(0)

    def rows(self, positions: list[int], keys: int) -> torch.Tensor:
        """[len(positions), keys] for positions (in any order, all in the tile that ends at `keys`)."""
        if keys > self._base.shape[1]:
            self._base = self._make(2 * keys)
        return self._base[[position % self._tile for position in positions], -keys:]

    def _make(self, width: int) -> torch.Tensor:
        last = torch.full((self._tile, self._tile), -math.inf, dtype=self._dtype, device=self._device).triu(1)
        return torch.cat([torch.zeros(self._tile, width, dtype=self._dtype, device=self._device), last], dim=1)


class StepAttention:
    """Causal attention for one forward pass; `attend` is called once a layer.

    cache: the pass's cache, already updated for the layer when `attend` is called.
    group: query heads that share a KV head.
    """

    def __init__(self, cache: StepCache, masks: TileMasks, tile: int, group: int) -> None:
        self._cache = cache
        kv = cache.segments[0].kv
        self._tiles = _cut(cache, masks, tile, group) if _in_tiles(kv) else []
        self._varlen = None if self._tiles else _varlen_for(kv)
        self._bounds: list[torch.Tensor | None] = []
        if not self._tiles:  # made once a pass: every layer needs the same
            make = _causal_mask if self._varlen is None else _lengths
            self._bounds = [make(segment, group) if len(segment) > 1 else None for segment in cache.segments]

    def attend(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim]; padding rows come out as zeros."""
        output = query.new_zeros((query.shape[2], query.shape[1], query.shape[3]))
        if self._tiles:
            self._attend_tiles(query[0], output, layer, scaling)
        else:
            self._attend_segments(query[0], output, layer, scaling)
        return output.unsqueeze(0)

    def _attend_tiles(self, query: torch.Tensor, output: torch.Tensor, layer: int, scaling: float) -> None:
        heads, _, head_dim = query.shape
        keys, values = self._cache.keys(layer), self._cache.values(layer)
        for tile in self._tiles:
            part = query[:, tile.first : tile.last]
            if tile.repeats:
                part = torch.cat((part, part[:, -1:].expand(-1, tile.repeats, -1)), dim=1)
            result = _grouped(
                part,
                keys[tile.segment][:, : tile.keys],
                values[tile.segment][:, : tile.keys],
                tile.mask,
                scaling,
            )
            result = result.reshape(heads, -1, head_dim)[:, : tile.last - tile.first]
            output[tile.first : tile.last] = result.transpose(0, 1)

    def _attend_segments(self, query: torch.Tensor, output: torch.Tensor, layer: int, scaling: float) -> None:
        """Whole segments one after the other, on a GPU: one kernel a request, decoding ones too.

        Requests lie in ranges of their own, and no kernel takes keys from several ranges at once.
        Unverified: written without a GPU to run it on.
        """
        first = 0
        for segment, keys, values, bounds in zip(
            self._cache.segments, self._cache.keys(layer), self._cache.values(layer), self._bounds, strict=True
        ):
            last = first + len(segment)
            part, keys, values = query[:, first:last], keys[:, : segment.stop], values[:, : segment.stop]
            if bounds is not None and self._varlen is not None:
                output[first:last] = _without_mask(self._varlen, part, keys, values, bounds, scaling)
            else:
                result = _grouped(part, keys, values, bounds, scaling)
                output[first:last] = result.reshape(part.shape).transpose(0, 1)
            first = last


def prefixd_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    prefixd_step: StepAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer (`AttentionInterface`).

    Keys and values are read from the step's cache; `key` and `value`, the new ones alone, are not used.
    Raises ModelError if the model asks for attention other than full causal attention.
    """
    if prefixd_step is None:
        raise ModelError(
            f"{type(module).__name__} does not pass arguments through to its attention; it cannot run here"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} asks for {name}={kwargs[name]!r}; prefixd runs models with plain "
                "full attention in every layer"
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    return prefixd_step.attend(query, layer, scaling), None


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, prefixd_attention)


def _cut(cache: StepCache, masks: TileMasks, tile: int, group: int) -> list[_Tile]:
    """Cut every segment at the multiples of `tile`."""
    tiles = []
    row = 0
    for index, segment in enumerate(cache.segments):
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
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Query heads of one KV head as further queries: [heads, n, dim] to [1, kv_heads, group * n, dim].

    Two and a half times as fast as `enable_gqa=True` on a CPU, and never copies the keys.
    """
    kv_heads, _, head_dim = keys.shape
    grouped = query.reshape(1, kv_heads, -1, head_dim)
    return scaled_dot_product_attention(grouped, keys[None], values[None], attn_mask=mask, scale=scaling)


def _in_tiles(kv: torch.Tensor) -> bool:
    """A GPU's kernels promise no bits to be equal, so only a CPU pays for tiles."""
    return kv.device.type == "cpu"


def _causal_mask(segment: Segment, group: int) -> torch.Tensor:
    """[group * len(segment), segment.stop], true where a query may look."""
    device = segment.kv.device
    positions = torch.arange(segment.start, segment.stop, device=device)
    mask = torch.arange(segment.stop, device=device)[None, :] <= positions[:, None]
    return mask.repeat(group, 1)


def _lengths(segment: Segment, group: int) -> torch.Tensor:
    """[2, 2]: where the one sequence of queries, and that of keys, begins and ends. A kernel knows the group itself."""
    ends = [[0, len(segment)], [0, segment.stop]]
    return torch.tensor(ends, dtype=torch.int32, device=segment.kv.device)


def _varlen_for(kv: torch.Tensor) -> Callable[..., Any] | None:
    """Flash attention takes 16-bit types and heads of up to 256 in eights, on GPUs from Ampere on.

    Unverified: never run on a GPU.
    """
    head_dim = kv.shape[-1]
    if not kv.is_cuda or kv.dtype not in (torch.float16, torch.bfloat16) or head_dim % 8 or head_dim > 256:
        return None
    return _VARLEN if torch.cuda.get_device_capability(kv.device) >= (8, 0) else None


def _without_mask(
    varlen: Callable[..., Any],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """One segment's causal attention, [n, heads, dim]; the last query looks at all keys. Unverified, see above."""
    result: torch.Tensor = varlen(
        query.transpose(0, 1).contiguous(),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        lengths[0],
        lengths[1],
        query.shape[1],
        keys.shape[1],
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=True,
    )
    return result
