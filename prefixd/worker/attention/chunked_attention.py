"""Attention in chunks (Llama 4): a token attends to the tokens of its own chunk, up to itself.

A chunk is a sequence of its own: its first token attends to itself alone. So a pass is cut at the chunks
(`ChunkableStep.in_chunks`), and any backend computes the parts with full attention. Chunks consist of whole blocks, so
what a backend reads in whole tiles or blocks of keys lies in the chunk, too:

    chunks of 8, a pass of the tokens 5 to 17

    tokens    0 . . . . 5 6 7 | 8 . . . . . . 15 | 16 17
    queries             5 6 7 | 8 . . . . . . 15 | 16 17      three segments, which begin at 0, 8 and 16
    keys      0 . . . . . . 7 | 8 . . . . . . 15 | 16 17
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from prefixd.worker.attention.attention import FULL_ATTENTION, AttentionBackend, AttentionKind, StepAttention
from prefixd.worker.memory.kv_memory import ChunkableStep, StepKv


class ChunkedAttention:
    """The backend for models with chunks in some layers; `backend` computes their parts, and all other layers."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def begin(self, step: StepKv) -> ChunkedStepAttention:
        """Prepare a pass. It is cut by the first layer of each size of chunks."""
        return ChunkedStepAttention(self._backend, step)

    def refuses(self, kind: AttentionKind) -> str | None:
        """What the backend refuses, and images that attend both ways: they may lie in two chunks."""
        if kind.chunk is not None and (kind.both_ways or kind.window is not None):
            return "chunks go neither with windows nor with images that attend both ways"
        return self._backend.refuses(replace(kind, chunk=None))


class ChunkedStepAttention:
    """One pass; see `StepAttention`."""

    def __init__(self, backend: AttentionBackend, step: StepKv) -> None:
        self._backend = backend
        self._step = step
        self._whole = backend.begin(step)
        self._cut: dict[int, StepAttention] = {}  # by the tokens of a chunk

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory."""
        if kind.chunk is None:
            return self._whole.attend(query, layer, scaling, kind)
        if kind.chunk not in self._cut:
            step = cast(ChunkableStep, self._step)
            self._cut[kind.chunk] = self._backend.begin(step.in_chunks(kind.chunk))
        return self._cut[kind.chunk].attend(query, layer, scaling, replace(kind, chunk=None))

    def expands(self, layer: int) -> bool:
        """Whether the layer's keys and values are to be given (`AttentionKind.expanded`)."""
        return self._whole.expands(layer)

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """[1, heads, rows, key_dim] to [1, rows, heads, value_dim], by these keys and values. No model has latents of
        chunks (`probe`)."""
        return self._whole.attend_given(query, key, value, scaling, kind)
