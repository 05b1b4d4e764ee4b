"""Encoded images that came with a prompt: bounded, whole, and named by their content."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass

from PIL import Image, UnidentifiedImageError

from prefixd.errors import InvalidArgumentError
from prefixd.images.token_counts import ImageProcessor

FORMATS = ("PNG", "JPEG", "WEBP")
_ORIENTATION = 0x0112  # in Exif: 5 to 8 lay the image on its side
_ON_ITS_SIDE = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What a prompt may bring.

    Attributes:
        images: of a prompt.
        image_bytes: of an image's file.
        image_pixels: of an image, decoded.
    """

    images: int
    image_bytes: int
    image_pixels: int


@dataclass(frozen=True, slots=True)
class CheckedImage:
    """An image that decodes.

    Attributes:
        data: its file.
        digest: 32 bytes: SHA-256 of its file and of what the model's image processor does with it.
        tokens: its placeholders in the prompt.
    """

    data: bytes
    digest: bytes
    tokens: int


def check_image(data: bytes, number: int, processor: ImageProcessor, limits: ImageLimits) -> CheckedImage:
    """Decodes an image once, to know that the worker can. Takes up to a second: not for the event loop.

    Args:
        data: the file. `number`: which of the prompt's, from 0.
        processor: of the model.
        limits: refused above them, before anything is decoded.

    Raises:
        InvalidArgumentError: it is too large, no PNG, JPEG or WebP, damaged, incomplete, or moves.
    """
    name = f"images[{number}]"
    if len(data) > limits.image_bytes:
        raise InvalidArgumentError(
            f"{name} has {len(data)} bytes, and worker.image_bytes allows {limits.image_bytes}; compress it more"
        )
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height <= limits.image_pixels:
                frames = getattr(image, "n_frames", 1)
                image.load()
                if image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE:
                    width, height = height, width
    except UnidentifiedImageError as error:  # its text names an object in memory
        raise InvalidArgumentError(
            f"{name} ({len(data)} bytes) cannot be read as PNG, JPEG or WebP: it is none of them; send a whole file of "
            "these formats"
        ) from error
    except Image.DecompressionBombError as error:
        raise InvalidArgumentError(
            f"{name} has too many pixels, and worker.image_pixels allows {limits.image_pixels}; make it smaller"
        ) from error
    except Exception as error:  # each format's decoder fails in its own ways
        raise InvalidArgumentError(
            f"{name} ({len(data)} bytes) cannot be read as PNG, JPEG or WebP: "
            f"{' '.join(str(error).split())[:200] or type(error).__name__}; send a whole file of these formats"
        ) from error
    if width * height > limits.image_pixels:
        raise InvalidArgumentError(
            f"{name} has {width} x {height} pixels, and worker.image_pixels allows {limits.image_pixels}; "
            "make it smaller"
        )
    if frames > 1:
        raise InvalidArgumentError(f"{name} has {frames} frames; send one image a file")
    digest = hashlib.sha256(processor.digest)
    digest.update(data)
    try:
        tokens = processor.counts.tokens(height, width)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{name} cannot be used: {error}") from error
    return CheckedImage(data, digest.digest(), tokens)
