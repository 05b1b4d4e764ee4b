"""Checks the encoded images of a prompt before they are decoded, and identifies them by their content.

The checks bound the cost of decoding. Limits of bytes and pixels are not enough: each scan of a JPEG goes over all
pixels, but may have only 28 bytes; each chunk of a PNG costs one turn of a loop, but may have only 12 bytes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from prefixd.base.errors import InvalidArgumentError
from prefixd.images.token_counts import ImageProcessor

MOST_SCANS = 64
"""Most scans of a JPEG. Progressive files of libjpeg have 10, of mozjpeg up to 23; the format allows any number."""
MOST_SEGMENTS = 1024
"""Most segments of a JPEG: tables, and metadata in pieces of 64 KiB."""
MOST_CHUNKS = 1 << 14
"""Most chunks of a PNG. Encoders write 8 KiB or more into each."""
_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8"
_MARKER = re.compile(rb"\xff+([^\x00\xff])", re.DOTALL)
_END_OF_DATA = re.compile(rb"\xff+[^\x00\xff\xd0-\xd7]", re.DOTALL)
_SOS, _EOI, _BARE = 0xDA, 0xD9, frozenset([0x01, *range(0xD0, 0xD9)])


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of a prompt's images.

    Attributes:
        images: most images of a prompt.
        image_bytes: most bytes of an image's file.
        image_pixels: most pixels of a decoded image.
        image_seconds: most processor time to decode an image and to resize it for the model.
    """

    images: int
    image_bytes: int
    image_pixels: int
    image_seconds: int = 10


def image_digest(data: bytes, processor: ImageProcessor) -> bytes:
    """Returns 32 bytes: SHA-256 over the digest of the model's image processor and the file."""
    digest = hashlib.sha256(processor.digest)
    digest.update(data)
    return digest.digest()


def check_file(data: bytes, number: int, limits: ImageLimits) -> None:
    """Checks the size, scans, segments and chunks of a file without decoding it. Raises InvalidArgumentError."""
    name = f"images[{number}]"
    if len(data) > limits.image_bytes:
        raise InvalidArgumentError(
            f"{name} has {len(data)} bytes, and worker.image_bytes allows {limits.image_bytes}; compress it more"
        )
    if data.startswith(_JPEG):
        _check_jpeg(data, name)
    elif data.startswith(_PNG):
        _check_png(data, name)


def _check_jpeg(data: bytes, name: str) -> None:
    """Counts scans and segments as a decoder does, up to the end of the image or to the last marker."""
    at, scans, segments = len(_JPEG), 0, 0
    while marker := _MARKER.search(data, at):
        kind, at = marker[1][0], marker.end()
        if kind == _EOI:
            return
        if kind in _BARE:
            continue
        segments += 1
        scans += kind == _SOS
        if scans > MOST_SCANS:
            raise InvalidArgumentError(
                f"{name} is a JPEG with more than {MOST_SCANS} scans, each over all of its pixels; save it again"
            )
        if segments > MOST_SEGMENTS:
            raise InvalidArgumentError(f"{name} is a JPEG with more than {MOST_SEGMENTS} segments; save it again")
        at += int.from_bytes(data[at : at + 2], "big")
        if kind == _SOS:
            end = _END_OF_DATA.search(data, at)
            if end is None:
                return
            at = end.start()


def _check_png(data: bytes, name: str) -> None:
    at, chunks = len(_PNG), 0
    while at < len(data):
        chunks += 1
        if chunks > MOST_CHUNKS:
            raise InvalidArgumentError(f"{name} is a PNG with more than {MOST_CHUNKS} chunks; save it again")
        at += 12 + int.from_bytes(data[at : at + 4], "big")
