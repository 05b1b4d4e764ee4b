"""Models that the worker does not run: each is refused by its configuration, in one line, before weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.worker.tiny_models import tiny_config

LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
ROPE_BY_LAYER = {"full_attention": DYNAMIC_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
MASK = "has an attention mask of its own (bidirectional or sparse attention)"

IMAGES = "reads images (vision_config) as none of gemma3, llava_onevision, mllama, qwen2_5_vl does"


def own_attention(name: str) -> str:
    return f"has attention of its own ({name} takes no attention function), as models with attention biases do"


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        # Masks: told by what the layers ask of their attention.
        (
            "Llama4TextConfig",
            {"head_dim": 16, "attention_chunk_size": 40, "layer_types": ["chunked_attention", "full_attention"]},
            "has chunks of 40 tokens, no multiple of the 16 tokens of a block; set worker.block_tokens to a divisor",
        ),
        ("LlamaConfig", {"is_causal": False}, MASK),
        ("BertConfig", {}, MASK),
        # Layers that are shared, attention of its own.
        (
            "Zamba2Config",
            {"layers_block_type": ["mamba", "hybrid"], "num_key_value_heads": 4},
            "attends in the layers [-1], but caches keys and values in [1]",
        ),
        ("BloomConfig", {}, own_attention("BloomForCausalLM")),
        ("FalconConfig", {"alibi": True}, own_attention("FalconForCausalLM")),
        ("DiffLlamaConfig", {}, "calls attention 4 times in 2 layers"),
        ("NemotronConfig", {}, "does not pass arguments through to its attention"),
        # Not text models with a decoder alone.
        ("T5Config", {}, "is an encoder-decoder"),
        ("LlavaConfig", None, IMAGES),
        ("PaliGemmaConfig", None, IMAGES),
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
    assert said.endswith("; this version of prefixd runs decoder-only text models of attention and recurrent layers")
    assert "\n" not in said


def test_a_configuration_that_breaks_its_own_model(tmp_path: Path) -> None:
    tiny_config("LlamaConfig", hidden_act="no-such-function").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot be built from its config\.json: KeyError: .*no-such-function"):
        read_model_spec(WorkerSettings(model=str(tmp_path)))
