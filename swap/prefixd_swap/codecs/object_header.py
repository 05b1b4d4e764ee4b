"""The header of a coded object: what a store keeps in place of a part's bytes begins with it.

    fixed     magic, version, codec, dtype, axes, sizes, lengths, checksums of decoded bytes, payload  `_FIXED`
    errors    f32 each, little-endian: of each layer the largest one, then of each layer the RMS; none: lossless
    check     u64, xxh3_64 of the header before it
    payload   what the codec has made

A header describes its object: whoever has the object alone can decode it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import xxhash

from prefixd_swap.codecs.codec import LayerErrors, UInt8s
from prefixd_swap.codecs.part_shape import AXES, PartShape
from prefixd_swap.codecs.registry import CODECS, NAMES
from prefixd_swap.errors import EncodingError, GeometryError

VERSION: Final = 1
_MAGIC: Final = b"pfxC"
_FIXED: Final = struct.Struct("<4sBBB5s4xQQQ6I")
_CHECK: Final = struct.Struct("<Q")
_DTYPES: Final = (None, "bfloat16", "float16", "float32")
_NO_SHAPE: Final = (0, bytes(5), (0, 0, 0, 0))
_SHAPES: Final = 256  # that are kept: a daemon's namespaces have few


@dataclass(frozen=True, slots=True)
class Header:
    """What a coded object is.

    Attributes:
        codec: the codec's name: "int8".
        nbytes: bytes of the part when decoded.
        checksum: xxh3_64 of the decoded bytes; of a lossy codec they are not the exact ones.
        payload_nbytes: encoded bytes, which follow the header.
        shape: how the part's numbers lie, if that is known.
        errors: what a lossy codec has altered.
        payload_check: `check_of` the payload, for readers that do not decode on the host; 0: not there.
    """

    codec: str
    nbytes: int
    checksum: int
    payload_nbytes: int
    shape: PartShape | None
    errors: LayerErrors | None
    payload_check: int = 0

    def pack(self) -> bytes:
        """The header as it is stored."""
        dtype, axes, sizes = _NO_SHAPE
        if self.shape is not None:
            dtype = _DTYPES.index(self.shape.dtype)
            axes = bytes(AXES.index(axis) for axis in self.shape.order)
            sizes = (self.shape.layers, self.shape.tokens, self.shape.heads, self.shape.channels)
        layers = 0 if self.errors is None else len(self.errors.rms)
        lengths = (self.nbytes, self.payload_nbytes, self.checksum)
        packed = _FIXED.pack(
            _MAGIC, VERSION, CODECS[self.codec], dtype, axes, *lengths, *sizes, layers, self.payload_check
        )
        if self.errors is not None:
            packed += np.concatenate((self.errors.largest, self.errors.rms)).astype("<f4").tobytes()
        return packed + _CHECK.pack(xxhash.xxh3_64_intdigest(packed))

    @property
    def header_nbytes(self) -> int:
        """Bytes before the payload."""
        return header_nbytes(0 if self.errors is None else len(self.errors.rms))


def header_nbytes(error_layers: int) -> int:
    """Bytes of a header with the errors of so many layers."""
    return _FIXED.size + 8 * error_layers + _CHECK.size


def read_header(stored: UInt8s) -> Header:
    """The header of a coded object, which is whole; the payload is not looked at.

    Raises:
        EncodingError: these bytes are not a coded object, or one of a newer version.
    """
    if stored.size < header_nbytes(0):
        raise EncodingError(f"{stored.size} bytes are not a coded object, which has {header_nbytes(0)} at least")
    magic, version, codec, dtype, axes, nbytes, payload, checksum, *sizes, layers, payload_check = _FIXED.unpack_from(
        data := stored.data
    )
    if magic != _MAGIC:
        raise EncodingError(f"a coded object begins with {_MAGIC!r}, not with {magic!r}")
    if version != VERSION:
        raise EncodingError(f"a coded object has version {version}; this prefixd reads version {VERSION}")
    if header_nbytes(layers) + payload != stored.size:
        raise EncodingError(
            f"{stored.size} bytes are not a coded object with errors of {layers} layers and {payload} encoded bytes"
        )
    end = header_nbytes(layers) - _CHECK.size
    if xxhash.xxh3_64_intdigest(data[:end]) != _CHECK.unpack_from(data, end)[0]:
        raise EncodingError("the header of a coded object is damaged: its checksum differs")
    if codec not in NAMES:
        raise EncodingError(f"a coded object has codec {codec}; this prefixd has {', '.join(CODECS)}")
    shape = _read_shape(dtype, axes, *sizes)
    if shape is not None and shape.nbytes != nbytes:
        raise EncodingError(f"a part of {nbytes} bytes cannot be {shape}, which has {shape.nbytes}")
    if layers and (shape is None or layers != shape.layers):
        raise EncodingError(f"a coded object has errors of {layers} layers, and is {shape}")
    errors = stored[_FIXED.size : end].copy().view("<f4").reshape(2, layers) if layers else None
    measured = None if errors is None else LayerErrors(errors[0], errors[1])
    return Header(NAMES[codec], nbytes, checksum, payload, shape, measured, payload_check)


def check_of(payload: UInt8s) -> int:
    """The lower half of the payload's xxh3_64, and 1 instead of 0."""
    return xxhash.xxh3_64_intdigest(payload.data) & 0xFFFFFFFF or 1


@lru_cache(_SHAPES)
def _read_shape(dtype: int, axes: bytes, layers: int, tokens: int, heads: int, channels: int) -> PartShape | None:
    if (dtype, axes, (layers, tokens, heads, channels)) == _NO_SHAPE:
        return None
    if not 0 < dtype < len(_DTYPES) or max(axes) >= len(AXES):
        raise EncodingError(f"a coded object has dtype {dtype} and axes {list(axes)}, which no part has")
    try:
        return PartShape(str(_DTYPES[dtype]), layers, tokens, heads, channels, tuple(AXES[axis] for axis in axes))
    except GeometryError as error:
        raise EncodingError(f"a coded object has a shape that no part has: {error}") from error
