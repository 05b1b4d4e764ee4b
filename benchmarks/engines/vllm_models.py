"""Tiny models with random weights for vLLM on a CPU, written as Hugging Face would.

Weights are drawn wide (`SPREAD`), so that the next token hangs on the whole prompt and the best logit is well ahead
of the second: tokens then differ when the KV does, and do not when only the order of additions does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 4096
SPREAD = 0.08
HIDDEN = 256
LAYERS = 4
IMAGE_SIDE = 56

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 512,
    "max_position_embeddings": 8192,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def save_llama(directory: Path, seed: int = 0, *, layers: int = LAYERS, **shape: Any) -> Path:
    """A Llama of 4 layers, 8 heads and 2 KV heads of 32: 2 KiB of KV a token in float32. Returns `directory`.

    `shape` has other values of Hugging Face's configuration, such as `hidden_size`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    config = LlamaConfig(**{**COMMON, **heads, **shape}, num_hidden_layers=layers)
    return save(LlamaForCausalLM, config, directory, seed)


def save_gemma3(directory: Path, seed: int = 0) -> Path:
    """A Gemma 3 with four layers that see 128 tokens back and two that see all: vLLM makes three KV groups of it."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=len(layers),
        layer_types=layers,
        sliding_window=128,
        **HEADS,
    )
    return save(Gemma3ForCausalLM, config, directory, seed)


def save(
    kind: Any, config: Any, directory: Path, seed: int, change: Callable[[Any], None] = lambda model: None
) -> Path:
    """Writes a model with random weights of `config.dtype`, which `change` may alter before. Returns `directory`."""
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = kind(config).to(getattr(torch, str(config.dtype).removeprefix("torch.")))
    finally:
        torch.random.set_rng_state(state)
    change(model)
    model.save_pretrained(directory)
    return directory
