"""Numbers of 16 and 32 bits as the bits of a float32, and back: rounded to the nearest, ties to even.

numba's processor target has neither bfloat16 nor float16 arithmetic, and integers vectorise. Results do not depend on
whether the thread flushes denormal numbers to zero, but for those that are themselves denormal as float32.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

BFLOAT16: Final = 0
FLOAT16: Final = 1
FLOAT32: Final = 2
KINDS: Final = {"bfloat16": BFLOAT16, "float16": FLOAT16, "float32": FLOAT32}
"""What kernels call a dtype."""

INFINITE: Final = np.uint32(0x7F800000)
"""Bits of a float32 without its sign: from here on it is infinite, or no number."""
MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_SIGN: Final = np.uint32(0x80000000)
_LARGEST: Final = (np.uint32(0x7F7F0000), np.uint32(0x477FE000), np.uint32(0x7F7FFFFF))  # finite, by kind


def _bits_as_float(_typing: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _float_as_bits(_typing: Any, number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


float_of: Any = intrinsic(_bits_as_float)
"""In kernels: the float32 with these bits, a uint32."""
bits_of: Any = intrinsic(_float_as_bits)
"""In kernels: the bits of a float32, as a uint32."""


@numba.njit(inline="always")
def _from_float16(word: np.uint32) -> np.uint32:
    magnitude = word & np.uint32(0x7FFF)
    sign = (word & np.uint32(0x8000)) << np.uint32(16)
    normal = (magnitude << np.uint32(13)) + np.uint32(0x38000000)
    if magnitude >= np.uint32(0x7C00):
        normal = INFINITE | (magnitude << np.uint32(13))
    small = bits_of(np.float32(magnitude) * np.float32(2.0**-24))
    return sign | (small if magnitude < np.uint32(0x400) else normal)


@numba.njit(inline="always")
def _to_float16(bits: np.uint32) -> np.uint32:
    magnitude = bits & MAGNITUDE
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = (magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    small = bits_of(float_of(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000)  # the sum is rounded to 2**-24
    return ((bits & _SIGN) >> np.uint32(16)) | (small if magnitude < np.uint32(0x38800000) else normal)


@numba.njit
def load_row(words: Any, start: int, kind: int, row: Any) -> None:
    """Reads len(`row`) consecutive numbers from `start` on, as bits of float32."""
    source = words[start : start + row.size]
    if kind == BFLOAT16:
        for i in range(row.size):
            row[i] = np.uint32(source[i]) << np.uint32(16)
    elif kind == FLOAT16:
        for i in range(row.size):
            row[i] = _from_float16(np.uint32(source[i]))
    else:
        for i in range(row.size):
            row[i] = np.uint32(source[i])


@numba.njit
def store_row(row: Any, words: Any, start: int, kind: int) -> None:
    """Writes `row`, bits of float32, as consecutive numbers from `start` on; one too large becomes the largest."""
    target = words[start : start + row.size]
    most = _LARGEST[kind]
    if kind == BFLOAT16:
        for i in range(row.size):
            bits = min(row[i] & MAGNITUDE, most) | (row[i] & _SIGN)
            odd = (bits >> np.uint32(16)) & np.uint32(1)
            target[i] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    elif kind == FLOAT16:
        for i in range(row.size):
            target[i] = _to_float16(min(row[i] & MAGNITUDE, most) | (row[i] & _SIGN))
    else:
        for i in range(row.size):
            target[i] = min(row[i] & MAGNITUDE, most) | (row[i] & _SIGN)
