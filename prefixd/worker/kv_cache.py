"""The KV of one forward pass: transformers' cache interface on virtual tensors.

A pass computes a flattened batch: the new tokens of every request one after the other, then padding. A
`Segment` says which tokens of which request lie there; `StepCache.update` writes their keys and values to
where they belong, and `keys` / `values` are the views that attention reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from prefixd.worker.errors import ModelError


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of one request.

    kv: the request's memory, [max_tokens, layers, 2, kv_heads, head_dim]; mapped up to the end of the block
        of `stop - 1`.
    """

    kv: torch.Tensor
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class StepCache(Cache):
    """Writes one pass's keys and values into its segments' memory.

    segments: at least one; their tokens are the first rows of the batch, in order.
    rows: rows of the batch, padding included; padding is never written.
    tile: attention may read up to the end of the tile of `tile` positions that holds a segment's last token,
        so what lies there unwritten is zeroed: recycled memory can hold a NaN, which a mask does not stop.
    """

    def __init__(self, segments: Sequence[Segment], rows: int, tile: int) -> None:
        super().__init__(layers=[])
        self.segments = tuple(segments)
        self.padded_stops = tuple(-(-segment.stop // tile) * tile for segment in segments)
        lengths = [len(segment) for segment in segments]
        self._splits = [*lengths, rows - sum(lengths)]
        self._targets = _by_layer([s.kv[s.start : s.stop].unbind(1) for s in segments])
        readable = [s.kv[:end] for s, end in zip(segments, self.padded_stops, strict=True)]
        self._keys = _by_layer([kv[:, :, 0].permute(1, 2, 0, 3).unbind(0) for kv in readable])
        self._values = _by_layer([kv[:, :, 1].permute(1, 2, 0, 3).unbind(0) for kv in readable])
        for segment, end in zip(segments, self.padded_stops, strict=True):
            if segment.start <= end - tile:
                segment.kv[segment.stop : end].zero_()

    def keys(self, layer: int) -> list[torch.Tensor]:
        """Each segment's keys, [kv_heads, padded_stop, head_dim]."""
        return self._keys[layer]

    def values(self, layer: int) -> list[torch.Tensor]:
        """Each segment's values, [kv_heads, padded_stop, head_dim]."""
        return self._values[layer]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values, both [1, kv_heads, rows, head_dim]; returns them as they are.

        Raises ModelError if the model's shapes are not those of the geometry.
        """
        _, _, kv_heads, head_dim = self._targets[layer_idx][0].shape
        expected = (1, kv_heads, sum(self._splits), head_dim)
        for states in (key_states, value_states):
            if tuple(states.shape) != expected:
                raise ModelError(
                    f"layer {layer_idx} makes keys or values of shape {tuple(states.shape)}, not {expected} "
                    "as config.json says; prefixd runs models whose layers all have one KV shape"
                )
        pairs = torch.stack((key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)), dim=1)
        torch._foreach_copy_(self._targets[layer_idx], list(pairs.split(self._splits)[: len(self.segments)]))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always passed in, and a flattened batch has no one length."""
        return 0


def _by_layer(views: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [list(layer) for layer in zip(*views, strict=True)]
