"""Keys and values as small integers and compact scales, a tile at a time: one layer's head over all tokens.

A tile of int8 keys has a scale and a center for each channel, over its tokens; one of int8 values a scale for each
token. Encoded, a tile is

    base u16, scales u8 each    see `scales.py`
    centers i4 each             of keys only, see `_pack`; a number n of a channel with center c is (n + 16 * c) * scale
    numbers i8 each             [tokens, channels]

The keys of a channel differ little from token to token where its rotary position turns slowly, and are far from zero.
So around a center they need less than half of the scale. Tiles of int4 values: `int4_groups.py`.

A part is the tiles of its layers, heads and keys before values, in this order.
"""

from __future__ import annotations

from typing import Any, Final

import numba
import numpy as np
from numba.extending import register_jitable

from prefixd_swap.codecs.kernels.compiling import compiled
from prefixd_swap.codecs.kernels.floats import (
    INFINITE,
    MAGNITUDE,
    bits_of,
    float_of,
    prefetch,
    read_bits,
    write_bits,
)
from prefixd_swap.codecs.kernels.int4_groups import decode_row, encode_groups, group_bytes
from prefixd_swap.codecs.kernels.scales import BASE_BYTES, ROUND, UP, choose_scales, read_scales

_BYTE: Final = np.uint32(0xFF)
_ROWS_AHEAD: Final = 8
"""Decoding to memory that is not in the cache takes a fifth less time with 4 to 16 than without."""
_LINE_BYTES: Final = 64
_KEYS: Final = 119
"""Scales from the middle of a channel's keys to the furthest: the center is up to 8 away from it, 127 is the most."""
_FAR: Final = np.float32(119 / 231)  # the furthest center is 7 * 16 scales from zero, and reaches 119 more
_CENTER: Final = np.float32(1 / 16)  # a scale, in centers


@numba.njit
def _load_tile(words: Any, start: int, stride: int, tile: Any) -> None:
    channels = tile.shape[1]
    for token in range(tile.shape[0]):
        row = tile[token]
        source = words[start + token * stride : start + token * stride + channels]
        for i in range(channels):
            row[i] = read_bits(source[i])


@numba.njit(forceinline=True)
def _fetch_row(words: Any, start: int, channels: int) -> None:
    """Asks for a row that is written soon: rows lie apart, so the processor does not see it coming."""
    for i in range(0, channels, _LINE_BYTES // words.itemsize):
        prefetch(words, start + i)


# A row of 64 numbers takes less time than a call and two slices of arrays. So these are inlined, and their indices are
# unsigned, which numba does not compare with zero.


@numba.njit(forceinline=True)
def _store_around(numbers: Any, first: int, scales: Any, centers: Any, fit: bool, words: Any, start: int) -> None:
    """As `_store_products`, around `centers`, which are in scales; each of these numbers has a scale of its own."""
    source, target = np.uint64(first), np.uint64(start)
    for channel in range(scales.size):
        i = np.uint64(channel)
        number = np.float32(np.int32(np.int8(numbers[source + i])) + centers[i])
        write_bits(words, target + i, bits_of(number * scales[i]), fit)


@numba.njit(forceinline=True)
def _store_products(numbers: Any, first: int, channels: int, scale: Any, fit: bool, words: Any, start: int) -> None:
    """Writes `numbers` (int8, one byte each) from `first` on, times `scale`, as consecutive words from `start` on.

    `fit`: as `read_scales` says.
    """
    source, target = np.uint64(first), np.uint64(start)
    for channel in range(channels):
        i = np.uint64(channel)
        write_bits(words, target + i, bits_of(np.float32(np.int8(numbers[source + i])) * scale), fit)


@numba.njit
def _range_by_channel(tile: Any, lowest: Any, highest: Any, needed: Any) -> None:
    """The lowest and highest number of each channel, and what `_KEYS` scales of it have to reach, as bits."""
    needed[:] = 0
    lowest[:] = np.float32(np.inf)
    highest[:] = np.float32(-np.inf)
    for token in range(tile.shape[0]):
        row = tile[token]
        for i in range(row.size):
            needed[i] = max(needed[i], row[i] & MAGNITUDE)
            lowest[i] = min(lowest[i], float_of(row[i]))
            highest[i] = max(highest[i], float_of(row[i]))
    half = np.float32(0.5)
    for i in range(needed.size):
        if needed[i] < INFINITE:
            spread = half * highest[i] - half * lowest[i]
            needed[i] = bits_of(max(spread, float_of(needed[i]) * _FAR))


@numba.njit
def _largest_by_token(tile: Any, largest: Any) -> None:
    for token in range(tile.shape[0]):
        row, most = tile[token], np.uint32(0)
        for i in range(row.size):
            most = max(most, row[i] & MAGNITUDE)
        largest[token] = most


@numba.njit
def _pack(row: Any, target: Any) -> None:
    """Two numbers of -7 to 7 a byte: the lower half of it has one of the row's first half, so that both are dense."""
    half = target.size
    for i in range(row.size - half):
        target[i] = (row[i] & np.uint32(15)) | ((row[half + i] & np.uint32(15)) << np.uint32(4))
    if row.size & 1:
        target[half - 1] = row[half - 1] & np.uint32(15)


@numba.njit
def _unpack(source: Any, row: Any) -> None:
    half = source.size
    for i in range(half):
        row[i] = ((source[i] & np.uint8(15)) ^ np.uint8(8)) - np.uint8(8)
    for i in range(row.size - half):
        row[half + i] = ((source[i] >> np.uint8(4)) ^ np.uint8(8)) - np.uint8(8)


@numba.njit
def _encode_keys(tile: Any, lowest: Any, highest: Any, needed: Any, inverses: Any, encoded: Any) -> bool:
    tokens, channels = tile.shape
    _range_by_channel(tile, lowest, highest, needed)
    if not choose_scales(needed, _KEYS, UP, encoded, inverses):
        return False
    half, furthest = np.float32(0.5), np.float32(7)
    centers = needed
    for i in range(channels):
        middle = (half * lowest[i] + half * highest[i]) * inverses[i] * _CENTER
        centers[i] = bits_of(min(max(middle, -furthest), furthest) + ROUND)
    at = BASE_BYTES + channels + (channels + 1) // 2
    _pack(centers, encoded[BASE_BYTES + channels : at])
    numbers = encoded[at:]
    for token in range(tokens):
        row = tile[token]
        target = numbers[token * channels : (token + 1) * channels]
        for i in range(channels):
            target[i] = (bits_of(float_of(row[i]) * inverses[i] + ROUND) - (centers[i] << np.uint32(4))) & _BYTE
    return True


@numba.njit
def _encode_values(tile: Any, largest: Any, inverses: Any, encoded: Any) -> bool:
    tokens, channels = tile.shape
    _largest_by_token(tile, largest)
    if not choose_scales(largest, 127, UP, encoded, inverses):
        return False
    at = BASE_BYTES + tokens
    for token in range(tokens):
        row, inverse = tile[token], inverses[token]
        target = encoded[at : at + channels]
        for i in range(channels):
            target[i] = bits_of(float_of(row[i]) * inverse + ROUND) & _BYTE
        at += channels
    return True


@register_jitable
def _value_bytes(tokens: int, channels: int, group: int, wide: bool) -> int:
    return BASE_BYTES + tokens * (1 + channels) if wide else group_bytes(tokens, channels, group)


@compiled()
def encode_part(words: Any, sizes: Any, strides: Any, group: int, wide: bool, encoded: Any) -> bool:
    """Encodes a part; False where a number is not finite.

    Args:
        words: all numbers of the part, as `WORDS` says.
        sizes: layers, tokens, heads, channels.
        strides: words from one layer, kv, token, head to the next. Channels lie side by side.
        group: channels with one scale, of int4 values.
        wide: values are int8; else int4.
        encoded: `tile_bytes` for each tile.
    """
    layers, tokens, heads, channels = sizes
    tile = np.empty((tokens, channels), np.uint32)
    groups = tokens * (1 if wide else (channels + group - 1) // group)
    needed, key_inverses = np.empty(channels, np.uint32), np.empty(channels, np.float32)
    lowest, highest = np.empty(channels, np.float32), np.empty(channels, np.float32)
    needed_values, value_inverses = np.empty(groups, np.uint32), np.empty(groups, np.float32)
    lows, highs = np.empty(groups, np.float32), np.empty(groups, np.float32)
    key_bytes = BASE_BYTES + channels + (channels + 1) // 2 + tokens * channels
    value_bytes = _value_bytes(tokens, channels, group, wide)
    at = 0
    for layer in range(layers):
        for head in range(heads):
            start = layer * strides[0] + head * strides[3]
            _load_tile(words, start, strides[2], tile)
            if not _encode_keys(tile, lowest, highest, needed, key_inverses, encoded[at : at + key_bytes]):
                return False
            at += key_bytes
            _load_tile(words, start + strides[1], strides[2], tile)
            target = encoded[at : at + value_bytes]
            if wide:
                finite = _encode_values(tile, needed_values, value_inverses, target)
            else:
                finite = encode_groups(tile, group, lows, highs, needed_values, value_inverses, target)
            if not finite:
                return False
            at += value_bytes
    return True


@numba.njit
def decode_tiles(encoded: Any, sizes: Any, strides: Any, group: int, wide: bool, words: Any) -> None:
    """Decodes what `encode_part` has encoded, or bytes of that length; the arguments are the same."""
    layers, tokens, heads, channels = sizes
    groups = tokens * (1 if wide else (channels + group - 1) // group)
    key_scales, value_scales = np.empty(channels, np.float32), np.empty(groups, np.float32)
    centers = np.empty(channels, np.int32)
    row = np.empty(channels, np.uint8)
    value_bytes = _value_bytes(tokens, channels, group, wide)
    at = 0
    for layer in range(layers):
        for head in range(heads):
            start = layer * strides[0] + head * strides[3]
            fit = read_scales(encoded[at:], key_scales, words)
            at += BASE_BYTES + channels
            _unpack(encoded[at : at + (channels + 1) // 2], row)
            for i in range(channels):
                centers[i] = np.int32(np.int8(row[i])) * 16
            at += (channels + 1) // 2
            for token in range(tokens):
                _fetch_row(words, start + (token + _ROWS_AHEAD) * strides[2], channels)
                _store_around(encoded, at, key_scales, centers, fit, words, start + token * strides[2])
                at += channels
            start += strides[1]
            tile = encoded[at : at + value_bytes]
            fit = read_scales(tile, value_scales, words)
            for token in range(tokens):
                _fetch_row(words, start + (token + _ROWS_AHEAD) * strides[2], channels)
                if wide:
                    first = BASE_BYTES + tokens + token * channels
                    scale, to = value_scales[token], start + token * strides[2]
                    _store_products(tile, first, channels, scale, fit, words, to)
                else:
                    decode_row(tile, group, token, value_scales, fit, row, words, start + token * strides[2])
            at += value_bytes
