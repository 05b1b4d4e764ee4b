"""What a model asks of its attention and of its cache, found by running it without memory.

Configurations name the same thing differently (GPT-NeoX has no `num_key_value_heads`), and some leave it out. So
the model itself is asked: one forward pass on torch's meta device, where tensors have shapes and no contents, over
as many tokens as the model may ever see. It takes about a millisecond a layer, whatever the size of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from prefixd.worker.errors import ModelError
from prefixd.worker.experts import PROBE_EXPERTS, register_experts, set_experts

PROBE_NAME = "prefixd-probe"
_Shapes = tuple[tuple[int, ...], tuple[int, ...]]
_EXTRAS = {
    "sliding_window": "a sliding window of {} tokens",
    "softcap": "attention scores capped at {} (softcap)",
    "s_aux": "attention sinks",
    "position_bias": "attention biases by position",
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention that every layer of a model has: full and causal, with one KV shape."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the attention function. Shapes are [heads, tokens, head_dim]."""

    layer: int
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]


class _ProbeCache(Cache):
    """Keeps the shapes of what each layer would have it keep."""

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


def probe(model: Any, tokens: int) -> AttentionShape:
    """Run `model`, built on the meta device with the attention `PROBE_NAME`, over `tokens` tokens.

    Raises ModelError; the text continues the model's name: "has attention sinks".
    """
    cache, calls = _ProbeCache(), list[_Call]()
    set_experts(model, PROBE_EXPERTS)
    with torch.inference_mode(), torch.device("meta"):
        # From embeddings: some models look at the ids, to warn of padding, and there are none to look at.
        embeddings = model.get_input_embeddings()(torch.zeros(1, tokens, dtype=torch.long))
        model.base_model(
            inputs_embeds=embeddings,
            position_ids=torch.arange(tokens)[None],
            past_key_values=cache,
            use_cache=True,
            prefixd_step=calls,
        )
    return _shape(calls, cache.shapes, tokens)


def _shape(calls: list[_Call], cached: dict[int, _Shapes], tokens: int) -> AttentionShape:
    layers = [call.layer for call in calls]
    if not calls:
        raise ModelError("does not call an attention function from outside")
    if len(set(layers)) < len(layers):
        raise ModelError(f"calls attention {len(layers)} times in {len(set(layers))} layers")
    if set(layers) != set(cached) or set(cached) != set(range(len(cached))):
        raise ModelError(f"attends in the layers {layers}, but caches keys and values in {sorted(cached)}")
    first = calls[0]
    for call in calls:
        if (call.key, call.value) != cached[call.layer]:
            raise ModelError("caches something else than the keys and values of its attention")
        if (call.query, call.key, call.value) != (first.query, first.key, first.value):
            raise ModelError("has layers with different numbers or sizes of heads")
    query_heads, _, head_dim = first.query
    kv_heads = first.key[0]
    if first.key != first.value or first.key != (kv_heads, tokens, head_dim) or query_heads % kv_heads:
        raise ModelError(f"has queries, keys and values of shapes {first.query}, {first.key} and {first.value}")
    return AttentionShape(len(layers), query_heads, kv_heads, head_dim)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    prefixd_step: list[_Call] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Called in place of attention: notes what it is given. Raises ModelError."""
    if prefixd_step is None:
        raise ModelError("does not pass arguments through to its attention")
    asked = [text.format(kwargs[name]) for name, text in _EXTRAS.items() if kwargs.get(name) is not None]
    if not asked and attention_mask is not None:
        asked = ["an attention mask of its own (bidirectional, chunked or sparse attention)"]
    if asked:
        raise ModelError(f"has {' and '.join(asked)}")
    shapes = (tuple(states.shape[1:]) for states in (query, key, value))
    layer: Any = module.layer_idx
    prefixd_step.append(_Call(layer, *shapes))
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def _mask(*args: Any, mask_function: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """None for the plain causal mask; for any other a tensor without contents, which `_attention` notices."""
    return None if mask_function is causal_mask_function else torch.empty(1, 1, 1, 0, device="meta")
