"""Finds the arguments that a model passes to its attention and to its cache, by running it without memory.

Configurations use different names (GPT-NeoX has no `num_key_value_heads`), and some leave values out. So the model
itself is run: one forward pass on torch's meta device, where tensors have shapes and no contents, over as many tokens
as the model may ever see. It takes about a millisecond a layer, whatever the size of the weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CellType, FunctionType
from typing import Any

import torch
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from prefixd.base.rules.rules import ChunkedWindow, SlidingWindow, Window
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
    chunk: tokens of the chunks that a query sees its own one of, up to itself; None for all before it.
    reads: the layer whose keys and values it reads, since it has none of its own (Gemma 3n); None if it has.
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
    chunk: int | None = None
    reads: int | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the attention function. Shapes are [heads, tokens, head_dim].

    keys: the tensor itself, by which the layer is found that has made it.
    """

    layer: int
    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: bool
    keys: torch.Tensor


class _ProbeCache(Cache):
    """Records the shapes of the tensors that each layer gives it, and the keys."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, _Shapes] = {}
        self.keys: dict[int, torch.Tensor] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.shapes[layer_idx] = (tuple(key_states.shape[1:]), tuple(value_states.shape[1:]))
        self.keys[layer_idx] = key_states
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
    return _layers(calls, cache, tokens)


def _layers(calls: list[_Call], cache: _ProbeCache, tokens: int) -> list[AttentionLayer]:
    layers = [call.layer for call in calls]
    if len(set(layers)) < len(layers):
        raise ModelError(f"calls attention {len(layers)} times in {len(set(layers))} layers")
    # A layer that shares another one's keys and values attends to the very tensors that the cache was given.
    sources = {
        call.layer: next((layer for layer, keys in cache.keys.items() if keys is call.keys), None)
        for call in calls
        if call.layer not in cache.shapes
    }
    if None in sources.values() or not set(cache.shapes) <= set(layers):
        raise ModelError(f"attends in the layers {layers}, but caches keys and values in {sorted(cache.shapes)}")
    found = {}
    for call in sorted(calls, key=lambda call: call.layer):
        reads = sources.get(call.layer)
        layer = _layer(call, *cache.shapes[call.layer if reads is None else reads], tokens)
        found[call.layer] = replace(layer, reads=reads)
    for layer in found.values():
        source = layer if layer.reads is None else found[layer.reads]
        if source.expanded or (source.window, source.chunk) == (layer.window, layer.chunk):
            continue
        raise ModelError(
            f"shares the keys and values of layer {source.layer}, {_reach(source)}, with layer {layer.layer}, "
            f"{_reach(layer)}: what one of them gives up the other may need"
        )
    if shared := [layer for layer in found.values() if layer.reads is not None and layer.expanded]:
        raise ModelError(f"shares latents between layers ({shared[0].reads} and {shared[0].layer})")
    return list(found.values())


def _reach(layer: AttentionLayer) -> str:
    if layer.chunk is not None:
        return f"with chunks of {layer.chunk} tokens"
    return "with full attention" if layer.window is None else f"with a window of {layer.window} tokens"


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
        return AttentionLayer(call.layer, query_heads, kv_heads, head_dim, *asked, chunk=call.chunk)
    latents = key[2] + value[2]
    if key[:2] != (1, tokens) or value[:2] != (1, tokens) or latents % 2 or call.window or call.chunk:
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
    seen, chunk = (None, None) if attention_mask is None else attention_mask.shape[1:3]
    if (seen or None) != sliding_window or not (seen or chunk or attention_mask is None):
        raise ModelError("has an attention mask of its own (bidirectional or sparse attention)")
    layer: Any = module.layer_idx
    shapes = tuple(query.shape[1:]), tuple(key.shape[1:]), tuple(value.shape[1:])
    prefixd_step.append(_Call(layer, *shapes, sliding_window, chunk or None, softcap, s_aux is not None, key))
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def _mask(*args: Any, mask_function: Any = None, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """None for the plain causal mask; for any other a meta tensor ``[1, window, chunk, 0]``, both 0 if it is neither
    one with a window nor one with chunks."""
    if mask_function is causal_mask_function:
        return None
    window = chunk = 0
    if local_size is not None:
        mask = _without_padding(mask_function)
        window = local_size if _is_mask(mask, SlidingWindow(local_size)) else 0
        chunk = local_size if not window and _is_mask(mask, ChunkedWindow(local_size)) else 0
    return torch.empty(1, window, chunk, 0, device="meta")


def _without_padding(function: Any) -> Any:
    """The same mask function, with zeros in place of the tensors that have no contents here.

    The mask of chunks counts a row's padding (`chunked_overlay`), and here there is none.
    """
    if isinstance(function, torch.Tensor):
        return torch.zeros(function.shape, dtype=function.dtype, device="cpu") if function.is_meta else function
    if isinstance(function, tuple):
        return tuple(map(_without_padding, function))
    if not isinstance(function, FunctionType) or not function.__closure__:
        return function
    cells = tuple(CellType(_without_padding(cell.cell_contents)) for cell in function.__closure__)
    return FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)


def _is_mask(mask_function: Any, rule: Window) -> bool:
    """Whether a mask lets every query see itself and the tokens before it from `rule.first_seen` on, and no others."""
    size = rule.tokens
    for query in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 3 * size + 1):
        first = rule.first_seen(query)
        for key in {0, 1, first - 1, first, first + 1, query - 1, query, query + 1} & set(range(query + 2)):
            at = torch.tensor(query, device="cpu"), torch.tensor(key, device="cpu")
            try:
                seen = bool(mask_function(0, 0, *at))
            except NotImplementedError:  # it depends on tensors that have no contents here
                return False
            if seen != (first <= key <= query):
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
