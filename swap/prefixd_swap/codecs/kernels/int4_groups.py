"""int4 values: each group of channels of a token has 16 levels at equal distances, which may lie anywhere.

The tile of a layer's and a head's values, encoded:

    base u16, scales u8 each    see `scales.py`; one a token and group
    centers i8 each             one a token and group; the number of a level n is (16 * n + center) * scale
    fine u16                    the token whose values are the smallest has 64 levels
    levels i4 each              [tokens, channels], -8 to 7; a byte's lower half is of a row's first half of channels
    quarters u2 each            [channels], what is added to the fine token's levels; a byte has one of each quarter of
                                the channels, from its lowest bits on

The integer has nine bits and the scale five, so products are exact, and all processors decode the same bytes. The
levels of a group reach from the lowest to the highest of its numbers and zero. Levels that reach less far, where the
sum of the squared errors is smaller, made the divergence of answers larger: it is the outermost numbers that count.

A prompt's first token gets much of the attention of all later ones, and its values are far smaller than theirs
(KVQuant, arXiv 2401.18079, keeps it exact). Which token of a block that may be is seen by its values alone.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numba.extending import register_jitable

from prefixd_swap.codecs.kernels.floats import INFINITE, bits_of, float_of, write_bits
from prefixd_swap.codecs.kernels.scales import BASE_BYTES, ROUND, choose_scales

_HALF: Final = 120
"""Scales from the middle of the 16 levels to the first and the last."""
_NEAREST: Final = np.uint32(1 << 18)
"""Scales are rounded to the nearest step: the outermost numbers are then closer to the outermost levels."""
_FINE_BYTES: Final = 2
_LEFT: Final = np.int32(0x7FFFFFFF)
_ZERO: Final = np.int32(0x4B400000)  # the bits of `ROUND`


@numba.njit
def _find_ranges(tile: Any, group: int, lows: Any, highs: Any, needed: Any) -> None:
    """The lowest and highest number of each group and zero, and half of what lies between, as bits."""
    half = np.float32(0.5)
    at = 0
    for token in range(tile.shape[0]):
        for start in range(0, tile.shape[1], group):
            row = tile[token, start : start + group]
            low = high = np.int32(0)  # integers in the order of the numbers: minima and maxima of them vectorise
            for i in range(row.size):
                bits = np.int32(row[i])
                ordered = np.int32(bits ^ np.int32(np.int32(bits >> 31) & _LEFT))
                low, high = min(low, ordered), max(high, ordered)
            lows[at] = float_of(np.uint32(low ^ np.int32(np.int32(low >> 31) & _LEFT)))
            highs[at] = float_of(np.uint32(high))
            if high >= np.int32(INFINITE) or low <= ~np.int32(INFINITE):
                needed[at] = INFINITE
            else:
                needed[at] = bits_of(half * highs[at] - half * lows[at])
            at += 1


@register_jitable
def group_bytes(tokens: int, channels: int, group: int) -> int:
    """Bytes of a tile."""
    groups = (channels + group - 1) // group
    return BASE_BYTES + _FINE_BYTES + tokens * (2 * groups + (channels + 1) // 2) + (channels + 3) // 4


@numba.njit
def _find_fine(needed: Any, groups: int) -> int:
    """The token whose widest group is the narrowest of all."""
    least, fine = INFINITE, 0
    for token in range(min(needed.size // groups, 1 << 16)):
        widest = needed[token * groups : (token + 1) * groups].max()
        if widest < least:
            least, fine = widest, token
    return fine


@numba.njit
def encode_groups(tile: Any, group: int, lows: Any, highs: Any, needed: Any, inverses: Any, encoded: Any) -> bool:
    """Encodes a tile of values, bits [tokens, channels]; False where a number is not finite.

    `lows`, `highs`, `needed` and `inverses` are for as many numbers as there are groups.
    """
    tokens, channels = tile.shape
    _find_ranges(tile, group, lows, highs, needed)
    if not choose_scales(needed, _HALF, _NEAREST, encoded, inverses):
        return False
    groups, row_bytes, at = needed.size // tokens, (channels + 1) // 2, BASE_BYTES + 2 * needed.size
    fine, quarters = _find_fine(needed, groups), encoded[encoded.size - (channels + 3) // 4 :]
    encoded[at] = fine & 0xFF
    encoded[at + 1] = fine >> 8
    at += _FINE_BYTES
    for token in range(tokens):
        for number in range(groups):
            place = token * groups + number
            row, inverse = tile[token, number * group : (number + 1) * group], inverses[place]
            middle = np.float32(0.5) * lows[place] + np.float32(0.5) * highs[place]
            center = np.int32(np.int32(bits_of(middle * inverse + ROUND)) - _ZERO + 8)
            center = min(max(center, np.int32(-128)), np.int32(127)) if needed[place] else np.int32(0)
            encoded[BASE_BYTES + needed.size + place] = np.uint8(center)
            half, bits = (np.int32(2), np.int32(2)) if token == fine else (np.int32(8), np.int32(4))
            down, most = np.int32(_ZERO + center - half), np.int32(np.int32(128 >> bits) - 1)
            for i in range(row.size):
                level = np.int32(np.int32(np.int32(bits_of(float_of(row[i]) * inverse + ROUND)) - down) >> bits)
                row[i] = np.uint32(min(max(level, np.int32(~most)), most))
        row = tile[token]
        if token == fine:
            quarters[:] = 0
            for quarter in range(4):
                some = row[quarter * quarters.size : (quarter + 1) * quarters.size]
                for i in range(some.size):
                    quarters[i] |= (some[i] & np.uint32(3)) << np.uint32(2 * quarter)
                    some[i] = some[i] >> np.uint32(2)
        target = encoded[at : at + row_bytes]
        for i in range(channels - row_bytes):
            target[i] = (row[i] & np.uint32(15)) | ((row[row_bytes + i] & np.uint32(15)) << np.uint32(4))
        if channels & 1:
            target[row_bytes - 1] = row[row_bytes - 1] & np.uint32(15)
        at += row_bytes
    return True


@numba.njit
def decode_row(
    encoded: Any, group: int, token: int, scales: Any, fit: bool, numbers: Any, words: Any, start: int
) -> None:
    """Writes a row of a tile as consecutive numbers of `words` from `start` on.

    Args:
        encoded: the tile, and nothing else.
        group: channels with one scale.
        token: the row.
        scales, fit: those of the tile, as `read_scales` gives them.
        numbers: [channels] bytes, which it overwrites.
        words: as for `encode_part`.
        start: the place of the row's first number.
    """
    channels, at = numbers.size, BASE_BYTES + 2 * scales.size
    groups, row_bytes = (channels + group - 1) // group, (channels + 1) // 2
    first = at + _FINE_BYTES + token * row_bytes
    source = encoded[first : first + row_bytes]
    for i in range(row_bytes):
        numbers[i] = source[i] << np.uint8(4)
    for i in range(channels - row_bytes):
        numbers[row_bytes + i] = source[i] & np.uint8(0xF0)
    if token == np.int64(encoded[at]) | np.int64(encoded[at + 1]) << 8:
        quarters = encoded[encoded.size - (channels + 3) // 4 :]
        for quarter in range(4):
            some = numbers[quarter * quarters.size : (quarter + 1) * quarters.size]
            for i in range(some.size):
                some[i] += ((quarters[i] >> np.uint8(2 * quarter)) & np.uint8(3)) << np.uint8(2)
    for number in range(groups):
        place = token * groups + number
        scale, center = scales[place], np.int32(np.int8(encoded[at - scales.size + place]))
        some = numbers[number * group : (number + 1) * group]
        target = words[start + number * group : start + number * group + some.size]
        for i in range(some.size):
            write_bits(target, i, bits_of(np.float32(np.int32(np.int32(np.int8(some[i])) + center)) * scale), fit)
