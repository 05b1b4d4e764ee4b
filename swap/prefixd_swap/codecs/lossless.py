"""The lossless codec: planes of bytes of the same significance, each compressed by zstd or as it is.

An encoded part:

    planes    u8                      1, 2 or 4: bytes of a word
    lengths   u64, little-endian      stored bytes of each plane; as many as the plane has: it is raw
    ...       the planes, then the last bytes that are no whole word
"""

from __future__ import annotations

import struct
import threading
from typing import ClassVar, Final

import numpy as np
import zstandard

from prefixd_swap.codecs.codec import Codec, Refused, UInt8s
from prefixd_swap.codecs.kernels.planes import join_pairs, join_quads, split_pairs, split_quads
from prefixd_swap.codecs.kernels.words import readable_bytes, readable_words, writable_words
from prefixd_swap.codecs.part_shape import DTYPE_BYTES, PartShape
from prefixd_swap.errors import EncodingError

_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}
"""Planes of a part, and what its bytes are then."""
_LENGTH: Final = struct.Struct("<Q")
PARAMETERS: Final = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, target_length=0
)
"""Exponents repeat no strings, so zstd is to look for few and leave the bytes to its Huffman coder. Against level 1 it
encodes three times and decodes 1.8 times as fast, and the exponents become 6% smaller."""
_SAMPLE: Final = 16 << 10
"""Bytes from the middle of a part that say how to split it."""
_PLANE_SAMPLE: Final = 4 << 10
"""Bytes from the middle of a plane that say whether to compress it."""
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
        count = self._best_split(data) if shape is None else DTYPE_BYTES[shape.dtype]
        stored = [self._compress(plane) for plane in _split(data, count)]
        head = bytes([count]) + b"".join(_LENGTH.pack(len(each)) for each in stored)
        rest = data[data.size - data.size % count :].data
        encoded = np.frombuffer(b"".join((head, *stored, rest)), np.uint8)
        return encoded if encoded.size < data.size else Refused.NOT_FEWER

    def decode(self, encoded: UInt8s, shape: PartShape | None, into: UInt8s) -> None:
        """Decompresses no more than the part's bytes."""
        content = readable_bytes(encoded).data
        count = content[0] if content else 0
        if count not in _WORDS:
            raise EncodingError(f"{len(content)} bytes are not a lossless part: it has 1, 2 or 4 planes, not {count}")
        nbytes, rest = divmod(into.size, count)
        at = 1 + count * _LENGTH.size
        if len(content) < at:
            raise EncodingError(f"{len(content)} bytes are not a lossless part: the planes' lengths are missing")
        lengths = [length for (length,) in _LENGTH.iter_unpack(content[1:at])]
        if at + sum(lengths) + rest != len(content):
            raise EncodingError(f"planes of {lengths} and {rest} more bytes are not a lossless part of {len(content)}")
        planes = []
        for length in lengths:
            planes.append(self._decompress(content[at : at + length], nbytes))
            at += length
        _join(planes, into[: count * nbytes])
        into[count * nbytes :] = np.frombuffer(content[at:], np.uint8)

    def _best_split(self, data: UInt8s) -> int:
        start = (data.size - _SAMPLE) // 2 & ~3 if data.size > _SAMPLE else 0
        sample = data[start : start + _SAMPLE]
        compress = self._contexts.compressor.compress
        return min(_WORDS, key=lambda count: sum(len(compress(plane.data)) for plane in _split(sample, count)))

    def _compress(self, plane: UInt8s) -> bytes | memoryview:
        compress = self._contexts.compressor.compress
        if plane.size >= 4 * _PLANE_SAMPLE:
            start = (plane.size - _PLANE_SAMPLE) // 2
            if len(compress(plane[start : start + _PLANE_SAMPLE].data)) > _WORTH * _PLANE_SAMPLE:
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
        self.compressor = zstandard.ZstdCompressor(compression_params=PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


def _split(data: UInt8s, count: int) -> list[UInt8s]:
    """The planes; bytes after the last whole word are left out."""
    if count == 1:
        return [data]
    words = readable_words(data[: data.size - data.size % count], _WORDS[count])
    planes = np.empty((count, words.size), np.uint8)
    if count == 2:
        split_pairs(words, planes[0], planes[1])
    else:
        split_quads(words, planes[0], planes[1], planes[2], planes[3])
    return list(planes)


def _join(planes: list[UInt8s], into: UInt8s) -> None:
    if len(planes) == 1:
        into[:] = planes[0]
        return
    with writable_words(into, _WORDS[len(planes)]) as words:
        if len(planes) == 2:
            join_pairs(planes[0], planes[1], words)
        else:
            join_quads(planes[0], planes[1], planes[2], planes[3], words)
