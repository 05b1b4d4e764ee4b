"""Checks and bounds the encoded images of a prompt before they are decoded, and names them by their content.

The cost of decoding is bounded before it begins. Bytes and pixels alone do not bound it: each scan of a JPEG goes over
all pixels, and takes 28 bytes if it changes none of them; each chunk of a PNG is a turn of a loop, and takes 12 bytes.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from prefixd.base.errors import InvalidArgumentError
from prefixd.images.token_counts import ImageProcessor

MOST_SCANS = 64
"""Most scans of a JPEG. libjpeg's progressive files have 10, mozjpeg's up to 23; the format allows any number."""
MOST_SEGMENTS = 1024
"""Most segments of a JPEG: tables, and metadata in pieces of 64 KiB."""
MOST_CHUNKS = 1 << 14
"""Most chunks of a PNG. Encoders write 8 KiB and more in each."""
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
    """32 bytes: SHA-256 of the digest of the model's image processor and of a file."""
    digest = hashlib.sha256(processor.digest)
    digest.update(data)
    return digest.digest()


def check_file(data: bytes, number: int, limits: ImageLimits) -> None:
    """Checks the bytes and pieces of a file without decoding it. Raises InvalidArgumentError."""
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
    """Counts scans and segments as a decoder finds them, up to the end of the image or of the markers."""
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
                f"{name} is a JPEG of more than {MOST_SCANS} scans, each of which goes over all of its pixels; save it "
                "anew"
            )
        if segments > MOST_SEGMENTS:
            raise InvalidArgumentError(f"{name} is a JPEG of more than {MOST_SEGMENTS} segments; save it anew")
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
            raise InvalidArgumentError(f"{name} is a PNG of more than {MOST_CHUNKS} chunks; save it anew")
        at += 12 + int.from_bytes(data[at : at + 4], "big")
