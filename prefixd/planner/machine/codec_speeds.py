"""Measures codecs: the bytes that they store of sampled keys and values, and how fast they are."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.coding import Coding, code, decode_object
from prefixd_swap.codecs.part_shape import Axis, PartShape
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import EncodingError

AXES: tuple[Axis, ...] = ("token", "layer", "kv", "head", "channel")
_SPREAD = 1.0
"""Standard deviation of the logarithm of a channel's scale. Of 16 bits `lossless` then stores 0.70, as of a small real
model's."""
_MEASURED = PartShape("bfloat16", 32, 16, 8, 128, AXES)  # a block of 16 tokens of Llama 3 8B
_PARTS = 32
_TIMES = 3


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """Exact bytes a second of several threads together, the time to verify included."""

    encode_bytes_per_s: float
    decode_bytes_per_s: float


def sample_part(shape: PartShape, seed: int = 0) -> npt.NDArray[np.uint8]:
    """The bytes of a part of this shape with random keys and values: normal, with a scale for each channel of a head.

    The numbers have to be bfloat16 or float32, and the order of axes `AXES`.
    """
    draw = np.random.default_rng(seed)
    scales = np.exp(_SPREAD * draw.standard_normal(shape.sizes[1:], np.float32))
    numbers: npt.NDArray[np.float32] = draw.standard_normal(shape.sizes, np.float32) * scales
    if shape.dtype == "float32":
        return numbers.reshape(-1).view(np.uint8)
    if shape.dtype == "float16":
        return numbers.reshape(-1).astype(np.float16).view(np.uint8)
    return (
        ((numbers.reshape(-1).view(np.uint32) + np.uint32(1 << 15)) >> np.uint32(16)).astype(np.uint16).view(np.uint8)
    )


def stored_bytes(name: str, shape: PartShape) -> int:
    """Bytes of a sampled part as the codec stores it; the part's own if the codec refuses it.

    Raises:
        UnavailableCodecError: there is no such codec, or a package that it needs is not installed.
    """
    coded = code(sample_part(shape), Coding(find_codec(name), shape, math.inf))
    return shape.nbytes if isinstance(coded, Refused) else coded.data.size


def measure_codec(name: str, encoding: int, decoding: int) -> CodecSpeed:
    """The speed of a codec in so many threads that encode, and that decode.

    Raises:
        UnavailableCodecError: as `stored_bytes`.
        EncodingError: it fails.
    """
    coding, part = Coding(find_codec(name), _MEASURED, math.inf), sample_part(_MEASURED)
    stored = code(part, coding)  # compiles
    if isinstance(stored, Refused):
        raise EncodingError(f"{name} does not encode a sampled part ({stored}); name the release in a report")
    into = np.zeros((_PARTS, part.size), np.uint8)
    decode_object(stored.data, into[0])
    encode_s = _best_s(encoding, lambda _: code(part, coding))
    decode_s = _best_s(decoding, lambda at: decode_object(stored.data, into[at]))
    return CodecSpeed(_PARTS * part.size / encode_s, _PARTS * part.size / decode_s)


def _best_s(threads: int, work: Callable[[int], Any]) -> float:
    times = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_TIMES):
            began_s = time.perf_counter()
            list(pool.map(work, range(_PARTS)))
            times.append(time.perf_counter() - began_s)
    return max(1e-9, min(times))
