"""Finds the recurrent modules of a model and the shapes of their states, by running it over two tokens.

A module is recurrent if it calls the cache's methods for recurrent states, whatever the configuration says. The model
may be on the meta device, where tensors have shapes and no contents.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, Cache

from prefixd.worker.recurrent.experts import PROBE_EXPERTS, register_experts, set_experts
from prefixd.worker.recurrent.griffin import griffin_block, is_griffin_block
from prefixd.worker.recurrent.state_layout import StateShape
from prefixd.worker_protocol.errors import ModelError

_ATTENTION = "prefixd-states"
_TOKENS = 2


def state_shapes(model: Any) -> list[StateShape]:
    """The states of a model's recurrent layers, in the order in which it calls them; none if it has no such layer.

    Raises ModelError.
    """
    return [shape for _, shape in record(model)]


def record(model: Any) -> list[tuple[Any, StateShape]]:
    """A model's recurrent modules and their states, in the order in which it calls them. Raises ModelError."""
    recorder = _Recorder()
    device = next(model.parameters()).device
    if device.type == "meta":  # nothing can be routed there
        register_experts()
        set_experts(model, PROBE_EXPERTS)
    AttentionInterface.register(_ATTENTION, _no_attention)
    base = model.base_model
    cache_argument = "cache_params" if "cache_params" in inspect.signature(base.forward).parameters else None
    arguments = {cache_argument or "past_key_values": recorder, "use_cache": True}
    with torch.inference_mode(), _attention(model), _watched(base, recorder), _griffin_blocks(base):
        # From embeddings: some models look at the ids, and on the meta device there are none to look at.
        embeddings = model.get_input_embeddings()(torch.zeros(1, _TOKENS, dtype=torch.long, device=device))
        if "position_ids" in inspect.signature(base.forward).parameters:
            arguments["position_ids"] = torch.arange(_TOKENS, device=device)[None]
        base(inputs_embeds=embeddings, **arguments)
    return [(module, recorder.shape(module)) for module in recorder.modules]


class _Recorder(Cache):
    """A cache that records the states that modules give it, and the module that is running. It returns none."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.running: list[Any] = []
        self._conv: dict[Any, torch.Tensor] = {}
        self._recurrent: dict[Any, torch.Tensor] = {}
        self._kernel: dict[Any, int] = {}

    @property
    def modules(self) -> list[Any]:
        return list(self._conv)

    def shape(self, module: Any) -> StateShape:
        conv = self._conv[module]
        shape = (conv.shape[1], self._kernel[module])
        recurrent = self._recurrent.get(module)
        if recurrent is None:
            return StateShape(shape, conv.dtype)
        return StateShape(shape, conv.dtype, tuple(recurrent.shape[1:]), recurrent.dtype)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        self._note(self._conv, conv_states, state_idx)
        if conv_kernel_size is None:
            raise ModelError(f"has a recurrent layer, {self._name}, that does not say how many inputs it keeps")
        self._kernel[self.running[-1]] = conv_kernel_size
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        self._note(self._recurrent, recurrent_states, state_idx)
        if self.running[-1] not in self._conv:
            raise ModelError(f"has a recurrent layer, {self._name}, without a convolution")
        return recurrent_states

    @property
    def _name(self) -> str:
        return type(self.running[-1]).__name__

    def _note(self, noted: dict[Any, torch.Tensor], states: torch.Tensor, state_idx: int) -> None:
        if self.running[-1] in noted or state_idx:
            raise ModelError(f"has a recurrent layer, {self._name}, that keeps more than one state of a kind")
        noted[self.running[-1]] = states


@contextmanager
def _watched(model: Any, recorder: _Recorder) -> Iterator[None]:
    """Keep `recorder.running` the stack of the modules whose forward is running."""
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(lambda module, _: recorder.running.append(module)))
        handles.append(module.register_forward_hook(lambda *_: recorder.running.pop() and None))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _attention(model: Any) -> Iterator[None]:
    """Replaces attention by zeros: its arguments differ between models, and recurrent states do not need it."""
    before = model.config._attn_implementation
    model.set_attn_implementation(_ATTENTION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def _griffin_blocks(model: Any) -> Iterator[None]:
    """Let RecurrentGemma's blocks use the cache."""
    blocks = [module for module in model.modules() if is_griffin_block(module)]
    for block in blocks:
        block.forward = lambda hidden, *, past_key_values, position_ids, _block=block, **_: (
            griffin_block(_block, hidden, past_key_values, position_ids),
            None,
        )
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _no_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """Zeros, ``[1, tokens, heads, value_dim]``."""
    return query.new_zeros((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None
