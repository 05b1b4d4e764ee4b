"""Attention of a flattened batch over KV memory, registered with transformers as "prefixd".

Three ways to compute it, all behind `AttentionBackend`: tiles on a CPU (`tile_attention`), one kernel a layer for the
whole batch on a GPU (`flash_attention`), and FlexAttention where that kernel does not take the type or the shape
(`flex_attention`).
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from prefixd.worker.errors import ModelError
from prefixd.worker.kv_memory import StepKv

ATTENTION_NAME = "prefixd"

_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")


class StepAttention(Protocol):
    """Causal attention for one forward pass."""

    def attend(self, query: torch.Tensor, layer: int, scaling: float) -> torch.Tensor:
        """[1, heads, rows, head_dim] to [1, rows, heads, head_dim].

        Called once a layer, after the layer's keys and values were written. Padding rows come out as zeros.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention."""

    def begin(self, step: StepKv) -> StepAttention:
        """Prepare a pass: what every layer needs is made once."""
        ...


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

    Keys and values are read from the pass's memory; `key` and `value`, the new ones alone, are not used.
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
