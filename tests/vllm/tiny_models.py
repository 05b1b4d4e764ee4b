"""Models for the tests alone, as `benchmarks.engines.vllm_models` makes them; and LoRA adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engines.vllm_models import COMMON, HEADS, HIDDEN, IMAGE_SIDE, LAYERS, SPREAD, VOCABULARY, save

IMAGE_TOKENS = 8


def save_gemma2(directory: Path, seed: int = 0) -> Path:
    """A Gemma 2 whose layers see 128 tokens back and all of them in turn; scores and logits have soft caps."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **{**COMMON, "tie_word_embeddings": True},  # vLLM's Gemma 2 has no output matrix of its own
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=128,
        **HEADS,
        query_pre_attn_scalar=64,
    )
    return save(Gemma2ForCausalLM, config, directory, seed, _make_layers_louder)


def save_gpt_oss(directory: Path, seed: int = 0) -> Path:
    """A GPT-OSS: layers that see 128 tokens back and all of them in turn, attention sinks, two of four experts."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=128,
        **HEADS,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return save(GptOssForCausalLM, config, directory, seed)


def save_qwen3_next(directory: Path, seed: int = 0) -> Path:
    """A Qwen3-Next: three layers of gated delta rule, each with a state, and one of attention; experts."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = Qwen3NextConfig(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )
    return save(Qwen3NextForCausalLM, config, directory, seed)


def save_lfm2(directory: Path, seed: int = 0) -> Path:
    """An LFM2: three layers of short convolution, whose state is the last two tokens' inputs, and one of attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        num_attention_heads=4,
        num_key_value_heads=2,
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    )
    save(Lfm2ForCausalLM, config, directory, seed)
    # vLLM reads what the model's own configuration file on the hub has and transformers' class does not write.
    path = directory / "config.json"
    plain = json.loads(path.read_text())
    extra = {
        "conv_dim": HIDDEN,
        "conv_dim_out": HIDDEN,
        "block_dim": HIDDEN,
        "block_ff_dim": plain["intermediate_size"],
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
    }
    path.write_text(json.dumps({**plain, **extra}, indent=2))
    return directory


def save_mla(directory: Path, seed: int = 0) -> Path:
    """A DeepSeek-V2 without expert layers: multi-head latent attention, with one latent vector for all heads."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        **COMMON,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        first_k_dense_replace=2,
    )
    return save(DeepseekV2ForCausalLM, config, directory, seed)


def save_blip2(directory: Path, seed: int = 0) -> Path:
    """A BLIP-2 with an OPT of 4 layers: an image of 56 x 56 pixels is 8 tokens before the prompt. With a processor and
    a tokenizer, which vLLM needs for images.
    """
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        BlipImageProcessorPil,
        PreTrainedTokenizerFast,
    )

    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Blip2Config(
        vision_config={**tower, "image_size": IMAGE_SIDE, "patch_size": 14},
        qformer_config={**tower, "vocab_size": VOCABULARY, "encoder_hidden_size": 64, "cross_attention_frequency": 1},
        text_config={
            **{name: value for name, value in COMMON.items() if name not in ("intermediate_size", "dtype")},
            "model_type": "opt",
            "ffn_dim": 512,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "word_embed_proj_dim": HIDDEN,
            "init_std": SPREAD,
        },
        num_query_tokens=IMAGE_TOKENS,
        image_token_index=3,
        dtype="float32",
    )
    save(Blip2ForConditionalGeneration, config, directory, seed, _make_images_louder)
    special = {"<pad>": 0, "<s>": 1, "</s>": 2, "<image>": 3}
    words = {**special, **{f"t{token}": token for token in range(len(special), VOCABULARY)}}
    plain = json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}} | {
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<pad>"}
    })  # fmt: skip
    (directory / "tokenizer.json").write_text(plain)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<pad>",
        additional_special_tokens=["<image>"],
    )
    images = BlipImageProcessorPil(size={"height": IMAGE_SIDE, "width": IMAGE_SIDE})
    Blip2Processor(images, tokenizer, num_query_tokens=IMAGE_TOKENS).save_pretrained(directory)
    return directory


def save_lora(directory: Path, seed: int, *, rank: int = 8) -> Path:
    """A LoRA adapter for `save_llama`'s attention whose weights are random and large enough to change the output."""
    generator = torch.Generator().manual_seed(seed)
    widths = {"q_proj": HIDDEN, "v_proj": HIDDEN // 4}
    tensors = {}
    for layer in range(LAYERS):
        for name, width in widths.items():
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, HIDDEN, generator=generator) * SPREAD
            tensors[f"{at}.lora_B.weight"] = torch.randn(width, rank, generator=generator) * SPREAD
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
        "r": rank,
        "lora_alpha": 4 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(widths),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def _make_images_louder(model: Any) -> None:
    """So that the next token hangs on the image, too."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("language_model") and parameter.dim() > 1:
                parameter.normal_(0, 0.3)


def _make_layers_louder(model: Any) -> None:
    """With one matrix for input and output, the token that was read last has the best logit, whatever stands before it,
    unless what the layers add is larger than what they read."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "post_" in name and name.endswith("layernorm.weight"):
                parameter.fill_(7.0)
