"""Decodes an image of a prompt, or reports its fault. Only this module and `prepare` need pillow."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image, ImageOps, UnidentifiedImageError

from prefixd.base.errors import InvalidArgumentError
from prefixd.images.image_files import ImageLimits, check_file
from prefixd.images.token_counts import ImageProcessor

FORMATS = ("PNG", "JPEG", "WEBP")
_ORIENTATION = 0x0112  # in Exif: 5 to 8 lay the image on its side
_ON_ITS_SIDE = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """A decoded image.

    Attributes:
        image: upright, in RGB.
        tokens: its placeholders in the prompt.
    """

    image: Image.Image
    tokens: int


def check_image(data: bytes, number: int, processor: ImageProcessor, limits: ImageLimits) -> CheckedImage:
    """Decodes an image, which takes up to a second: call it in a process that can be killed (`decode_process`).

    Args:
        data: the file.
        number: index of the image in the prompt, from 0.
        processor: of the model.
        limits: checked before the image is decoded.

    Raises:
        InvalidArgumentError: the image is too large, is not a PNG, JPEG or WebP, is damaged, incomplete or animated, or
            has too many scans.
    """
    name = f"images[{number}]"
    check_file(data, number, limits)
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            frames = getattr(image, "n_frames", 1)
            decoded = None
            if width * height <= limits.image_pixels and frames == 1:
                if image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                    width, height = height, width
                tokens = _count_tokens(name, processor, width, height)
                image.load()
                decoded = ImageOps.exif_transpose(image).convert("RGB")
    except InvalidArgumentError:
        raise
    except UnidentifiedImageError as error:  # its text is of no use: it names an object in memory
        raise InvalidArgumentError(
            f"{name} ({len(data)} bytes) cannot be read as PNG, JPEG or WebP: it has another format; send a whole file "
            "in one of these formats"
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidArgumentError(
            f"{name} has too many pixels, and worker.image_pixels allows {limits.image_pixels}; make it smaller"
        ) from error
    except Exception as error:  # each format's decoder fails in its own ways
        raise InvalidArgumentError(
            f"{name} ({len(data)} bytes) cannot be read as PNG, JPEG or WebP: "
            f"{' '.join(str(error).split())[:200] or type(error).__name__}; send a whole file in one of these formats"
        ) from error
    if width * height > limits.image_pixels:
        raise InvalidArgumentError(
            f"{name} has {width} x {height} pixels, and worker.image_pixels allows {limits.image_pixels}; "
            "make it smaller"
        )
    if decoded is None:
        raise InvalidArgumentError(f"{name} has {frames} frames; send a file with a single image")
    return CheckedImage(decoded, tokens)


def _count_tokens(name: str, processor: ImageProcessor, width: int, height: int) -> int:
    try:
        return processor.counts.tokens(height, width)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name} cannot be used: {error}") from error
