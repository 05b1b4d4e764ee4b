"""Numbers of 16 and 32 bits as the bits of a float32, and back: rounded to the nearest, ties to even.

numba's processor target has neither bfloat16 nor float16 arithmetic, and integers vectorise. A kernel is compiled for
the type of its words, which says what they are (`WORDS`). Results do not depend on whether the thread flushes denormal
numbers to zero, but for those that are denormal as float32.

`float_of`, `bits_of`, `read_bits`, `write_bits`, `largest_bits` and `prefetch` exist in kernels only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload

WORDS: Final[dict[str, Any]] = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.uint32}
"""What kernels take the numbers of a dtype as."""

INFINITE: Final = np.uint32(0x7F800000)
"""Bits of a float32 without its sign: from here on it is infinite, or no number."""
MAGNITUDE: Final = np.uint32(0x7FFFFFFF)
_SIGN: Final = np.uint32(0x80000000)
_LARGEST_BFLOAT16: Final = np.uint32(0x7F7F0000)
_LARGEST_FLOAT16: Final = np.uint32(0x477FE000)
_LARGEST_FLOAT32: Final = np.uint32(0x7F7FFFFF)


def _bits_as_float(_typing: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _float_as_bits(_typing: Any, number: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


float_of: Any = intrinsic(_bits_as_float)
"""The float32 with these bits, a uint32."""
bits_of: Any = intrinsic(_float_as_bits)
"""The bits of a float32, as a uint32."""


def _prefetch(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    words = context.make_array(signature.args[0])(context, builder, args[0])
    place = builder.bitcast(builder.gep(words.data, [args[1]]), ir.IntType(8).as_pointer())
    number = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
    function = builder.module.declare_intrinsic("llvm.prefetch", [place.type], kind)
    builder.call(function, [place, number(1), number(3), number(1)])  # to write, in all caches, data
    return context.get_dummy_value()


def _typed_prefetch(_typing: Any, words: Any, index: Any) -> Any:
    return types.void(words, index), _prefetch


prefetch: Any = intrinsic(_typed_prefetch)
"""Asks for the cache line of `words[index]`, which is about to be written, wherever that is."""


def read_bits(word: Any) -> Any:
    """A number as the bits of a float32."""
    raise NotImplementedError(word)


def write_bits(words: Any, index: Any, bits: Any, fits: bool) -> None:
    """Makes the bits of a float32 a number of an array; one too large becomes the largest of the dtype.

    `fits`: it is none of these, nor of any other turn of the loop; which then takes two thirds of the time.
    """
    raise NotImplementedError(words, index, bits, fits)


def largest_bits(words: Any) -> Any:
    """The largest number of an array's dtype, as the bits of a float32."""
    raise NotImplementedError(words)


@overload(read_bits)
def _read_bits(word: Any) -> Callable[..., Any]:
    def from_bfloat16(word: Any) -> Any:
        return np.uint32(word) << np.uint32(16)

    def from_float16(word: Any) -> Any:
        magnitude = np.uint32(word) & np.uint32(0x7FFF)
        sign = (np.uint32(word) & np.uint32(0x8000)) << np.uint32(16)
        normal = (magnitude << np.uint32(13)) + np.uint32(0x38000000)
        if magnitude >= np.uint32(0x7C00):
            normal = INFINITE | (magnitude << np.uint32(13))
        small = bits_of(np.float32(np.int32(magnitude)) * np.float32(2.0**-24))
        return sign | (small if magnitude < np.uint32(0x400) else normal)

    def from_float32(word: Any) -> Any:
        return word

    return {types.uint16: from_bfloat16, types.int16: from_float16, types.uint32: from_float32}[word]


@overload(largest_bits)
def _largest_bits(words: Any) -> Callable[..., Any]:
    largest = {types.uint16: _LARGEST_BFLOAT16, types.int16: _LARGEST_FLOAT16, types.uint32: _LARGEST_FLOAT32}
    bits = largest[words.dtype]

    def find(words: Any) -> Any:
        return bits

    return find


@overload(write_bits)
def _write_bits(words: Any, index: Any, bits: Any, fits: Any) -> Callable[..., None]:
    def to_bfloat16(words: Any, index: Any, bits: Any, fits: Any) -> None:
        if not fits:
            bits = min(bits & MAGNITUDE, _LARGEST_BFLOAT16) | (bits & _SIGN)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        words[index] = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)

    def to_float16(words: Any, index: Any, bits: Any, fits: Any) -> None:
        magnitude = bits & MAGNITUDE
        if not fits:
            magnitude = min(magnitude, _LARGEST_FLOAT16)
        odd = (magnitude >> np.uint32(13)) & np.uint32(1)
        normal = (magnitude - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
        small = bits_of(float_of(magnitude) + np.float32(0.5)) - np.uint32(0x3F000000)  # the sum is rounded to 2**-24
        rounded = small if magnitude < np.uint32(0x38800000) else normal
        words[index] = rounded | ((bits & _SIGN) >> np.uint32(16))

    def to_float32(words: Any, index: Any, bits: Any, fits: Any) -> None:
        words[index] = bits if fits else min(bits & MAGNITUDE, _LARGEST_FLOAT32) | (bits & _SIGN)

    return {types.uint16: to_bfloat16, types.int16: to_float16, types.uint32: to_float32}[words.dtype]
