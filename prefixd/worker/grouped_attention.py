"""Attention of a model with several groups of layers by a backend that knows one: a pass of it for each group."""

from __future__ import annotations

import torch

from prefixd.worker.attention import FULL_ATTENTION, AttentionBackend, AttentionKind, StepAttention
from prefixd.worker.grouped_kv import GroupedStep
from prefixd.worker.kv_memory import StepKv


class GroupedAttention:
    """The backend; `backend` computes attention on the memory of each group."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend

    def begin(self, step: StepKv) -> GroupedStepAttention:
        """Prepare a pass in each group."""
        assert isinstance(step, GroupedStep)
        return GroupedStepAttention([self.backend.begin(part) for part in step.steps], step.places)

    def refuses(self, kind: AttentionKind) -> str | None:
        """What the backend refuses."""
        return self.backend.refuses(kind)


class GroupedStepAttention:
    """One pass; see `StepAttention`. `places`: which group a layer is in, and where."""

    def __init__(self, steps: list[StepAttention], places: dict[int, tuple[int, int]]) -> None:
        self._steps = steps
        self._places = places

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """See `StepAttention.attend`."""
        group, index = self._places[layer]
        return self._steps[group].attend(query, index, scaling, kind)

    def expands(self, layer: int) -> bool:
        """See `StepAttention.expands`."""
        group, index = self._places[layer]
        return self._steps[group].expands(index)

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """See `StepAttention.attend_given`; it needs no memory, hence no group."""
        return self._steps[0].attend_given(query, key, value, scaling, kind)
