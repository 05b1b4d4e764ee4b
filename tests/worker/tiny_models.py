"""Small random models of every family that the worker runs, and the configurations of some that it refuses.

Weights are large enough for greedy tokens to vary; biases and norms are random too, so that none can be left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 96
EOS = 95
MAX_TOKENS = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_WITHOUT_KV_HEADS = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class Family:
    """A transformers configuration and the attention that it must be read as having."""

    config: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    sizes: dict[str, Any] = field(default_factory=lambda: _SIZES)


FAMILIES = {
    "llama": Family("LlamaConfig"),
    "llama_mha_tied": Family("LlamaConfig", {"num_key_value_heads": 4, "tie_word_embeddings": True}, kv_heads=4),
    "llama_mqa_wide_heads": Family("LlamaConfig", {"num_key_value_heads": 1, "head_dim": 32}, kv_heads=1, head_dim=32),
    "qwen2": Family("Qwen2Config"),
    "qwen2_window_off": Family(
        "Qwen2Config", {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}
    ),
    "qwen3": Family("Qwen3Config", {"head_dim": 32}, head_dim=32),
    "qwen3_window_above_all_layers": Family(
        "Qwen3Config", {"head_dim": 16, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    ),
    "mistral": Family("MistralConfig", {"sliding_window": None}),
    # transformers makes it a Ministral
    "mistral_without_windows": Family(
        "MistralConfig", {"sliding_window": 8, "layer_types": ["full_attention"] * 2, "head_dim": 16}
    ),
    "phi3": Family("Phi3Config", {"original_max_position_embeddings": MAX_TOKENS}),
    "gemma": Family("GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True}, head_dim=32),
    "gemma3_without_windows": Family(
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 8, "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 16},
    ),
    "gpt_neox": Family(
        "GPTNeoXConfig", {"rotary_pct": 0.25, "use_parallel_residual": True}, kv_heads=4, sizes=_WITHOUT_KV_HEADS
    ),
    "gpt_neox_sequential": Family(
        "GPTNeoXConfig", {"rotary_pct": 1.0, "use_parallel_residual": False}, kv_heads=4, sizes=_WITHOUT_KV_HEADS
    ),
    "olmo": Family("OlmoConfig", {"clip_qkv": 2.0}),
    "olmo2": Family("Olmo2Config"),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family(
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def tiny_config(config: str, sizes: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """A small configuration of the named transformers class."""
    return getattr(transformers, config)(**{**(_SIZES if sizes is None else sizes), **kwargs})


def save_tiny(directory: Path, name: str, **saving: Any) -> Path:
    """Write the model `name` of FAMILIES; `saving` goes to `save_pretrained`."""
    family = FAMILIES[name]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family.config, family.sizes, **family.kwargs))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory, **saving)
    return directory
