"""The lossy codecs: int8 keys with scale and center by channel, int8 or int4 values with scales by token and head.

Keys have channels that are far larger than the others, in all tokens; values have such tokens. So a scale of keys is
shared along tokens, and one of values along channels (KIVI, arXiv 2402.02750). How a part is encoded:
`kernels/number_tiles.py`, `kernels/int4_groups.py`.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from prefixd_swap.codecs.codec import Bools, Codec, Int64s, Refused, UInt8s, UInt64s
from prefixd_swap.codecs.kernels.floats import WORDS
from prefixd_swap.codecs.kernels.int4_groups import group_bytes
from prefixd_swap.codecs.kernels.number_tiles import encode_part
from prefixd_swap.codecs.kernels.object_runs import decode_objects
from prefixd_swap.codecs.kernels.scales import BASE_BYTES
from prefixd_swap.codecs.kernels.words import layout_of, readable_words, writable_words
from prefixd_swap.codecs.kernels.xxh3 import LEAST_BYTES
from prefixd_swap.codecs.part_shape import DTYPE_BYTES, PartShape
from prefixd_swap.errors import EncodingError

LEAST_CHANNELS = 16
"""Engines' heads have 64 or more. Rows of one channel take 14 times as long to encode as rows of 128, rows of 16 twice
as long: a client that says a shape of its own must not keep the threads from the blocks of others."""
_UNKNOWN = np.empty((0, 2), np.uint64)  # checksums


class QuantizedCodec(Codec):
    """Keys int8, values int8 or int4."""

    lossy: ClassVar[bool] = True
    wide_values: ClassVar[bool]
    """Values are int8; else int4."""
    int4_group: ClassVar[int] = 64
    """Channels of int4 values with levels of their own."""

    def takes(self, nbytes: int, shape: PartShape | None) -> bool:
        """Parts of a known shape with rows of some length."""
        return shape is not None and shape.nbytes == nbytes and shape.channels >= LEAST_CHANNELS

    def encode(self, data: UInt8s, shape: PartShape | None) -> UInt8s | Refused:
        """Tiles; refused where a number is not finite, or scales of a few tokens take more than numbers save."""
        if shape is None or shape.nbytes != data.size:
            return Refused.NOT_TAKEN
        nbytes = self.encoded_nbytes(shape)
        if nbytes >= data.size:
            return Refused.NOT_FEWER
        encoded = np.empty(nbytes, np.uint8)
        words = readable_words(data, WORDS[shape.dtype])
        if not encode_part(words, *layout_of(shape), self.int4_group, self.wide_values, encoded):
            return Refused.NOT_FINITE
        return encoded

    def decode(self, encoded: UInt8s, shape: PartShape | None, into: UInt8s) -> None:
        """Tiles of exactly the shape's bytes; whatever is in them is numbers."""
        if shape is None or shape.nbytes != into.size:
            raise EncodingError(f"a part of {into.size} bytes cannot be {self.name} of {shape}")
        if encoded.size != (expected := self.encoded_nbytes(shape)):
            raise EncodingError(f"{encoded.size} bytes cannot be {self.name} of {shape}, which takes {expected}")
        with writable_words(into, WORDS[shape.dtype]) as words:
            data, at = np.ascontiguousarray(encoded), np.array([words.ctypes.data], np.uint64)
            of = np.array([data.ctypes.data], np.uint64), np.array([data.size], np.int64)
            self._decode(*of, _UNKNOWN, shape, at)

    def decode_objects(
        self,
        objects: UInt64s,
        nbytes: Int64s,
        checksums: UInt64s,
        payload_nbytes: int,
        shape: PartShape | None,
        targets: UInt64s,
    ) -> Bools | None:
        """One by one where a payload has not the shape's bytes or very few, or a target's words are not aligned."""
        if shape is None or payload_nbytes != self.encoded_nbytes(shape) or payload_nbytes < LEAST_BYTES:
            return None
        if (targets % np.uint64(DTYPE_BYTES[shape.dtype])).any():
            return None
        return self._decode(objects, nbytes, checksums, shape, targets)

    def _decode(
        self, objects: UInt64s, nbytes: Int64s, checksums: UInt64s, shape: PartShape, targets: UInt64s
    ) -> Bools:
        good, like = np.empty(len(objects), np.bool_), np.empty(0, WORDS[shape.dtype])
        how = self.encoded_nbytes(shape), *layout_of(shape), self.int4_group, self.wide_values
        count = shape.nbytes // like.itemsize
        decode_objects(objects, nbytes, *how, targets, count, like, checksums, good)
        return good

    def encoded_nbytes(self, shape: PartShape) -> int:
        """Bytes of an encoded part."""
        tokens, channels = shape.tokens, shape.channels
        keys = BASE_BYTES + channels + -(-channels // 2) + tokens * channels
        values = BASE_BYTES + tokens * (1 + channels)
        if not self.wide_values:
            values = group_bytes(tokens, channels, self.int4_group)
        return shape.layers * shape.heads * (keys + values)


class Int8Codec(QuantizedCodec):
    """Keys and values int8: 0.53 of 16-bit numbers in blocks of 16 tokens, 0.51 in blocks of 64."""

    name: ClassVar[str] = "int8"
    number: ClassVar[int] = 2
    most_error: ClassVar[float] = 0.03
    wide_values: ClassVar[bool] = True


class K8V4Codec(QuantizedCodec):
    """Keys int8, values int4: 0.41 of 16-bit numbers in blocks of 16 tokens, 0.39 in blocks of 64."""

    name: ClassVar[str] = "k8v4"
    number: ClassVar[int] = 3
    most_error: ClassVar[float] = 0.2
    wide_values: ClassVar[bool] = False
