"""Finds the arguments that a model passes to its attention and to its cache, by running it without memory.

Configurations use different names (GPT-NeoX has no `num_key_value_heads`), and some leave values out. So the model
itself is run: one forward pass on torch's meta device, where tensors have shapes and no contents, over as many tokens
as the model may ever see. It takes about a millisecond a layer, whatever the size of the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from prefixd.worker.recurrent.experts import PROBE_EXPERTS, register_experts, set_experts
from prefixd.worker.recurrent.griffin import is_griffin_block
from prefixd.worker.recurrent.recurrent_modules import record
from prefixd.worker_protocol.errors import ModelError

PROBE_NAME = "prefixd-probe"
_Shapes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One layer's attention and the shape of its cached keys and values.

    layer: its number in transformers' cache.
    kv_heads, head_dim: of the cached keys, and of the cached values. If they are expanded from latents, one head of
        half the size of a token's latents.
    window: tokens that a query sees, itself included; None for all before it.
    softcap: where attention scores are capped. sinks: whether each head has one.
    expanded: whether the cache keeps latents, from which the model makes keys and values anew in every pass.
    """

    layer: int
    query_heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    expanded: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the attention function. Shapes are [heads, tokens, head_dim]."""

    layer: int
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    window: int | None
    softcap: float | None
    sinks: bool


class _ProbeCache(Cache):
    """Records the shapes of the tensors that each layer gives it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, _Shapes] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = (tuple(key_states.shape[1:]), tuple(value_states.shape[1:]))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def register_probe() -> None:
    """Make `PROBE_NAME` known to transformers; may be called again."""
    AttentionInterface.register(PROBE_NAME, _attention)
    AttentionMaskInterface.register(PROBE_NAME, _mask)
    register_experts()


def probe(model: Any, tokens: int) -> list[AttentionLayer]:
    """The attention layers of `model`, built on the meta device with the attention `PROBE_NAME`: runs `tokens` tokens.

    Recurrent layers are passed over: see `recurrent.state_shapes`. A model may have no attention at all.

    Raises ModelError; the text continues the model's name: "has attention biases by position".
    """
    cache, calls = _ProbeCache(), list[_Call]()
    set_experts(model, PROBE_EXPERTS)
    recurrent = [module for module, _ in record(model)]
    if "past_key_values" not in inspect.signature(model.base_model.forward).parameters:
        if recurrent:
            return []
        raise ModelError("takes no cache from outside (past_key_values)")
    with torch.inference_mode(), torch.device("meta"), _passed_over(recurrent):
        # From embeddings: some models look at the ids, to warn of padding, and there are none to look at.
        embeddings = model.get_input_embeddings()(torch.zeros(1, tokens, dtype=torch.long))
        model.base_model(
            inputs_embeds=embeddings,
            position_ids=torch.arange(tokens)[None],
            past_key_values=cache,
            use_cache=True,
            prefixd_step=calls,
        )
    if not calls and not recurrent:
        raise ModelError("does not call an attention function from outside")
    return _layers(calls, cache.shapes, tokens)


def _layers(calls: list[_Call], cached: dict[int, _Shapes], tokens: int) -> list[AttentionLayer]:
    layers = [call.layer for call in calls]
    if len(set(layers)) < len(layers):
        raise ModelError(f"calls attention {len(layers)} times in {len(set(layers))} layers")
    if set(layers) != set(cached):
        raise ModelError(f"attends in the layers {layers}, but caches keys and values in {sorted(cached)}")
    return [_layer(call, *cached[call.layer], tokens) for call in sorted(calls, key=lambda call: call.layer)]


def _layer(call: _Call, key: tuple[int, ...], value: tuple[int, ...], tokens: int) -> AttentionLayer:
    query_heads, _, head_dim = call.query
    kv_heads = call.key[0]
    shapes = f"queries, keys and values of shapes {call.query}, {call.key} and {call.value}"
    if call.key[1:] != (tokens, head_dim) or call.value[:2] != (kv_heads, tokens) or query_heads % kv_heads:
        raise ModelError(f"has {shapes}")
    asked = (call.window, call.softcap, call.sinks)
    if (key, value) == (call.key, call.value):
        if call.key != call.value:
            raise ModelError(f"has {shapes}")
        return AttentionLayer(call.layer, query_heads, kv_heads, head_dim, *asked)
    latents = key[2] + value[2]
    if key[:2] != (1, tokens) or value[:2] != (1, tokens) or latents % 2 or call.window is not None:
        raise ModelError(f"caches {key} and {value}, something else than the keys and values of its attention")
    return AttentionLayer(call.layer, query_heads, 1, latents // 2, *asked, expanded=True)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    prefixd_step: list[_Call] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called in place of attention: records its arguments. Raises ModelError."""
    if prefixd_step is None:
        raise ModelError("does not pass arguments through to its attention")
    if position_bias is not None:
        raise ModelError("has attention biases by position")
    seen = None if attention_mask is None else attention_mask.shape[2]
    if seen != sliding_window:
        raise ModelError("has an attention mask of its own (bidirectional, chunked or sparse attention)")
    layer: Any = module.layer_idx
    shapes = tuple(query.shape[1:]), tuple(key.shape[1:]), tuple(value.shape[1:])
    prefixd_step.append(_Call(layer, *shapes, sliding_window, softcap, s_aux is not None))
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def _mask(*args: Any, mask_function: Any = None, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None for the plain causal mask; for any other, a meta tensor whose third dimension is the window, or 0."""
    if mask_function is causal_mask_function:
        return None
    window = local_size if local_size is not None and _is_window(mask_function, local_size) else 0
    return torch.empty(1, 1, window, 0, device="meta")


def _is_window(mask_function: Any, window: int) -> bool:
    """Whether a mask lets every query see itself and the `window` - 1 tokens before it, and no others."""
    for query in (0, 1, window - 1, window, window + 1, 2 * window, 3 * window + 1):
        for key in {0, 1, query - window, query - window + 1, query - 1, query, query + 1} & set(range(query + 2)):
            at = torch.tensor(query, device="cpu"), torch.tensor(key, device="cpu")
            try:
                seen = bool(mask_function(0, 0, *at))
            except NotImplementedError:  # it depends on tensors that have no contents here
                return False
            if seen != (query - window < key <= query):
                return False
    return True


@contextmanager
def _passed_over(modules: Sequence[Any]) -> Iterator[None]:
    """Make recurrent modules return their inputs."""
    for module in modules:
        griffin = is_griffin_block(module)
        module.forward = lambda hidden_states, *_, _griffin=griffin, **__: (
            (hidden_states, None) if _griffin else hidden_states
        )
    try:
        yield
    finally:
        for module in modules:
            del module.forward
