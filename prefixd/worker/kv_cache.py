"""Transformers' cache interface on the memory of one forward pass."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache

from prefixd.worker.errors import ModelError
from prefixd.worker.kv_memory import StepKv


class StepCache(Cache):
    """Writes one pass's keys and values to where they belong.

    step: the pass's memory; its tokens are the first rows of the batch, in order.
    rows: rows of the batch, padding included; padding is never written.
    shape: (kv_heads, head_dim) of every layer.
    """

    def __init__(self, step: StepKv, rows: int, shape: tuple[int, int]) -> None:
        super().__init__(layers=[])
        self._step = step
        self._tokens = sum(len(segment) for segment in step.segments)
        self._expected = (1, shape[0], rows, shape[1])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values, both [1, kv_heads, rows, head_dim]; returns them as they are.

        Raises ModelError if the model's shapes are not those of the geometry.
        """
        for states in (key_states, value_states):
            if tuple(states.shape) != self._expected:
                raise ModelError(
                    f"layer {layer_idx} makes keys or values of shape {tuple(states.shape)}, not {self._expected} "
                    "as config.json says; prefixd runs models whose layers all have one KV shape"
                )
        pairs = torch.stack((key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)), dim=1)
        self._step.write(layer_idx, pairs[: self._tokens])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: positions are always passed in, and a flattened batch has no one length."""
        return 0
