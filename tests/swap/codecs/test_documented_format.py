"""Tiles are decoded by another decoder, which does what `docs/design/codecs.md` says in "The coded object"."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.quantized import Int8Codec, K8V4Codec, QuantizedCodec
from tests.swap.codecs import parts
from tests.swap.codecs.parts import Float32s

Int64s = npt.NDArray[np.int64]
CODECS: list[QuantizedCodec] = [Int8Codec(), K8V4Codec()]
SHAPE = PartShape("bfloat16", 2, 5, 2, 131, parts.BY_TOKEN)


class Reader:
    """Reads a part's tiles from their first byte on."""

    def __init__(self, encoded: UInt8s) -> None:
        self.left = encoded

    def read(self, count: int) -> UInt8s:
        taken, self.left = self.left[:count], self.left[count:]
        assert taken.size == count
        return taken

    def u16(self) -> int:
        return int.from_bytes(self.read(2).tobytes(), "little")

    def i8(self, count: int) -> Int64s:
        return self.read(count).view(np.int8).astype(np.int64)

    def i4(self, count: int) -> Int64s:
        packed = self.read((count + 1) // 2)
        halves = np.concatenate((packed & 15, packed >> 4))[:count].astype(np.int64)
        return np.where(halves > 7, halves - 16, halves)

    def scales(self, count: int) -> Float32s:
        base = self.u16()
        return ((base + self.read(count).astype(np.uint32)) << 19).astype(np.uint32).view(np.float32)


def read_keys(reader: Reader, tokens: int, channels: int) -> Float32s:
    scales = reader.scales(channels)
    centers = reader.i4(channels)
    return (reader.i8(tokens * channels).reshape(tokens, -1) + 16 * centers).astype(np.float32) * scales


def read_int8_values(reader: Reader, tokens: int, channels: int) -> Float32s:
    scales = reader.scales(tokens)
    return reader.i8(tokens * channels).reshape(tokens, -1).astype(np.float32) * scales[:, None]


def read_int4_values(reader: Reader, tokens: int, channels: int) -> Float32s:
    groups, quarter = -(-channels // 64), -(-channels // 4)
    scales = reader.scales(tokens * groups).reshape(tokens, groups)
    centers = reader.i8(tokens * groups).reshape(tokens, groups)
    fine = reader.u16()
    steps = 16 * np.stack([reader.i4(channels) for _ in range(tokens)])
    quarters = reader.read(quarter)
    if fine < tokens:
        of_fine = np.concatenate([quarters >> shift & 3 for shift in (0, 2, 4, 6)])[:channels]
        steps[fine] += 4 * of_fine.astype(np.int64)
    group = np.arange(channels) // 64
    return (steps + centers[:, group]).astype(np.float32) * scales[:, group]


def read_part(encoded: UInt8s, shape: PartShape, wide: bool) -> Float32s:
    """``[layer, kv, token, head, channel]``."""
    numbers = np.empty((shape.layers, 2, shape.tokens, shape.heads, shape.channels), np.float32)
    reader, read_values = Reader(encoded), read_int8_values if wide else read_int4_values
    for layer in range(shape.layers):
        for head in range(shape.heads):
            numbers[layer, 0, :, head] = read_keys(reader, shape.tokens, shape.channels)
            numbers[layer, 1, :, head] = read_values(reader, shape.tokens, shape.channels)
    assert not reader.left.size
    return numbers


def assert_decoded_alike(codec: QuantizedCodec, encoded: UInt8s, shape: PartShape) -> None:
    around = np.full(shape.nbytes + 128, 0xA5, np.uint8)
    codec.decode(encoded, shape, around[64:-64])
    largest = {"bfloat16": 3.3895314e38, "float16": 65504.0, "float32": 3.4028235e38}[shape.dtype]
    with np.errstate(over="ignore"):
        numbers = np.clip(read_part(encoded, shape, codec.wide_values), -largest, largest)
    np.testing.assert_array_equal(around[64:-64], parts.to_bytes(numbers, shape))
    assert (around[:64] == 0xA5).all() and (around[-64:] == 0xA5).all()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@settings(max_examples=40, deadline=None)
@given(
    parts.shapes.filter(lambda shape: shape.channels >= 16),
    st.sampled_from([None, 63, 64, 65, 127, 128, 130, 192]),
    st.integers(0, 2**32 - 1),
)
def test_what_is_encoded_is_decoded_as_documented(
    codec: QuantizedCodec, shape: PartShape, channels: int | None, seed: int
) -> None:
    shape = dataclasses.replace(shape, channels=channels or shape.channels, tokens=max(4, shape.tokens))
    encoded = codec.encode(parts.random_part(shape, seed), shape)
    assert isinstance(encoded, np.ndarray)
    assert_decoded_alike(codec, encoded, shape)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", range(4))
def test_any_bytes_are_decoded_as_documented_and_nothing_else_is_written(
    codec: QuantizedCodec, dtype: str, seed: int
) -> None:
    """Scales that are finite; the product of others is no number, and has no sign that is the same everywhere."""
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    encoded = np.random.default_rng(seed).integers(0, 256, codec.encoded_nbytes(shape), np.uint8)
    tokens, channels = shape.tokens, shape.channels
    key_bytes = 2 + channels + (channels + 1) // 2 + tokens * channels
    for tile in encoded.reshape(shape.layers * shape.heads, -1):
        tile[1] %= 12
        tile[key_bytes + 1] %= 12
        if seed % 2 and not codec.wide_values:
            tile[key_bytes + 2 + 2 * tokens * 3 :][:2] = (seed, 0)  # else the fine token is none of the part's
    assert_decoded_alike(codec, encoded, shape)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize(("dtype", "steps"), [("bfloat16", 0xF6F), ("float16", 0x86F), ("float32", 0xF6F)])
@pytest.mark.parametrize("above", [0, 1, 16, 100])
def test_products_about_the_largest_number_are_decoded_as_documented(
    codec: QuantizedCodec, dtype: str, steps: int, above: int
) -> None:
    """Up to `steps` 256 scales are no more than the largest number; kernels then do not look for larger products."""
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    encoded = np.random.default_rng(above).choice(np.array([0x80, 0x88, 0x7F], np.uint8), codec.encoded_nbytes(shape))
    tokens, channels = shape.tokens, shape.channels
    key_bytes = 2 + channels + (channels + 1) // 2 + tokens * channels
    scales = tokens if codec.wide_values else 3 * tokens
    for tile in encoded.reshape(shape.layers * shape.heads, -1):
        for start, count in ((0, channels), (key_bytes, scales)):
            tile[start : start + 2] = np.array([steps + above - 255], "<u2").view(np.uint8)
            tile[start + 2 : start + 2 + count] = 255 - np.arange(count) % 3
    assert_decoded_alike(codec, encoded, shape)
