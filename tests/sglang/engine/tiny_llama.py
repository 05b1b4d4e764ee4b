"""A model of two layers, and an adapter for it, as files that SGLang reads."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCABULARY = 512
HIDDEN = 64
LAYERS = 2
_HEADS, _KV_HEADS = 4, 2
_RANK = 4


def make_model(folder: Path) -> Path:
    """Writes the model; its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=4096,
        initializer_range=0.2,  # so that what follows depends on the whole prompt
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_adapter(folder: Path) -> Path:
    """Writes an adapter of all projections of attention but the output's; its folder."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    widths = {"q_proj": HIDDEN, "k_proj": HIDDEN * _KV_HEADS // _HEADS, "v_proj": HIDDEN * _KV_HEADS // _HEADS}
    weights = {}
    for layer in range(LAYERS):
        for projection, width in widths.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{projection}"
            weights[f"{name}.lora_A.weight"] = torch.randn(_RANK, HIDDEN, generator=generator)
            weights[f"{name}.lora_B.weight"] = torch.randn(width, _RANK, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": _RANK,
        "lora_alpha": _RANK,
        "target_modules": list(widths),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
