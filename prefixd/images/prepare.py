"""Prepares an image as bytes for a model: transformers' own processor resizes it, cuts it and lays it out.

The processor's last step scales the values of each channel, which a table of 256 numbers for each channel replaces
(`scales`). So the worker gets bytes, a quarter of the size of floats, and looks them up in the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image that a processor has laid out.

    Attributes:
        pixels: pixels of its tiles, uint8 `[..., 3, height, width]`, or, for models that read patches (Qwen2.5-VL), of
            its patches without repetitions, `[patches, 3, pixels]`.
        inputs: the processor's other arrays, by name.
    """

    pixels: Pixels
    inputs: dict[str, npt.NDArray[Any]]


def prepare_image(image: Image.Image, processor: Any) -> PreparedImage:
    """Lays out an RGB image with a processor of transformers (backend "pil"). Raises the processor's errors."""
    made = processor(images=[image], return_tensors="np", do_rescale=False, do_normalize=False)
    pixels = made["pixel_values"]
    if (times := _count_frames(processor)) is not None:  # a patch has several frames of a video; an image repeats one
        pixels = pixels.reshape(len(pixels), 3, times, -1)[:, :, 0]
    inputs = {name: value for name, value in made.items() if name != "pixel_values" and isinstance(value, np.ndarray)}
    return PreparedImage(np.ascontiguousarray(pixels, np.uint8), inputs)


def scales(processor: Any) -> npt.NDArray[np.float32]:
    """Returns the processor's result for each value of each channel, ``[3, 256]``, bit for bit."""
    values: Any = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (3, 16, 16))
    if processor.do_rescale:
        values = processor.rescale(values, processor.rescale_factor)
    if processor.do_normalize:
        values = processor.normalize(values, processor.image_mean, processor.image_std)
    return np.asarray(values, np.float32).reshape(3, 256)


def scaled(prepared: PreparedImage, table: npt.NDArray[np.float32], processor: Any) -> npt.NDArray[np.float32]:
    """Returns the `pixel_values` that the processor makes of the image. `table`: the processor's `scales`."""
    pixels, times = prepared.pixels, _count_frames(processor)
    channel = 1 if times is not None else pixels.ndim - 3
    values = np.empty(pixels.shape, np.float32)
    for number in range(3):
        np.moveaxis(values, channel, 0)[number] = table[number][np.moveaxis(pixels, channel, 0)[number]]
    if times is not None:
        return np.repeat(values[:, :, None], times, axis=2).reshape(len(values), -1)
    mask = prepared.inputs.get("aspect_ratio_mask")
    if mask is not None:  # tiles that the image does not have are zeros after scaling too (Llama 3.2)
        values[mask == 0] = 0
    return values


def _count_frames(processor: Any) -> int | None:
    times = getattr(processor, "temporal_patch_size", None)
    return None if times is None else int(times)
