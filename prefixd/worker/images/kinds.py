"""The families of models that read images and that the worker runs, with their differences.

In most of them a vision encoder makes an embedding of each image, and its rows take the place of the placeholders'
embeddings. So the KV of a prompt with images is that of its tokens. In Llama 3.2 Vision separate layers attend to the
images (`cross_images`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor

from prefixd.worker_protocol.errors import ModelError
from prefixd.worker_protocol.protocol import ImageShape
from prefixd_swap.group_shape import KvGeometry

VISION_ATTENTION = "sdpa"


@dataclass(frozen=True, slots=True)
class ImageKind:
    """How a family of models takes images.

    inputs: names of the processor's outputs that `get_image_features` takes besides the pixels.
    both_ways: see `ImageShape`.
    cross: separate layers attend to the images (`ImageShape`).
    keeps_layers: transformers keeps the hidden states of all layers of the vision encoder until the last one.
    grid_positions: rotary positions have three dimensions, and the rows of an image lie on a grid in two of them.
    """

    inputs: tuple[str, ...] = ()
    both_ways: bool = False
    grid_positions: bool = False
    cross: bool = False
    keeps_layers: bool = False

    @property
    def apart(self) -> bool:
        """Whether the model takes images that follow each other directly for one."""
        return self.both_ways or self.grid_positions


KINDS = {
    "gemma3": ImageKind(both_ways=True),
    "llava_onevision": ImageKind(inputs=("image_sizes",), keeps_layers=True),
    "mllama": ImageKind(inputs=("aspect_ratio_ids", "aspect_ratio_mask"), cross=True, keeps_layers=True),
    "qwen2_5_vl": ImageKind(inputs=("image_grid_thw",), grid_positions=True),
}
"""By `model_type`."""


def reads_images(config: Any) -> bool:
    """Whether a configuration has a vision encoder."""
    return hasattr(config, "vision_config")


def image_kind(config: Any) -> ImageKind | None:
    """The kind of a model; None for a model of text alone, or one that the worker does not run."""
    return KINDS.get(config.model_type) if reads_images(config) else None


def image_shape(config: Any) -> ImageShape | None:
    """The shape for the daemon; None as `image_kind`."""
    kind = image_kind(config)
    if kind is None:
        return None
    placeholder = getattr(config, "image_token_id", None)
    return ImageShape(
        placeholder_id=int(config.image_token_index if placeholder is None else placeholder),
        kind="cross" if kind.cross else "rows",
        both_ways=kind.both_ways,
    )


def cross_geometry(config: Any, dtype: str) -> KvGeometry:
    """The geometry of an image in the layers with cross-attention: its patches are the tokens of a block.

    It has as many patches as the largest image: the vision encoder pads the tiles, and rows before all images read the
    padding, too.
    """
    text, vision = config.get_text_config(decoder=True), config.vision_config
    patches = vision.max_num_tiles * ((vision.image_size // vision.patch_size) ** 2 + 1)
    head_dim = text.hidden_size // text.num_attention_heads
    return KvGeometry(len(text.cross_attention_layers), text.num_key_value_heads, head_dim, dtype, patches)


def attention_names(config: Any, name: str) -> str | dict[str, str]:
    """`name` as the attention of the layers that keep KV, for transformers; the vision encoder computes its own."""
    if image_kind(config) is None:
        return name
    return {"": name, "text_config": name, "vision_config": VISION_ATTENTION}


def read_processor(path: Path) -> Any:
    """transformers' image processor of a model, the one that needs Pillow alone. Raises ModelError."""
    try:
        return AutoImageProcessor.from_pretrained(path, backend="pil", local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a processor's own code runs there
        raise ModelError(
            f"model {str(path)!r} reads images, but its image processor cannot be made: "
            f"{' '.join(str(error).split())[:300]}; give a directory with the model's preprocessor_config.json"
        ) from error
