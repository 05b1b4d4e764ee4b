"""The lossless codec: planes of bytes of the same significance, each compressed by zstd or as it is.

An encoded part:

    split    u8                      a number of `_SPLITS`
    planes   u64, little-endian      stored bytes of each plane; as many as the plane has: it is raw
    ...      the planes, then the last bytes that are no whole word
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import zstandard

from prefixd_swap.codecs.codec import Codec, Refused, UInt8s
from prefixd_swap.codecs.kernels.planes import join_pairs, join_quads, split_words
from prefixd_swap.codecs.kernels.words import readable_bytes, readable_words, writable_words
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.errors import EncodingError


@dataclass(frozen=True, slots=True)
class _Split:
    """How words become planes."""

    planes: int
    turns: bool
    """Words are turned left by a bit first: the sign goes to the mantissa, and the exponent has a byte of its own."""


_SPLITS: Final = (_Split(1, False), _Split(2, False), _Split(2, True), _Split(4, False), _Split(4, True))
_OF_DTYPE: Final = {"float16": 1, "bfloat16": 2, "float32": 4}
_PLANE: Final = struct.Struct("<Q")
_LEVEL: Final = 1
_SAMPLE: Final = 16 << 10
"""Bytes from the middle of a part that say how to split it, and of a plane that say whether to compress it."""
_WORTH: Final = 0.97
"""A plane whose sample does not become smaller than this is raw."""


class LosslessCodec(Codec):
    """Byte planes and zstd."""

    name: ClassVar[str] = "lossless"
    number: ClassVar[int] = 1
    lossy: ClassVar[bool] = False

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def takes(self, nbytes: int, shape: PartShape | None) -> bool:
        """Any part."""
        return True

    def encode(self, data: UInt8s, shape: PartShape | None) -> UInt8s | Refused:
        """Planes; refused where none of them compresses."""
        data = readable_bytes(data)
        number = _OF_DTYPE[shape.dtype] if shape is not None else self._best_split(data)
        planes, rest = _planes(data, _SPLITS[number])
        stored = [self._compress(plane) for plane in planes]
        head = bytes([number]) + b"".join(_PLANE.pack(len(each)) for each in stored)
        encoded = np.frombuffer(b"".join((head, *stored, rest)), np.uint8)
        return encoded if encoded.size < data.size else Refused.NOT_FEWER

    def decode(self, encoded: UInt8s, shape: PartShape | None, into: UInt8s) -> None:
        """Decompresses no more than the part's bytes."""
        content = readable_bytes(encoded).data
        if not len(content) or content[0] >= len(_SPLITS):
            raise EncodingError(f"{len(content)} bytes are not a lossless part: no way to split it is known for them")
        split = _SPLITS[content[0]]
        words, rest = divmod(into.size, split.planes)
        at = 1 + split.planes * _PLANE.size
        if len(content) < at:
            raise EncodingError(f"{len(content)} bytes are not a lossless part: the planes' lengths are missing")
        lengths = [length for (length,) in _PLANE.iter_unpack(content[1:at])]
        if at + sum(lengths) + rest != len(content):
            raise EncodingError(f"planes of {lengths} and {rest} more bytes are not a lossless part of {len(content)}")
        planes = []
        for length in lengths:
            planes.append(self._decompress(content[at : at + length], words))
            at += length
        _join(planes, split, into[: words * split.planes])
        into[words * split.planes :] = np.frombuffer(content[at:], np.uint8)

    def _best_split(self, data: UInt8s) -> int:
        start = (data.size - _SAMPLE) // 2 & ~3 if data.size > _SAMPLE else 0
        sample = data[start : start + _SAMPLE]
        compress = self._contexts.compressor.compress
        sizes = [sum(len(compress(plane.data)) for plane in _planes(sample, split)[0]) for split in _SPLITS]
        return sizes.index(min(sizes))

    def _compress(self, plane: UInt8s) -> bytes | memoryview:
        compress = self._contexts.compressor.compress
        if plane.size > 4 * _SAMPLE:
            start = (plane.size - _SAMPLE) // 2
            if len(compress(plane[start : start + _SAMPLE].data)) > _WORTH * _SAMPLE:
                return plane.data
        compressed: bytes = compress(plane.data)
        return compressed if len(compressed) < plane.size else plane.data

    def _decompress(self, stored: memoryview, nbytes: int) -> UInt8s:
        if len(stored) == nbytes:
            return np.frombuffer(stored, np.uint8)
        try:
            promised = zstandard.frame_content_size(stored)
            if promised != nbytes:  # checked before memory is taken for it
                raise EncodingError(f"a plane of {nbytes} bytes was compressed as one of {promised}")
            plane = self._contexts.decompressor.decompress(stored, max_output_size=nbytes, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise EncodingError(f"a plane of {nbytes} bytes cannot be decompressed: {error}") from error
        if len(plane) != nbytes:
            raise EncodingError(f"a plane of {nbytes} bytes was decompressed to {len(plane)}")
        return np.frombuffer(plane, np.uint8)


class _Contexts(threading.local):
    """zstd's contexts, which only one thread at a time may use."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


def _planes(data: UInt8s, split: _Split) -> tuple[list[UInt8s], memoryview]:
    """The planes, and the bytes after the last whole word."""
    words, _ = divmod(data.size, split.planes)
    whole, rest = data[: words * split.planes], data[words * split.planes :].data
    if split.planes == 1:
        return [whole], rest
    planes = np.empty((split.planes, words), np.uint8)
    split_words(readable_words(whole, split.planes), split.turns, planes)
    return list(planes), rest


def _join(planes: list[UInt8s], split: _Split, into: UInt8s) -> None:
    if split.planes == 1:
        into[:] = planes[0]
        return
    with writable_words(into, split.planes) as joined:
        if split.planes == 2:
            join_pairs(planes[0], planes[1], split.turns, joined)
        else:
            join_quads(planes[0], planes[1], planes[2], planes[3], split.turns, joined)
