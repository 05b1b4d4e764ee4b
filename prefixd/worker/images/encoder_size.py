"""How much a vision encoder computes at a time: the largest image of its model, which cannot be divided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefixd.worker.images.kinds import KINDS

_PATCHES_TOGETHER = 8  # transformers pads the patches of a tile of Llama 3.2 Vision to a multiple of this
_MASKS = 3  # matrices of patches by patches that exist at once where it masks tiles that are padding


@dataclass(frozen=True, slots=True)
class EncoderSize:
    """The vision encoder of a model, and the largest image that its processor makes.

    Example, Gemma 3: 4,096 patches of 14 x 14 pixels, in layers of width 1,152 with an MLP of 4,304.

    patches: of an image, tiles that are padding included.
    hidden, mlp: widths of a layer.
    kept_layers: layers whose hidden states transformers keeps until the end, to choose the embedding from.
    other: further numbers of a patch: its pixels, what the embedding is chosen from, and the embedding.
    masks: matrices of patches by patches.
    """

    patches: int
    hidden: int
    mlp: int
    kept_layers: int
    other: int
    masks: int

    @classmethod
    def of(cls, config: Any, processor: Any, max_tokens: int) -> EncoderSize:
        """From transformers' configuration of a model of `KINDS` and its image processor.

        max_tokens: of a prompt, which bounds an image of Qwen2.5-VL, too.
        """
        vision, text, kind = config.vision_config, config.get_text_config(decoder=True), KINDS[config.model_type]
        patch = int(vision.patch_size)
        pixels = 3 * patch**2 * int(getattr(vision, "temporal_patch_size", 1))
        chosen = int(getattr(vision, "vision_output_dim", 0))  # stacked, without padding, and beside the last states
        return cls(
            patches=_most_patches(config, processor, max_tokens),
            hidden=int(vision.hidden_size),
            mlp=int(vision.intermediate_size),
            kept_layers=int(vision.num_hidden_layers) if kind.keeps_layers else 0,
            other=3 * pixels + 3 * chosen + int(text.hidden_size),
            masks=_MASKS if kind.cross else 0,
        )


def _most_patches(config: Any, processor: Any, max_tokens: int) -> int:
    vision, kind = config.vision_config, KINDS[config.model_type]
    patch = int(vision.patch_size)
    if kind.grid_positions:  # as many pixels as the processor is set to make of a large image
        return min(int(processor.size["longest_edge"]) // patch**2, max_tokens * int(processor.merge_size) ** 2)
    of_tile = (int(vision.image_size) // patch) ** 2
    if kind.cross:
        return int(vision.max_num_tiles) * -(-(of_tile + 1) // _PATCHES_TOGETHER) * _PATCHES_TOGETHER
    canvases = getattr(processor, "image_grid_pinpoints", None) or [(0, 0)]
    tiles = max(int(height * width) for height, width in canvases) // int(vision.image_size) ** 2
    return (1 + tiles) * of_tile  # the whole image as one tile, and its tiles
