"""Models that the worker does not run: each is refused by its configuration, in one line, before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixd.worker.errors import ModelError
from prefixd.worker.model_spec import read_model_spec
from prefixd.worker.settings import WorkerSettings
from tests.worker.tiny_models import tiny_config

WINDOWS = ["sliding_attention", "full_attention"]
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ROPE_BY_LAYER = {"full_attention": DYNAMIC_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
MASK = "has an attention mask of its own (bidirectional, chunked or sparse attention)"


def own_attention(name: str) -> str:
    return f"has attention of its own ({name} takes no attention function), as models with attention biases do"


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        # Windows, caps and sinks: told by what the layers ask of their attention.
        ("MistralConfig", {"sliding_window": 128}, "has a sliding window of 128 tokens"),
        ("Phi3Config", {"sliding_window": 64}, "has a sliding window of 64 tokens"),
        (
            "MinistralConfig",
            {"head_dim": 16, "sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]},
            "has a sliding window of 32 tokens",
        ),
        (
            "Qwen2Config",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            "has a sliding window of 64 tokens",
        ),
        (
            "Qwen3Config",
            {"head_dim": 16, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
            "has a sliding window of 64 tokens",
        ),
        (
            "Gemma2Config",
            {"head_dim": 16, "sliding_window": 32, "layer_types": WINDOWS},
            "has a sliding window of 32 tokens and attention scores capped at 50.0 (softcap)",
        ),
        (
            "Gemma2Config",
            {"head_dim": 16, "layer_types": ["full_attention"] * 2},
            "has attention scores capped at 50.0 (softcap)",
        ),
        (
            "Gemma3TextConfig",
            {"head_dim": 16, "sliding_window": 32, "layer_types": WINDOWS},
            "has a sliding window of 32 tokens",
        ),
        (
            "GptOssConfig",
            {"head_dim": 16, "num_local_experts": 4, "sliding_window": 32, "layer_types": WINDOWS},
            "has a sliding window of 32 tokens and attention sinks",
        ),
        (
            "GptOssConfig",
            {"head_dim": 16, "num_local_experts": 4, "layer_types": ["full_attention"] * 2},
            "has attention sinks",
        ),
        (
            "Llama4TextConfig",
            {"head_dim": 16, "attention_chunk_size": 32, "layer_types": ["chunked_attention", "full_attention"]},
            MASK,
        ),
        ("LlamaConfig", {"is_causal": False}, MASK),
        ("BertConfig", {}, MASK),
        # Recurrent states.
        ("MambaConfig", {}, "has recurrent states (layers of type linear_attention)"),
        ("BambaConfig", {"attn_layer_indices": [1], **MAMBA}, "has recurrent states (layers of type linear_attention)"),
        ("JambaConfig", {}, "has recurrent states (layers of type linear_attention)"),
        ("FalconH1Config", {"head_dim": 16}, "has recurrent states (layers of type hybrid)"),
        (
            "Zamba2Config",
            {"layers_block_type": ["mamba", "hybrid"]},
            "has recurrent states (layers of type hybrid, linear_attention)",
        ),
        ("NemotronHConfig", {"head_dim": 16}, "has recurrent states"),
        ("Qwen3NextConfig", {"head_dim": 16}, "has recurrent states (layers of type linear_attention)"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "has recurrent states (layers of type conv)"),
        ("RecurrentGemmaConfig", {"num_hidden_layers": 3}, "has recurrent states (layers of type linear_attention)"),
        # Latent attention, shared KV, other attention.
        ("DeepseekV2Config", MLA, "has latent attention (kv_lora_rank=32)"),
        ("DeepseekV3Config", MLA, "has latent attention (kv_lora_rank=32)"),
        ("BloomConfig", {}, own_attention("BloomForCausalLM")),
        ("FalconConfig", {"alibi": True}, own_attention("FalconForCausalLM")),
        ("DiffLlamaConfig", {}, "calls attention 4 times in 2 layers"),
        ("NemotronConfig", {}, "does not pass arguments through to its attention"),
        # Not text models with a decoder alone.
        ("T5Config", {}, "is an encoder-decoder"),
        ("MllamaConfig", None, "reads images (vision_config)"),
        ("LlavaOnevisionConfig", None, "reads images (vision_config)"),
        ("Qwen2_5_VLConfig", None, "reads images (vision_config)"),
        ("Gemma3Config", None, "reads images (vision_config)"),
        ("ViTConfig", {}, "has no causal language model in transformers"),
        # Rotary embeddings that depend on the length.
        ("LlamaConfig", {"rope_parameters": DYNAMIC_ROPE}, "has rotary embeddings of type 'dynamic'"),
        (
            "Phi3Config",
            {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 128},
            "has rotary embeddings of type 'longrope'",
        ),
        (
            "Gemma3TextConfig",
            {"head_dim": 16, "rope_parameters": ROPE_BY_LAYER, "layer_types": ["full_attention"] * 2},
            "has rotary embeddings of type 'dynamic'",
        ),
    ],
)
def test_models_are_refused_by_what_they_have(
    tmp_path: Path, config: str, kwargs: dict[str, Any] | None, message: str
) -> None:
    made = tiny_config(config, {} if kwargs is None else None, **(kwargs or {}))
    made.save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        read_model_spec(WorkerSettings(model=str(tmp_path)))
    said = str(caught.value)
    start = f"model {str(tmp_path)!r} (model_type {made.model_type!r}) {message}"
    assert said[: len(start)] == start
    assert said.endswith(
        "; this version of prefixd runs decoder-only text models with plain full attention in every layer"
    )
    assert "\n" not in said


def test_a_configuration_that_breaks_its_own_model(tmp_path: Path) -> None:
    tiny_config("LlamaConfig", hidden_act="no-such-function").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be built from its config\.json: KeyError: .*no-such-function"):
        read_model_spec(WorkerSettings(model=str(tmp_path)))
