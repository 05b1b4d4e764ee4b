"""From an image's file to its embedding: transformers' image processor, then the model's vision encoder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageOps

from prefixd.worker.errors import RequestError
from prefixd.worker.images.cross_images import CrossPairs
from prefixd.worker.images.feature_store import Features, FeatureStore
from prefixd.worker.images.kinds import ImageKind
from prefixd.worker.protocol import PromptImage

_ORIENTATION = 0x0112  # in Exif: 5 to 8 lay the image on its side
_ON_ITS_SIDE = (5, 6, 7, 8)


class ImageEncoder:
    """Embeds one image at a time, so that an embedding's bits depend on its image alone.

    Args:
        model: transformers' model, with its weights.
        processor: transformers' image processor of it.
        kind: what the model's family needs.
        store: the embeddings that are kept.
    """

    def __init__(self, model: Any, processor: Any, kind: ImageKind, store: FeatureStore) -> None:
        self.store = store
        self.kind = kind
        self._model = model
        self._processor = processor
        weight = model.get_input_embeddings().weight
        self._device, self._dtype = weight.device, weight.dtype

    @torch.inference_mode()
    def encode(self, image: PromptImage) -> Features:
        """The embedding of an image in the model's type on its device, a row a placeholder; not kept here.

        Of a model with cross-attention it has a row a patch, tiles that are padding included.

        Raises RequestError for a file that cannot be read.
        """
        try:
            inputs = self._processor(images=[_open(image)], return_tensors="pt")
        except RequestError:
            raise
        except Exception as error:  # a processor's own code refuses sizes in ways of its own
            raise RequestError(f"{_name(image)} cannot be prepared for the model: {_one_line(error)}") from error
        arguments = {name: inputs[name].to(self._device) for name in self.kind.inputs}
        pixels = inputs["pixel_values"].to(self._device, self._dtype)
        if self.kind.cross:
            made = self._model.model.vision_model(pixel_values=pixels, **arguments).last_hidden_state
            return Features(self._model.model.multi_modal_projector(made).flatten(0, 3))
        made = self._model.get_image_features(pixel_values=pixels, **arguments).pooler_output
        return Features(torch.cat([*made]).to(self._dtype))  # a tensor or a tuple with an entry an image

    @torch.inference_mode()
    def positions(self, tokens: int, images: Sequence[PromptImage]) -> torch.Tensor | None:
        """Rotary positions ``[3, tokens]`` on the CPU of a prompt of so many tokens with these images.

        None where a token's position is its place. Raises RequestError for a file that cannot be read.
        """
        if not self.kind.grid_positions or not images:
            return None
        types = torch.zeros((1, tokens), dtype=torch.int64)
        for image in images:
            types[0, image.first : image.first + image.tokens] = 1
        grids = [self._grid(image) for image in images]
        merged = self._processor.merge_size**2
        for image, grid in zip(images, grids, strict=True):
            rows = grid[0] * grid[1] * grid[2] // merged
            if rows != image.tokens:
                raise RequestError(
                    f"{_name(image)} has an embedding of {rows} rows, but {image.tokens} placeholders; "
                    "repeat the placeholder as the model's processor does"
                )
        made, _ = self._model.model.get_rope_index(types, mm_token_type_ids=types, image_grid_thw=torch.tensor(grids))
        positions: torch.Tensor = made[:, 0]
        return positions

    @torch.inference_mode()
    def cross_pairs(self, features: Features) -> CrossPairs:
        """Keys and values of an image in the layers that attend to it."""
        rows = features.rows
        pairs = {}
        for number, layer in self._cross_layers().items():
            shape = (len(rows), layer.num_key_value_heads, layer.head_dim)
            keys = layer.k_norm(layer.k_proj(rows).view(shape).transpose(0, 1))
            pairs[number] = keys, layer.v_proj(rows).view(shape).transpose(0, 1)
        return pairs

    @torch.inference_mode()
    def visible(self, image: PromptImage) -> int:
        """How many rows of an image's embedding are not padding, of a model with cross-attention; from its file's head.

        Raises RequestError for a file that cannot be read.
        """
        from transformers.models.mllama.image_processing_pil_mllama import get_optimal_tiled_canvas

        width, height = _size(image)
        side = int(self._processor.size["height"])
        try:
            canvas = get_optimal_tiled_canvas(height, width, self._processor.max_image_tiles, side)
        except (ValueError, ZeroDivisionError) as error:
            raise RequestError(f"{_name(image)} cannot be prepared for the model: {_one_line(error)}") from error
        tiles = int(canvas[0]) // side * (int(canvas[1]) // side)
        return tiles * int(self._model.model.vision_model.num_patches)

    def _cross_layers(self) -> dict[int, Any]:
        model = self._model.model.language_model
        return {number: model.layers[number].cross_attn for number in model.cross_attention_layers}

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings ``[1, n, hidden]`` of token ids ``[1, n]``, a new tensor."""
        rows: torch.Tensor = self._model.get_input_embeddings()(ids)
        return rows

    def _grid(self, image: PromptImage) -> tuple[int, int, int]:
        """Patches of an image in time, height and width, from the size in its file's head."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self._processor
        width, height = _size(image)
        try:
            height, width = smart_resize(
                height,
                width,
                factor=processor.patch_size * processor.merge_size,
                min_pixels=processor.size["shortest_edge"],
                max_pixels=processor.size["longest_edge"],
            )
        except ValueError as error:
            raise RequestError(f"{_name(image)} cannot be prepared for the model: {_one_line(error)}") from error
        return 1, height // processor.patch_size, width // processor.patch_size


def _open(image: PromptImage) -> Image.Image:
    """An image as transformers' `load_image` gives it: turned as its camera was held, in RGB."""
    try:
        return ImageOps.exif_transpose(Image.open(io.BytesIO(image.data))).convert("RGB")
    except Exception as error:  # each format's decoder fails in its own ways
        raise _unreadable(image, error) from error


def _size(image: PromptImage) -> tuple[int, int]:
    """Width and height of what `_open` gives, from the file's head."""
    try:
        opened = Image.open(io.BytesIO(image.data))
        width, height = opened.size
        return (height, width) if opened.getexif().get(_ORIENTATION) in _ON_ITS_SIDE else (width, height)
    except Exception as error:  # as above
        raise _unreadable(image, error) from error


def _unreadable(image: PromptImage, error: Exception) -> RequestError:
    return RequestError(f"{_name(image)} cannot be read: {_one_line(error)}; send a whole file")


def _name(image: PromptImage) -> str:
    return f"the image at token {image.first} ({len(image.data)} bytes)"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
