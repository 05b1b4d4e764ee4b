"""Coded objects: a part's bytes become a header and encoded bytes, certified; and bytes again, verified.

`code` decodes what it has encoded, and measures errors and checksum on that: what `decode_object` gives later has this
checksum, and therefore these errors.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import xxhash

from prefixd_swap.codecs.codec import Codec, LayerErrors, Refused, UInt8s
from prefixd_swap.codecs.object_header import Header, header_nbytes, read_header
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import EncodingError, UnavailableCodecError


@dataclass(frozen=True, slots=True)
class Coding:
    """How parts are encoded.

    Attributes:
        codec: as `find_codec` returns it.
        shape: how a part's numbers lie; None: not known.
        most_error: the largest relative RMS error of a layer; None: the codec's own bound.
    """

    codec: Codec
    shape: PartShape | None = None
    most_error: float | None = None


@dataclass(frozen=True, slots=True)
class Coded:
    """A part as a store keeps it.

    Attributes:
        data: the whole object with its header.
        decoded_checksum: xxh3_64 of the bytes that decoding gives.
        errors: what a lossy codec has altered; None: nothing.
        codec: the codec's name.
    """

    data: UInt8s
    decoded_checksum: int
    errors: LayerErrors | None
    codec: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a coded object was decoded to.

    Attributes:
        checksum: xxh3_64 of the decoded bytes.
        codec: the codec's name.
        lossy: the bytes are not the exact ones.
        errors: of each layer; None if the codec is lossless.
        seconds: that decoding and verifying took.
    """

    checksum: int
    codec: str
    lossy: bool
    errors: LayerErrors | None
    seconds: float = 0.0

    @property
    def largest(self) -> float:
        """The largest error of the worst layer, see `LayerErrors`; 0 if the codec is lossless."""
        return 0.0 if self.errors is None else float(self.errors.largest.max())

    @property
    def rms(self) -> float:
        """Likewise the RMS error."""
        return 0.0 if self.errors is None else float(self.errors.rms.max())


def code(data: UInt8s, coding: Coding) -> Coded | Refused:
    """The coded object of a part; or why the part stays as it is.

    Raises:
        EncodingError: what the codec has encoded does not decode: a bug in it.
    """
    codec, shape = coding.codec, coding.shape
    if not codec.takes(data.size, shape) or (shape is not None and shape.nbytes != data.size):
        return Refused.NOT_TAKEN
    encoded = codec.encode(data, shape)
    if isinstance(encoded, Refused):
        return encoded
    layers = shape.layers if codec.lossy and shape is not None else 0
    if header_nbytes(layers) + encoded.size >= data.size:
        return Refused.NOT_FEWER
    decoded, errors = data, None
    if codec.lossy and shape is not None:
        decoded = np.empty(data.size, np.uint8)
        codec.decode(encoded, shape, decoded)
        errors = _measure(data, decoded, shape)
        bound = codec.most_error if coding.most_error is None else coding.most_error
        if not errors.rms.max() <= bound:
            return Refused.ABOVE_BOUND
    checksum = xxhash.xxh3_64_intdigest(decoded.data)
    header = Header(codec.name, data.size, checksum, encoded.size, shape, errors).pack()
    stored = np.empty(len(header) + encoded.size, np.uint8)
    stored[: len(header)] = np.frombuffer(header, np.uint8)
    stored[len(header) :] = encoded
    return Coded(stored, checksum, errors, codec.name)


def code_or_lossless(data: UInt8s, coding: Coding) -> tuple[Coded | None, Refused | None]:
    """As `code`, but a part that a lossy codec refuses for its numbers is coded without loss.

    Returns the object, None where the part stays as it is; and why the chosen codec has refused it.
    """
    made = code(data, coding)
    if isinstance(made, Coded):
        return made, None
    exact = None
    if made in (Refused.ABOVE_BOUND, Refused.NOT_FINITE):
        with suppress(UnavailableCodecError):
            exact = code(data, Coding(find_codec("lossless"), coding.shape))
    return exact if isinstance(exact, Coded) else None, made


def decode_object(stored: UInt8s, into: UInt8s) -> Decoded:
    """Decodes a coded object into the part's bytes, and verifies them.

    Args:
        stored: what `code` gave: the object and nothing else.
        into: the part's bytes. They are garbage after an error.

    Raises:
        EncodingError: the object is damaged, or is none, or one of another part or a newer version.
        UnavailableCodecError: a package that the codec needs is not installed.
    """
    begun_s = time.perf_counter()
    header = read_header(stored)
    if header.nbytes != into.size:
        raise EncodingError(f"a coded object of a part with {header.nbytes} bytes was read for one with {into.size}")
    codec = find_codec(header.codec)
    if codec.lossy and header.errors is None:
        raise EncodingError(f"a coded object of codec {header.codec} does not say how far it is from the exact bytes")
    codec.decode(stored[stored.size - header.payload_nbytes :], header.shape, into)
    if xxhash.xxh3_64_intdigest(into.data) != header.checksum:
        raise EncodingError("the bytes decoded from a coded object are not those that were encoded")
    return Decoded(
        header.checksum,
        codec.name,
        codec.lossy,
        header.errors,
        time.perf_counter() - begun_s,
    )


def decode_run(
    stored: UInt8s,
    starts: Sequence[int],
    sizes: Sequence[int],
    checksums: Sequence[int],
    into: Sequence[int],
    nbytes: int,
) -> list[Decoded | None]:
    """Decodes coded objects of equal parts, and verifies them before and after, all in one call if the codec can.

    Args:
        stored: holds n objects.
        starts, sizes: n, where they begin in it and their bytes.
        checksums: n, xxh3_64 of the objects.
        into: n addresses of host memory for the bytes of a part each; garbage where the result is None.
        nbytes: of a part.

    Returns:
        n; None: `decode_object` must decode it alone, or says what is wrong with it.
    """
    begun_s, count = time.perf_counter(), len(starts)
    none: list[Decoded | None] = [None] * count
    try:
        heads = [read_header(stored[start : start + size]) for start, size in zip(starts, sizes, strict=True)]
        first = heads[0]
        codec = find_codec(first.codec)
        if not codec.lossy or any(not _are_alike(first, head) or head.nbytes != nbytes for head in heads):
            return none
        objects = np.array(starts, np.uint64) + np.uint64(stored.ctypes.data)
        targets = np.array(into, np.uint64)
        expected = np.array([*zip(checksums, (head.checksum for head in heads), strict=True)], np.uint64)
        lengths = np.array(sizes, np.int64)
        good = codec.decode_objects(objects, lengths, expected, first.payload_nbytes, first.shape, targets)
    except (EncodingError, MemoryError):
        return none
    if good is None:
        return none
    seconds = (time.perf_counter() - begun_s) / count
    return [
        Decoded(head.checksum, codec.name, True, head.errors, seconds) if verified else None
        for head, verified in zip(heads, good.tolist(), strict=True)
    ]


def _are_alike(one: Header, other: Header) -> bool:
    """Whether two lossy objects are decoded in the same way."""
    kinds = ((head.codec, head.shape, head.payload_nbytes) for head in (one, other))
    return next(kinds) == next(kinds) and other.errors is not None


def _measure(exact: UInt8s, decoded: UInt8s, shape: PartShape) -> LayerErrors:
    from prefixd_swap.codecs.kernels.differences import measure_errors

    return measure_errors(exact, decoded, shape)
