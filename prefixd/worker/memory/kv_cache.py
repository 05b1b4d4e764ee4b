"""Transformers' cache interface on the memory of one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import Cache

from prefixd.worker.memory.kv_memory import StepKv
from prefixd.worker.spec.probe import AttentionLayer
from prefixd.worker_protocol.errors import ModelError

_ROW_MULTIPLE = 16


class StepCache(Cache):
    """Writes one pass's keys and values into the pass's memory.

    Recurrent layers do not come here: see `recurrent.RecurrentLayers`.

    step: the pass's memory; its tokens are the first rows of the batch, in order.
    positions: of the batch's rows, ``[..., rows]``, padding included; padding is never written.
    layers: the attention layers, by number.
    before_layer: called before a layer's keys and values are written or read; None: they are all in memory.
    """

    def __init__(
        self,
        step: StepKv,
        positions: torch.Tensor,
        layers: Mapping[int, AttentionLayer],
        before_layer: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(layers=[])
        self._step = step
        self._tokens = sum(len(segment) for segment in step.segments)
        self._positions = positions
        self._rows = positions.shape[-1]
        self._layers = layers
        self._before_layer = before_layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values, both [1, kv_heads, rows, head_dim]; returns them as they are.

        For a layer that expands latents, these are latents, [1, 1, rows, sizes]. It gets back those of all tokens, from
        each sequence's first to its last, one segment after the other, and makes keys and values from them.

        Raises ModelError if the model's shapes are not those that it had when it was probed.
        """
        if layer_idx not in self._layers:  # cross-attention, whose images are in no cache
            return key_states, value_states
        if self._before_layer is not None:
            self._before_layer(layer_idx)
        layer = self._layers[layer_idx]
        if layer.expanded:
            return self._latents(key_states, value_states, layer)
        expected = (1, layer.kv_heads, self._rows, layer.head_dim)
        for states in (key_states, value_states):
            if tuple(states.shape) != expected:
                raise ModelError(
                    f"layer {layer_idx} makes keys or values of shape {tuple(states.shape)}, not {expected} as in its "
                    "first pass; prefixd runs models whose layers keep one shape"
                )
        pairs = torch.stack((key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)), dim=1)
        self._step.write(layer_idx, pairs[: self._tokens])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = None) -> int | torch.Tensor:  # type: ignore[override]
        """Zero for the model: positions are always passed in, and a flattened batch has no one length.

        A layer that asks adds it to the numbers of its rows, to have their positions (`Llama4TextAttention`, which
        scales queries by them). So it gets the difference of each row, ``[rows]``.
        """
        if layer_idx is None:
            return 0
        rows = torch.arange(self._rows, device=self._positions.device)
        return self._positions.view(-1, self._rows)[0] - rows

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """False: only a mask for padding depends on it, and there is none."""
        return False

    def _latents(
        self, first: torch.Tensor, second: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = first.shape[-1]
        rows = torch.cat((first[0, 0], second[0, 0]), dim=-1)
        self._step.write(layer.layer, rows[: self._tokens].view(self._tokens, 2, 1, layer.head_dim))
        spans = tuple((0, segment.stop) for segment in self._step.segments)
        read = self._step.read(layer.layer, spans)
        kept = torch.cat([torch.cat((keys[0], values[0]), dim=-1) for keys, values in read])
        lacking = -len(kept) % _ROW_MULTIPLE  # with enough rows, a row's bits do not depend on the others
        kept = torch.nn.functional.pad(kept, (0, 0, 0, lacking))
        return kept[None, None, :, :size], kept[None, None, :, size:]
