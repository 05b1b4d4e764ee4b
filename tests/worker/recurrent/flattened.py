"""Runs passes over several requests with a model that has recurrent layers; attention is the simplest that will do."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from prefixd.worker.recurrent import RecurrentLayers, StateSegment, pieces

ATTENTION = "test-flattened"
ROW_MULTIPLE = 16  # as the worker's passes have it: a row's bits do not depend on the others then
GARBAGE = 0xFF  # NaN in every floating-point type


@dataclass(eq=False)
class Request:
    tokens: Sequence[int]
    state: torch.Tensor
    done: int = 0
    kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    logits: list[torch.Tensor] = field(default_factory=list)


class _KvCache(Cache):
    """Appends each request's keys and values to those it has."""

    def __init__(self, rows: Sequence[tuple[Request, int, int]], cell: int) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self._cell = cell
        self._layer = -1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._layer = layer_idx  # Zamba2's shared attention does not know its layer
        row = 0
        for request, start, stop in self._rows:
            new = [states[0, :, row : row + stop - start] for states in (key_states, value_states)]
            if old := request.kv.get(layer_idx):
                new = [torch.cat(pair, dim=1) for pair in zip(old, new, strict=True)]
            request.kv[layer_idx] = (new[0], new[1])
            row += stop - start
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        *_: Any,
        scaling: float,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """In the same pieces as recurrent layers: so its bits do not depend on the passes either."""
        output = torch.zeros_like(query)
        row = 0
        for request, start, stop in self._rows:
            keys, values = request.kv[self._layer]
            for first, last in pieces(start, stop, self._cell):
                distance = torch.arange(first, last)[:, None] - torch.arange(last)
                mask = (distance >= 0) & (distance < (sliding_window or last))
                rows = slice(row, row + last - first)
                result = scaled_dot_product_attention(
                    query[:, :, rows],
                    keys[None, :, :last],
                    values[None, :, :last],
                    mask,
                    scale=scaling,
                    enable_gqa=True,
                )
                output[:, :, rows] = result
                row += last - first
        return output.transpose(1, 2), None


class Runner:
    """A model, and passes over requests with it."""

    def __init__(self, model: Any, cell: int) -> None:
        self.model = model
        self.cell = cell
        self.layers = RecurrentLayers(model, cell)

    def request(self, tokens: Sequence[int]) -> Request:
        return Request(tokens, torch.full((self.layers.layout.nbytes,), GARBAGE, dtype=torch.uint8))

    @torch.inference_mode()
    def run(self, *parts: tuple[Request, int], keep: Sequence[tuple[int, torch.Tensor]] = ()) -> None:
        """One pass: so many tokens of each request, whose logits are appended to its own; `keep` of the first one."""
        rows = [(request, request.done, request.done + count) for request, count in parts]
        tokens = [token for request, start, stop in rows for token in request.tokens[start:stop]]
        positions = [position for _, start, stop in rows for position in range(start, stop)]
        padding = [0] * (-len(tokens) % ROW_MULTIPLE)
        cache = _KvCache(rows, self.cell)
        AttentionInterface.register(ATTENTION, cache.attend)
        arguments: dict[str, Any] = {"use_cache": False}
        if "position_ids" in inspect.signature(self.model.forward).parameters:  # Mamba has no attention
            arguments = {"position_ids": torch.tensor([[*positions, *padding]]), "past_key_values": cache}
        segments = [StateSegment(start, stop, request.state) for request, start, stop in rows]
        segments[0] = replace(segments[0], keep=keep)
        self.model.set_attn_implementation(ATTENTION)
        with self.layers.running(segments):
            logits = self.model(input_ids=torch.tensor([[*tokens, *padding]]), **arguments).logits[0]
        row = 0
        for request, start, stop in rows:
            request.logits.append(logits[row : row + stop - start])
            request.done = stop
            row += stop - start

    @torch.inference_mode()
    def uncut(self, tokens: Sequence[int]) -> torch.Tensor:
        """What the model computes by itself, over all tokens at once: [tokens, vocabulary]."""
        self.model.set_attn_implementation("eager")
        logits: torch.Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits
