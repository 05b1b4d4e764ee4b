"""The tiles of `number_tiles` in Triton: int8 keys and values made of an engine's pages, and pages of these again.

Unverified on a GPU: Triton's interpreter alone has run it. There it gives bit for bit what the compiled loops of
`number_tiles` give. On a GPU this needs products that are not fused with sums (`enable_fp_fusion`) and quotients that
are rounded to the nearest (`div_rn`);
`tests/swap/codecs/test_on_device.py` asks a GPU for it.

A program has a tile at a time and reads its numbers twice, the second time from the GPU's cache: for the largest, and
for the numbers in steps of it. It decodes what it has encoded, and adds up how far that is from the exact numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from prefixd_swap.codecs.on_device.paged_parts import PagedParts

_PROGRAMS = 128
"""They leave most of a GPU to the model beside them; a bus moves less than they read. Not measured."""
_TILE = 2048  # numbers that a program has in registers


@triton.jit
def _as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _as_bits(number):
    return number.to(tl.int32, bitcast=True)


@triton.jit
def _steps_of(largest, share):
    """Upper 13 bits of the scale of numbers up to `largest` (bits of a float32), rounded up."""
    return (_as_bits(_as_float(largest) * share) + 0x7FFFF) >> 19


@triton.jit
def _bits_of_words(words, HALF: tl.constexpr):
    """Numbers of 16 bits, uint16, as the bits of float32."""
    if HALF:
        return _as_bits(words.to(tl.float16, bitcast=True).to(tl.float32))
    return words.to(tl.int32) << 16


@triton.jit
def _words_of_numbers(numbers, HALF: tl.constexpr):
    """float32 as numbers of 16 bits, uint16: to the nearest, ties to even, none infinite."""
    bits = _as_bits(numbers)
    sign = (bits >> 16) & 0x8000
    if HALF:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x477FE000)
        rounded = _as_float(magnitude).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int32)
    else:
        magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x7F7F0000)
        rounded = (magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16
    return (rounded | sign).to(tl.uint16)


@triton.jit
def _find_tile(number, addresses, pairs, heads, tokens, channels, head_stride, coded, object_bytes):
    """Of a tile: its part, whether it has values, the first number of its head in page 0, and its first byte."""
    values, part, pair = number % 2, (number // 2 // pairs).to(tl.int64), number // 2 % pairs
    layer, head = pair // heads, (pair % heads).to(tl.int64)
    first = tl.load(addresses + layer * 2 + values).to(tl.pointer_type(tl.uint16)) + head * head_stride
    key_bytes, value_bytes = 2 + channels + (channels + 1) // 2 + tokens * channels, 2 + tokens + tokens * channels
    tile = coded + part * object_bytes + pair.to(tl.int64) * (key_bytes + value_bytes) + values * key_bytes
    return part, values, first, tile


@triton.jit
def _find_words(first, places, token, channel, tokens, channels, page_tokens, page_stride, token_stride):
    """Addresses ``[token, channel]`` of numbers, and which of them there are."""
    page = tl.load(places + token // page_tokens, mask=token < tokens, other=-1)
    rows = page * page_stride + (token % page_tokens).to(tl.int64) * token_stride
    there = ((token < tokens) & (page >= 0))[:, None] & (channel < channels)[None, :]
    return first + rows[:, None] + channel[None, :], there


# These differ from call to call; a kernel made for some of their values would be compiled while requests wait.
@triton.jit(do_not_specialize=["tiles"])
def _encode(
    addresses,
    ids,
    pages,
    page_tokens,
    page_stride,
    token_stride,
    head_stride,
    pairs,
    heads,
    tokens,
    channels,
    tiles,
    coded,
    object_bytes,
    measured,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel = tl.arange(0, BLOCK_C)
    for turn in range(0, tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        part, values, first, tile = _find_tile(
            number, addresses, pairs, heads, tokens, channels, head_stride, coded, object_bytes
        )
        share = tl.where(values == 0, 0.008403361774981022, 0.007874015718698502)  # 1 / 119 and 1 / 127 in float32
        largest = tl.zeros((BLOCK_C,), tl.int32)
        lowest = tl.full((BLOCK_C,), float("inf"), tl.float32)
        highest = tl.full((BLOCK_C,), float("-inf"), tl.float32)
        for start in range(0, tokens, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            words, there = _find_words(
                first, ids + part * pages, token, channel, tokens, channels, page_tokens, page_stride, token_stride
            )
            bits = _bits_of_words(tl.load(words, mask=there, other=0), HALF)
            largest = tl.maximum(largest, tl.max(bits & 0x7FFFFFFF, 0))
            used = (token < tokens)[:, None]
            lowest = tl.minimum(lowest, tl.min(tl.where(used, _as_float(bits), float("inf")), 0))
            highest = tl.maximum(highest, tl.max(tl.where(used, _as_float(bits), float("-inf")), 0))
        reach = tl.maximum(0.5 * highest - 0.5 * lowest, _as_float(largest) * 0.5151515007019043)  # 119 / 231
        largest = tl.where((values == 0) & (largest < 0x7F800000), _as_bits(reach), largest)
        top = tl.max(largest, 0)
        base = tl.maximum(_steps_of(top, share), 432 + 255) - 255  # no scale is below 2**-100
        tl.store(tile, (base & 0xFF).to(tl.uint8))
        tl.store(tile + 1, (base >> 8).to(tl.uint8))
        of_keys = tl.maximum(_steps_of(largest, share), base) - base
        tl.store(tile + 2 + channel, of_keys.to(tl.uint8), mask=channel < tl.where(values == 0, channels, 0))
        half = (channels + 1) // 2
        inverse = tl.div_rn(tl.full((BLOCK_C,), 1.0, tl.float32), _as_float((base + of_keys) << 19))
        middle = (0.5 * lowest + 0.5 * highest) * inverse * 0.0625
        center = _as_bits(tl.minimum(tl.maximum(middle, -7.0), 7.0) + 12582912.0) & 15
        upper = tl.gather(center, tl.minimum(channel + half, BLOCK_C - 1), 0)
        packed = center | (tl.where(channel + half < channels, upper, 0) << 4)
        tl.store(tile + 2 + channels + channel, packed.to(tl.uint8), mask=channel < tl.where(values == 0, half, 0))
        centers = tl.where(values == 0, ((center ^ 8) - 8) * 16, 0)[None, :]
        numbers = tile + 2 + tl.where(values == 0, channels + half, tokens)
        most = tl.zeros((BLOCK_C,), tl.float32)
        noise = tl.zeros((BLOCK_C,), tl.float64)
        power = tl.zeros((BLOCK_C,), tl.float64)
        for start in range(0, tokens, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            words, there = _find_words(
                first, ids + part * pages, token, channel, tokens, channels, page_tokens, page_stride, token_stride
            )
            bits = _bits_of_words(tl.load(words, mask=there, other=0), HALF)
            row = tl.max(bits & 0x7FFFFFFF, 1)
            of_values = tl.maximum(_steps_of(row, share), base) - base
            tl.store(tile + 2 + token, of_values.to(tl.uint8), mask=token < tl.where(values == 0, 0, tokens))
            steps = base + tl.where(values == 0, of_keys[None, :], of_values[:, None])
            scale = _as_float(steps << 19)
            exact = _as_float(bits)
            rounded = _as_bits(exact * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale) + 12582912.0)
            coded_bits = (rounded - centers) & 0xFF
            at = token[:, None] * channels + channel[None, :]
            tl.store(numbers + at, coded_bits.to(tl.uint8), mask=there)
            decoded = ((coded_bits ^ 0x80) - 0x80 + centers).to(tl.float32) * scale
            apart = exact - _as_float(_bits_of_words(_words_of_numbers(decoded, HALF), HALF))
            most = tl.maximum(most, tl.max(tl.abs(apart), 0))
            noise += tl.sum(apart.to(tl.float64) * apart.to(tl.float64), 0)
            power += tl.sum(exact.to(tl.float64) * exact.to(tl.float64), 0)
        into = measured + number.to(tl.int64) * 3
        finite = top < 0x7F800000
        tl.store(into, tl.where(finite, tl.sum(power, 0), float("inf")))
        tl.store(into + 1, tl.sum(noise, 0))
        tl.store(into + 2, tl.max(most, 0).to(tl.float64))


@triton.jit(do_not_specialize=["tiles"])
def _decode(
    addresses,
    ids,
    pages,
    page_tokens,
    page_stride,
    token_stride,
    head_stride,
    pairs,
    heads,
    tokens,
    channels,
    tiles,
    coded,
    object_bytes,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    channel = tl.arange(0, BLOCK_C)
    for turn in range(0, tl.cdiv(tiles - tl.program_id(0), tl.num_programs(0))):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        part, values, first, tile = _find_tile(
            number, addresses, pairs, heads, tokens, channels, head_stride, coded, object_bytes
        )
        base = tl.load(tile).to(tl.int32) | (tl.load(tile + 1).to(tl.int32) << 8)
        half = (channels + 1) // 2
        nibble = tile + 2 + channels + tl.where(channel < half, channel, channel - half)
        packed = tl.load(nibble, mask=channel < tl.where(values == 0, channels, 0), other=0).to(tl.int32)
        center = (packed >> tl.where(channel < half, 0, 4)) & 15
        centers = (((center ^ 8) - 8) * 16)[None, :]
        numbers = tile + 2 + tl.where(values == 0, channels + half, tokens)
        for start in range(0, tokens, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            words, there = _find_words(
                first, ids + part * pages, token, channel, tokens, channels, page_tokens, page_stride, token_stride
            )
            scales = tile + 2 + tl.where(values == 0, channel[None, :], token[:, None])
            steps = base + tl.load(scales, mask=there, other=0).to(tl.int32)
            at = token[:, None] * channels + channel[None, :]
            signed = tl.load(numbers + at, mask=there, other=0).to(tl.int8, bitcast=True)
            decoded = (signed.to(tl.int32) + centers).to(tl.float32) * _as_float(steps << 19)
            tl.store(words, _words_of_numbers(decoded, HALF), mask=there)


INTERPRETED = not isinstance(_encode, triton.JITFunction)
"""Whether Triton's interpreter runs the kernels, on a CPU too (TRITON_INTERPRET=1)."""


def encode_parts(parts: PagedParts, objects: torch.Tensor, payload_at: int, measured: torch.Tensor) -> None:
    """Makes the tiles of every part, on the current stream. No page may be left out.

    Args:
        parts: the numbers.
        objects: uint8 ``[parts, bytes]``: where they go; the tiles of a part lie behind its first `payload_at` bytes.
        payload_at: bytes of a header.
        measured: float64 ``[parts, tiles, 3]``: of each tile the sum of its numbers' squares (infinite where one is not
            finite), that of the squares of what encoding has altered, and the largest of these.
    """
    _launch(_encode, parts, objects, payload_at, measured)


def decode_parts(parts: PagedParts, objects: torch.Tensor, payload_at: int) -> None:
    """Writes the pages of every part from tiles, on the current stream. The arguments are as of `encode_parts`."""
    _launch(_decode, parts, objects, payload_at)


def _launch(kernel: Any, parts: PagedParts, objects: torch.Tensor, payload_at: int, *measured: torch.Tensor) -> None:
    shape = parts.shape
    block_c = triton.next_power_of_2(shape.channels)
    block_t = min(triton.next_power_of_2(shape.tokens), max(1, _TILE // block_c))
    tiles = len(parts.ids) * parts.tiles
    if not tiles:
        return
    kernel[(min(tiles, _PROGRAMS),)](
        parts.addresses,
        parts.ids,
        parts.ids.shape[1],
        parts.page_tokens,
        *parts.strides,
        shape.layers * shape.heads,
        shape.heads,
        shape.tokens,
        shape.channels,
        tiles,
        objects[:, payload_at:],
        objects.stride(0),
        *measured,
        HALF=shape.dtype == "float16",
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        num_warps=4,
        enable_fp_fusion=False,
    )
