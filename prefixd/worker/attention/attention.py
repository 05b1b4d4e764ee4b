"""Attention of a flattened batch over KV memory, registered with transformers as "prefixd".

Three ways to compute it, all behind `AttentionBackend`: tiles on a CPU (`tile_attention`), one kernel a layer for the
whole batch on a GPU (`flash_attention`), and FlexAttention where that kernel does not take the type or the shape
(`flex_attention`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from prefixd.worker.memory.grouped_kv import GroupedStep
from prefixd.worker.memory.kv_memory import StepKv
from prefixd.worker_protocol.errors import ModelError

ATTENTION_NAME = "prefixd"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionKind:
    """The kind of a layer's causal attention.

    window: tokens that a query sees, itself included (128 in GPT-OSS); None for all before it.
    softcap: a score s becomes softcap * tanh(s / softcap) (50.0 in Gemma 2); None leaves it.
    sinks: [query heads]; a score for each head that takes part in the softmax, without a value (GPT-OSS).
    expanded: the cache keeps latents, from which the model makes keys and values anew in every pass (DeepSeek). The
        attention function then gets keys and values as arguments, and does not read them from memory.
    chunk: tokens of the chunks that a query sees its own one of, up to itself (8,192 in Llama 4); None for all before.
    both_ways: the tokens of an image attend to each other in both directions. Set only to check a backend when a model
        is loaded; in a pass the segments have it (`Segment.both_ways`).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    expanded: bool = False
    both_ways: bool = False
    chunk: int | None = None

    def __str__(self) -> str:
        """For messages: "a window of 16 tokens, attention sinks"."""
        parts = [
            f"a window of {self.window} tokens" if self.window is not None else "",
            f"scores capped at {self.softcap}" if self.softcap is not None else "",
            "attention sinks" if self.sinks is not None else "",
            "keys and values expanded from latents" if self.expanded else "",
            f"chunks of {self.chunk} tokens" if self.chunk is not None else "",
            "images that attend both ways" if self.both_ways else "",
        ]
        return ", ".join(filter(None, parts)) or "full attention"


FULL_ATTENTION = AttentionKind()


class StepAttention(Protocol):
    """Causal attention for one forward pass."""

    def attend(
        self, query: torch.Tensor, layer: int, scaling: float, kind: AttentionKind = FULL_ATTENTION
    ) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory.

        Called once a layer, after the layer's keys and values were written. Padding rows come out as zeros.
        """
        ...

    def expands(self, layer: int) -> bool:
        """Whether `attend_given` is called for the layer (`AttentionKind.expanded`)."""
        ...

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """[1, heads, rows, key_dim] to [1, rows, heads, value_dim], by these keys and values.

        key: [1, kv_heads, tokens, key_dim], value: [1, kv_heads, tokens, value_dim]: for every segment the tokens from
            the sequence's first to the segment's last, one segment after the other. Further rows are padding and are
            not read: a model expands multiples of 16 rows, so that their bits do not depend on the batch.
        """
        ...


class FromMemory:
    """The part of `StepAttention` that is alike where a backend reads keys and values from memory alone."""

    def expands(self, layer: int) -> bool:
        """Never."""
        del layer
        return False

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """Refused when the model is loaded."""
        raise ModelError(f"{type(self).__name__} reads keys and values from memory alone")


class AttentionBackend(Protocol):
    """A way to compute attention."""

    def begin(self, step: StepKv) -> StepAttention:
        """Prepare a pass: what every layer needs is made once."""
        ...

    def refuses(self, kind: AttentionKind) -> str | None:
        """Why it cannot compute this kind, such as "no softcap"; None if it can. `sinks` may be a meta tensor."""
        ...


class CrossAttention(Protocol):
    """Attention of one forward pass to images (`cross_attention.CrossStep`)."""

    def has(self, layer: int) -> bool:
        """Whether a layer attends to images."""
        ...

    def attend(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim]; zeros in rows without images."""
        ...


def prefixd_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    prefixd_step: StepAttention | None = None,
    prefixd_cross: CrossAttention | None = None,
    prefixd_chunks: Mapping[int, int] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls in each layer (`AttentionInterface`).

    Keys and values are read from the pass's memory. The arguments `key` and `value` are used only in layers that expand
    latents. Models say which window a layer has, but not which chunks: `prefixd_chunks` has their tokens, by layer.
    Raises ModelError for biases by position, which no backend adds.
    """
    if prefixd_step is None:
        raise ModelError(
            f"{type(module).__name__} does not pass arguments through to its attention; it cannot run here"
        )
    if kwargs.get("position_bias") is not None:
        raise ModelError(
            f"{type(module).__name__} adds biases by position to its attention scores (position_bias); prefixd runs "
            "models without them"
        )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    layer: int = module.layer_idx  # type: ignore[assignment]
    if prefixd_cross is not None and prefixd_cross.has(layer):
        return prefixd_cross.attend(query, layer, scaling), None
    expanded = prefixd_step.expands(layer)
    chunk = None if prefixd_chunks is None else prefixd_chunks.get(layer)
    kind = AttentionKind(sliding_window, softcap, s_aux, expanded, chunk=chunk)
    if expanded:
        return prefixd_step.attend_given(query, key, value, scaling, kind), None
    return prefixd_step.attend(query, layer, scaling, kind), None


def refusal(backend: AttentionBackend, kinds: Iterable[AttentionKind]) -> str | None:
    """Why the backend cannot run a model with layers of these kinds, as a sentence; None if it can."""
    for kind in kinds:
        if reason := backend.refuses(kind):
            return f"the model has layers with {kind}, which {type(backend).__name__} cannot compute: {reason}"
    return None


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers; may be called again."""
    AttentionInterface.register(ATTENTION_NAME, prefixd_attention)


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
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim], by the keys and values in the pass's memory."""
        group, index = self._places[layer]
        return self._steps[group].attend(query, index, scaling, kind)

    def expands(self, layer: int) -> bool:
        """Whether the layer's keys and values are to be given (`AttentionKind.expanded`)."""
        group, index = self._places[layer]
        return self._steps[group].expands(index)

    def attend_given(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, kind: AttentionKind
    ) -> torch.Tensor:
        """[1, heads, rows, key_dim] to [1, rows, heads, value_dim], by these keys and values. It needs no memory, hence
        no group."""
        return self._steps[0].attend_given(query, key, value, scaling, kind)
