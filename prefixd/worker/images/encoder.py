"""Computes an image's embedding from its pixels: scales the colours as transformers does, runs the vision encoder."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from prefixd.images.prepare import PreparedImage, scaled, scales
from prefixd.worker.images.cross_images import CrossPairs
from prefixd.worker.images.kinds import ImageKind
from prefixd.worker_protocol.errors import RequestError
from prefixd.worker_protocol.protocol import PromptImage


class ImageEncoder:
    """Embeds one image at a time, so that an embedding's bits depend on its image alone.

    Args:
        model: transformers' model, with its weights.
        processor: transformers' image processor of it.
        kind: of the model's family.
        pixels_fd: of the memory in which pixels lie.
    """

    def __init__(self, model: Any, processor: Any, kind: ImageKind, pixels_fd: int) -> None:
        self.kind = kind
        self._model = model
        self._processor = processor
        self._scales = scales(processor)
        self._pixels_fd = pixels_fd
        weight = model.get_input_embeddings().weight
        self._device, self._dtype = weight.device, weight.dtype

    @torch.inference_mode()
    def encode(self, image: PromptImage) -> torch.Tensor:
        """The embedding of an image, ``[rows, hidden]``, in the model's type on its device, a row a placeholder.

        Of a model with cross-attention it has a row a patch, tiles that are padding included.

        Raises RequestError for pixels that are not there.
        """
        inputs = {name: _input(image, name) for name in self.kind.inputs}
        values = scaled(PreparedImage(self._read(image), inputs), self._scales, self._processor)
        arguments = {name: torch.from_numpy(array).to(self._device) for name, array in inputs.items()}
        pixels = torch.from_numpy(values).to(self._device, self._dtype)
        if self.kind.cross:
            made = self._model.model.vision_model(pixel_values=pixels, **arguments).last_hidden_state
            rows: torch.Tensor = self._model.model.multi_modal_projector(made).flatten(0, 3)
            return rows
        made = self._model.get_image_features(pixel_values=pixels, **arguments).pooler_output
        return torch.cat([*made]).to(self._dtype)  # a tensor or a tuple with an entry an image

    @torch.inference_mode()
    def positions(self, tokens: int, images: Sequence[PromptImage]) -> torch.Tensor | None:
        """Rotary positions ``[3, tokens]`` on the CPU of a prompt of `tokens` tokens with these images.

        None where a token's position is its place. Raises RequestError for images with other numbers of placeholders.
        """
        if not self.kind.grid_positions or not images:
            return None
        types = torch.zeros((1, tokens), dtype=torch.int64)
        for image in images:
            types[0, image.first : image.first + image.tokens] = 1
        grids = [_input(image, "image_grid_thw")[0].tolist() for image in images]
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
    def cross_pairs(self, rows: torch.Tensor) -> CrossPairs:
        """Keys and values of an image, whose embedding has these rows, in the layers that attend to it."""
        pairs = {}
        for number, layer in self._cross_layers().items():
            shape = (len(rows), layer.num_key_value_heads, layer.head_dim)
            keys = layer.k_norm(layer.k_proj(rows).view(shape).transpose(0, 1))
            pairs[number] = keys, layer.v_proj(rows).view(shape).transpose(0, 1)
        return pairs

    def visible(self, image: PromptImage) -> int:
        """Rows of an image that are not padding, of a model with cross-attention. Raises RequestError."""
        tiles = int(_input(image, "aspect_ratio_mask").sum())
        return tiles * int(self._model.model.vision_model.num_patches)

    def _read(self, image: PromptImage) -> npt.NDArray[np.uint8]:
        """An image's pixels, from the shared memory. Raises RequestError."""
        pixels = image.pixels
        data = bytearray(math.prod(pixels.shape))
        read, left = 0, memoryview(data)
        try:
            while left and (count := os.preadv(self._pixels_fd, [left], pixels.offset + read)):
                read, left = read + count, left[count:]
        except OSError as error:
            raise RequestError(f"{_name(image)} cannot be read: {error.strerror}; send it again") from error
        if left:
            raise RequestError(f"{_name(image)} ends after {read} bytes; send it again")
        return np.frombuffer(data, np.uint8).reshape(pixels.shape)

    def _cross_layers(self) -> dict[int, Any]:
        model = self._model.model.language_model
        return {number: model.layers[number].cross_attn for number in model.cross_attention_layers}

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings ``[1, n, hidden]`` of token ids ``[1, n]``, a new tensor."""
        rows: torch.Tensor = self._model.get_input_embeddings()(ids)
        return rows


def _input(image: PromptImage, name: str) -> npt.NDArray[Any]:
    """What came with the pixels. Raises RequestError."""
    try:
        array = image.pixels.inputs[name]
        return np.frombuffer(array.data, array.dtype).reshape(array.shape).copy()
    except (KeyError, TypeError, ValueError) as error:
        raise RequestError(
            f"{_name(image)} came without {name}; daemon and worker must come from the same installation of prefixd"
        ) from error


def _name(image: PromptImage) -> str:
    return f"the image at token {image.first} (pixels {list(image.pixels.shape)})"
