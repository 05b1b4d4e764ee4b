"""Compact scales: a tile has the smallest of its scales, and one byte for each.

    base     u16, little-endian      the tile's smallest scale, in steps
    scales   u8 each                 steps above the base

A step is the upper 13 bits of a float32: 8 of exponent and 4 of mantissa, so that a scale is rounded by 6% at most,
takes one byte, and reaches from the tile's largest down to its 2**-16th. A finer scale of two bytes made int8 keys of
16 tokens 6% larger and the error 2% smaller.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np

from prefixd_swap.codecs.kernels.floats import INFINITE, bits_of, float_of, largest_bits

BASE_BYTES: Final = 2
ROUND: Final = np.float32(12582912.0)  # 1.5 * 2**23: a sum with it is an integer, ties to even, in its lowest bits
UP: Final = np.uint32((1 << 19) - 1)
_STEP: Final = np.uint32(19)  # bits of a float32 that a step leaves out
_REACH: Final = np.uint32(255)
_LEAST: Final = np.uint32((127 - 100) << 4)  # no scale is below 2**-100, so no product is denormal
_BYTE: Final = np.uint32(0xFF)
_BY_256: Final = np.uint32(8 << 23)  # of the exponent of a float32


@numba.njit
def choose_scales(largest: Any, levels: int, up: Any, head: Any, inverses: Any) -> bool:
    """Writes base and scales of a tile, and 1 / scale; False where a number is not finite.

    Args:
        largest: what `levels` scales have to reach, as bits.
        levels: a number.
        up: what is added before the lower bits are left out: `UP`, or half a step to round to the nearest one.
        head: the beginning of the encoded tile.
        inverses: as many as `largest`.
    """
    top = np.uint32(0)
    for i in range(largest.size):
        top = max(top, largest[i])
    if top >= INFINITE:
        return False
    share = np.float32(1.0) / np.float32(levels)
    steps = (bits_of(float_of(top) * share) + up) >> _STEP
    base = max(steps, _LEAST + _REACH) - _REACH
    head[0] = base & _BYTE
    head[1] = base >> np.uint32(8)
    for i in range(largest.size):
        steps = max((bits_of(float_of(largest[i]) * share) + up) >> _STEP, base)
        head[BASE_BYTES + i] = steps - base
        inverses[i] = np.float32(1.0) / float_of(steps << _STEP)
    return True


@numba.njit
def read_scales(head: Any, scales: Any, words: Any) -> bool:
    """Reads the scales of a tile that begins with `head`; whether 256 of each are a number of the dtype of `words`."""
    base = np.uint32(head[0]) | (np.uint32(head[1]) << np.uint32(8))
    furthest = np.uint32(0)
    for i in range(scales.size):
        scales[i] = float_of((base + np.uint32(head[BASE_BYTES + i])) << _STEP)
        furthest = max(furthest, np.uint32(head[BASE_BYTES + i]))
    fit: bool = base + furthest <= (largest_bits(words) - _BY_256) >> _STEP
    return fit
