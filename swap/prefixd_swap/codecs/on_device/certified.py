"""Coded objects whose tiles were made on the device."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from prefixd_swap.codecs.codec import LayerErrors, Refused, UInt8s
from prefixd_swap.codecs.coding import Coded
from prefixd_swap.codecs.object_header import Header, check_of, header_nbytes, read_header
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.quantized import Int8Codec
from prefixd_swap.errors import EncodingError

_CODEC = Int8Codec()


def object_nbytes(shape: PartShape) -> int:
    """Bytes of an object, header and all: the same for all parts of a shape."""
    return header_nbytes(shape.layers) + _CODEC.encoded_nbytes(shape)


def certify(
    data: UInt8s, measured: npt.NDArray[np.float64], shape: PartShape, most_error: float | None = None
) -> Coded | Refused:
    """Completes an object; or says why the part must not be kept like that.

    The errors are those that the device has measured. The checksum is that of the decoded bytes, which are nowhere in
    host memory: so they are decoded here, and thrown away. That takes the time of a read.

    Args:
        data: of `object_nbytes`: any bytes, and then the tiles. The header is written into it.
        measured: ``[tiles, 3]``, see `encode_parts`.
        shape: of the part.
        most_error: the largest relative RMS error of a layer; None: the codec's own bound.
    """
    if not _CODEC.takes(shape.nbytes, shape):
        return Refused.NOT_TAKEN
    if data.size >= shape.nbytes:
        return Refused.NOT_FEWER
    if not np.isfinite(measured).all():
        return Refused.NOT_FINITE
    errors = _errors_of(measured, shape)
    if not errors.rms.max() <= (_CODEC.most_error if most_error is None else most_error):
        return Refused.ABOVE_BOUND
    payload = data[header_nbytes(shape.layers) :]
    decoded = np.empty(shape.nbytes, np.uint8)
    _CODEC.decode(payload, shape, decoded)
    checksum = xxhash.xxh3_64_intdigest(decoded.data)
    header = Header(_CODEC.name, shape.nbytes, checksum, payload.size, shape, errors, check_of(payload)).pack()
    data[: len(header)] = np.frombuffer(header, np.uint8)
    return Coded(data, checksum, errors, _CODEC.name)


def check_object(data: UInt8s, shape: PartShape) -> None:
    """Verifies an object that a device is to decode, without decoding it.

    Args:
        data: what `certify` has completed.
        shape: of the part.

    Raises:
        EncodingError: the object is damaged, or is none of such a part.
    """
    header = read_header(data)
    if (header.codec, header.shape) != (_CODEC.name, shape) or data.size != object_nbytes(shape):
        raise EncodingError(f"an object of {header.codec} of {header.shape} was read for one of {shape}")
    if header.payload_check != check_of(data[header.header_nbytes :]):
        raise EncodingError("the tiles of a coded object are damaged: their checksum differs")


def _errors_of(measured: npt.NDArray[np.float64], shape: PartShape) -> LayerErrors:
    """Of each layer, as `measure_errors`: keys or values, whichever is further away."""
    tiles = measured.reshape(shape.layers, shape.heads, 2, 3)
    power, noise = tiles[..., 0].sum(axis=1), tiles[..., 1].sum(axis=1)
    most = tiles[..., 2].max(axis=1)
    zeros = np.where(most > 0, np.inf, 0.0)  # where all were zeros and some are others now
    largest, rms = zeros.copy(), zeros
    there = power > 0
    largest[there] = most[there] / np.sqrt(power[there] / (shape.tokens * shape.heads * shape.channels))
    rms[there] = np.sqrt(noise[there] / power[there])
    return LayerErrors(largest.max(axis=1).astype(np.float32), rms.max(axis=1).astype(np.float32))
