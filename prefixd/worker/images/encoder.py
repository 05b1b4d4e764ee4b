"""From an image's file to its embedding: transformers' image processor, then the model's vision encoder."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image, ImageOps

from prefixd.worker.errors import RequestError
from prefixd.worker.images.feature_store import FeatureStore
from prefixd.worker.images.kinds import ImageKind
from prefixd.worker.protocol import PromptImage


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
    def encode(self, image: PromptImage) -> torch.Tensor:
        """The embedding of an image, ``[image.tokens, hidden]`` in the model's type on its device; not kept here.

        Raises RequestError for a file that cannot be read, and when the embedding has another number of rows.
        """
        try:
            inputs = self._processor(images=[_open(image, whole=True)], return_tensors="pt")
        except RequestError:
            raise
        except Exception as error:  # a processor's own code refuses sizes in ways of its own
            raise RequestError(f"{_name(image)} cannot be prepared for the model: {_one_line(error)}") from error
        arguments = {name: inputs[name].to(self._device) for name in self.kind.inputs}
        pixels = inputs["pixel_values"].to(self._device, self._dtype)
        made = self._model.get_image_features(pixel_values=pixels, **arguments).pooler_output
        features = torch.cat([*made]).to(self._dtype)  # a tensor or a tuple with an entry an image
        if len(features) != image.tokens:
            raise RequestError(
                f"{_name(image)} has an embedding of {len(features)} rows, but {image.tokens} placeholders; "
                "repeat the placeholder as the model's processor does"
            )
        return features

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

    def rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The embeddings ``[1, n, hidden]`` of token ids ``[1, n]``, a new tensor."""
        rows: torch.Tensor = self._model.get_input_embeddings()(ids)
        return rows

    def _grid(self, image: PromptImage) -> tuple[int, int, int]:
        """Patches of an image in time, height and width, from the size in its file's head."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor = self._processor
        width, height = _open(image, whole=False).size
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


def _open(image: PromptImage, *, whole: bool) -> Image.Image:
    """An image as transformers' `load_image` gives it: turned as its camera was held, in RGB; `whole`: decoded."""
    try:
        opened = Image.open(io.BytesIO(image.data))
        turned = ImageOps.exif_transpose(opened) if whole or _turned(opened) else opened
        return turned.convert("RGB") if whole else turned
    except Exception as error:  # each format's decoder fails in its own ways
        raise RequestError(f"{_name(image)} cannot be read: {_one_line(error)}; send a whole file") from error


def _turned(opened: Image.Image) -> bool:
    """Whether its camera was held so that the file's first row is not the top."""
    return int(opened.getexif().get(0x0112, 1)) != 1


def _name(image: PromptImage) -> str:
    return f"the image at token {image.first} ({len(image.data)} bytes)"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
