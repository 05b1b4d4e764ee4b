"""Small random models of every family that the worker runs, and the configurations of some that it refuses.

Weights are large enough for greedy tokens to vary; biases and norms are random too, so that none can be left out.
"""

from __future__ import annotations

import json
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


# Attention layers that keep different things, and latents. Weights are large enough for greedy tokens to vary.
WINDOW = 21  # no multiple of a tile
GROUP_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
CHUNK = 48
_GEMMA_3N: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,  # the last two read keys and values of the two before
    "layer_types": _ALTERNATING * 2,
    "head_dim": 16,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "altup_num_inputs": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 4,
}
_LLAMA_4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": CHUNK,
    "head_dim": 16,
    "intermediate_size_mlp": 64,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "floor_scale": 8,  # from 8 tokens on, queries without rotary positions are scaled
    "attn_scale": 0.5,
}
WINDOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        # Low caps, so that scores are bent by them.
        {"head_dim": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0, "layer_types": _ALTERNATING},
    ),
    "gemma3_text": ("Gemma3TextConfig", {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": _ALTERNATING}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": _ALTERNATING},
    ),
    "mistral_window": ("MistralConfig", {"head_dim": 16, "layer_types": ["sliding_attention"] * 2}),
    "ministral": ("MinistralConfig", {"head_dim": 16, "layer_types": _ALTERNATING}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1}),
    "gemma3n_text": ("Gemma3nTextConfig", _GEMMA_3N),
    "llama4_text": ("Llama4TextConfig", _LLAMA_4),
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "topk_group": 1,
}
LATENT = {
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "q_lora_rank": None, "n_group": 1}),
    "deepseek_v3": ("DeepseekV3Config", {**_LATENT, "q_lora_rank": 48, "n_group": 2}),
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


# With the default of 0.02 a lost recurrent state moves logits by 1e-6, which no test sees.
_RECURRENT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_MAMBA_2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}

# Models with recurrent layers: the configuration's class and what differs from the sizes above.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("MambaConfig", {"state_size": 16}),
    "mamba2": ("Mamba2Config", {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16}),
    "jamba": (
        "JambaConfig",
        {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
        | {"num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
        | {"mamba_dt_rank": 8},
    ),
    "bamba": ("BambaConfig", {"attn_layer_indices": [2], "mamba_expand": 2, "mamba_chunk_size": 16, **_MAMBA_2}),
    "falcon_h1": (
        "FalconH1Config",
        {"head_dim": 16, "mamba_d_ssm": 128, "mamba_expand": 2, "mamba_chunk_size": 16, **_MAMBA_2},
    ),
    "zamba2": (
        "Zamba2Config",
        {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_d_state": 16}
        | {"mamba_d_conv": 4, "mamba_expand": 2, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 16}
        | {"num_mem_blocks": 1, "use_mem_rope": True},
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"]}
        | {"head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 1}
        | {"conv_kernel": 4, "expand": 2, "chunk_size": 16},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {"head_dim": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ),
    "lfm2": (
        "Lfm2Config",
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3}
        | {"block_auto_adjust_ff_dim": False},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {"num_key_value_heads": 1, "num_hidden_layers": 6, "lru_width": 64, "attention_window_size": 16}
        | {"conv1d_width": 4},
    ),
}


def recurrent_config(name: str, **changes: Any) -> Any:
    """The configuration of a model of RECURRENT."""
    config, kwargs = RECURRENT[name]
    sizes = {**_RECURRENT_SIZES, **kwargs, **changes}
    if name == "nemotron_h":
        del sizes["num_hidden_layers"]  # it counts its block types
    return getattr(transformers, config)(**sizes)


def build_recurrent(name: str, **changes: Any) -> Any:
    """A model of RECURRENT with random weights in float32."""
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(recurrent_config(name, **changes)).eval().requires_grad_(False)


def build_grouped(name: str) -> Any:
    """A model of WINDOWED, LATENT or RECURRENT with random weights in float32."""
    if name in RECURRENT:
        return build_recurrent(name)
    config, changes = (WINDOWED | LATENT)[name]
    if name in WINDOWED:
        changes = {"sliding_window": WINDOW, **changes}
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(config, GROUP_SIZES, **changes))
    with torch.no_grad():
        for parameter, values in model.named_parameters():
            if parameter.endswith("sinks"):
                values.normal_(2.0, 1.0)
    return model.eval().requires_grad_(False)


# Models that read images of about 28 to 56 pixels. An image's id is its placeholder.
IMAGE_TOKEN = 90
IMAGE_SIDE = 28
_VISION: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIDE,
    "patch_size": 7,
}
_SIDES = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
_PINPOINTS = [[28, 28], [28, 56], [56, 28]]
_IMAGE_SIZES = {**_SIZES, "initializer_range": 0.2, "max_position_embeddings": 1024}

# The configuration's class and arguments, and preprocessor_config.json.
IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llava_onevision": (
        "LlavaOnevisionConfig",
        {
            "text_config": {"model_type": "qwen2", **_IMAGE_SIZES},
            "vision_config": _VISION,
            "image_token_index": IMAGE_TOKEN,
            "video_token_index": IMAGE_TOKEN + 1,
            "image_grid_pinpoints": _PINPOINTS,
            "vision_feature_layer": -1,
        },
        {"image_processor_type": "LlavaOnevisionImageProcessor", "size": _SIDES, "image_grid_pinpoints": _PINPOINTS},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {
                "model_type": "qwen2_5_vl_text",
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
                **_IMAGE_SIZES,
            },
            "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
            | {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56}
            | {"out_hidden_size": 64, "fullatt_block_indexes": [1]},
            "image_token_id": IMAGE_TOKEN,
            "video_token_id": IMAGE_TOKEN + 1,
            "vision_start_token_id": IMAGE_TOKEN + 2,
            "vision_end_token_id": IMAGE_TOKEN + 3,
        },
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
        | {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 24},
    ),
    "gemma3": (
        "Gemma3Config",
        {
            "text_config": {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16}
            | {"sliding_window": WINDOW, "layer_types": _ALTERNATING, **_IMAGE_SIZES},
            "vision_config": _VISION | {"image_size": 40, "patch_size": 5},
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": IMAGE_TOKEN + 2,
            "eoi_token_index": IMAGE_TOKEN + 3,
        },
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 40, "width": 40}},
    ),
    "mllama": (
        "MllamaConfig",
        {
            "text_config": {"model_type": "mllama_text_model", "cross_attention_layers": [1, 3]}
            | {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                **_IMAGE_SIZES,
                "num_hidden_layers": 4,
                "bos_token_id": 1,
            },
            "vision_config": {"model_type": "mllama_vision_model", "hidden_size": 32, "intermediate_size": 64}
            | {"num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2, "image_size": IMAGE_SIDE}
            | {"patch_size": 14, "max_num_tiles": 2, "vision_output_dim": 64, "intermediate_layers_indices": [1]}
            | {"supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]]},
            "image_token_index": VOCAB,  # its embeddings are more than its logits
        },
        {"image_processor_type": "MllamaImageProcessor", "size": _SIDES, "max_image_tiles": 2},
    ),
}


def image_config(name: str) -> Any:
    """The configuration of a model of IMAGES."""
    config, kwargs, _ = IMAGES[name]
    return getattr(transformers, config)(**kwargs)


def save_image_model(directory: Path, name: str) -> Path:
    """Write the model `name` of IMAGES, with random weights, and what its image processor needs."""
    torch.manual_seed(3)
    config = image_config(name)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ("embed" in key and "patch" in key) or "vision" in key or "visual" in key or "projector" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)  # images that differ must look different
            if key.endswith("gate"):
                parameter.fill_(0.5)  # closed, they hide the images
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(IMAGES[name][2]))
    return directory
