"""Small random models in the proportions of large ones, most of them with layers that keep different things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 511,
    "pad_token_id": 0,
}
IMAGE_TOKEN = 505
"""Of the model with images; it and the next two are no text."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # Gemma 3: five of six layers see a window.
    "window": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "hidden_size": 256,
            "intermediate_size": 2048,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
        }
        | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    ),
    # Jamba 1.5: one of eight layers has attention; a recurrent layer's state is as large as 144 tokens in that.
    "state": (
        "JambaConfig",
        {"num_hidden_layers": 8, "attn_layer_period": 8, "attn_layer_offset": 4, "num_key_value_heads": 1}
        | {"num_experts": 1, "mamba_d_state": 32, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8},
    ),
    # Llama: full attention alone. A block takes other bytes than those of the model with windows.
    "full": ("LlamaConfig", {"num_hidden_layers": 5, "hidden_size": 256, "intermediate_size": 2048, "head_dim": 32}),
    # Gemma 3 with images, of 16 rows each; its vision tower takes as long as some hundred tokens do.
    "vision": (
        "Gemma3Config",
        {
            "text_config": {
                **_SIZES,
                "model_type": "gemma3_text",
                "num_hidden_layers": 6,
                "hidden_size": 256,
                "intermediate_size": 2048,
                "head_dim": 32,
                "query_pre_attn_scalar": 32,
                "sliding_window": 128,
                "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            },
            "vision_config": {
                "model_type": "siglip_vision_model",
                "hidden_size": 128,
                "intermediate_size": 512,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "image_size": 128,
                "patch_size": 8,
            },
            "mm_tokens_per_image": 16,
            "image_token_index": IMAGE_TOKEN,
            "boi_token_index": IMAGE_TOKEN + 1,
            "eoi_token_index": IMAGE_TOKEN + 2,
        },
    ),
    # Llama 3.2 11B Vision: 32 layers attend to the text, eight to images of 6,404 patches: four tiles of 40 * 40 + 1.
    "cross": (
        "MllamaConfig",
        {
            "text_config": {
                **_SIZES,
                "model_type": "mllama_text_model",
                "hidden_size": 64,
                "intermediate_size": 64,
                "num_hidden_layers": 40,
                "num_key_value_heads": 1,
                "cross_attention_layers": list(range(3, 40, 5)),
                "bos_token_id": 1,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "vision_config": {
                "model_type": "mllama_vision_model",
                "hidden_size": 32,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_global_layers": 1,
                "attention_heads": 1,
                "image_size": 80,
                "patch_size": 2,
                "max_num_tiles": 4,
                "vision_output_dim": 64,
                "intermediate_layers_indices": [0],
                "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            },
            "image_token_index": IMAGE_TOKEN,
        },
    ),
}
_LATER_LAYERS = 0.1
"""By this is multiplied what each layer behind the first one adds, in a model with a draft."""
_IMAGE_PROCESSORS: dict[str, dict[str, Any]] = {
    "vision": {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 128, "width": 128}},
    "cross": {
        "image_processor_type": "MllamaImageProcessor",
        "size": {"height": 80, "width": 80},
        "max_image_tiles": 4,
    },
}


def save(name: str, directory: Path, seed: int = 0) -> Path:
    """Writes a model of MODELS with random weights; returns `directory`."""
    _make(name, seed).save_pretrained(directory)
    if name in _IMAGE_PROCESSORS:
        (directory / "preprocessor_config.json").write_text(json.dumps(_IMAGE_PROCESSORS[name]))
    return directory


def save_with_draft(name: str, directory: Path, draft_directory: Path, seed: int = 0) -> Path:
    """Writes a model of MODELS whose first layer alone often chooses the same tokens, and that layer as its draft.

    The draft has the model's embeddings, first layer and head. With random weights alone, one layer would say little
    about the choice of all, so the model's other layers are made to add little (_LATER_LAYERS). How many tokens are
    accepted is therefore a property of these weights. Returns `directory`.
    """
    import torch
    import transformers

    model = _make(name, seed)
    with torch.no_grad():
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight *= _LATER_LAYERS
            layer.mlp.down_proj.weight *= _LATER_LAYERS
    model.save_pretrained(directory)
    model.config.num_hidden_layers = 1
    draft = transformers.AutoModelForCausalLM.from_config(model.config)
    draft.load_state_dict({key: weights for key, weights in model.state_dict().items() if key in draft.state_dict()})
    draft.save_pretrained(draft_directory)
    return directory


def _make(name: str, seed: int) -> Any:
    import torch
    import transformers

    torch.manual_seed(seed)
    config, kwargs = MODELS[name]
    images = "vision_config" in kwargs
    made = getattr(transformers, config)(**(kwargs if images else {**_SIZES, **kwargs}))
    kind: Any = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    model = kind.from_config(made)
    for key, parameter in model.named_parameters():
        if key.endswith("gate"):
            parameter.data.fill_(0.5)  # closed, they hide the images from the text
    return model
