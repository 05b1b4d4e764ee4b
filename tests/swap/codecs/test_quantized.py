from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.quantized import Int8Codec, K8V4Codec, QuantizedCodec
from prefixd_swap.errors import EncodingError
from tests.swap.codecs import parts
from tests.swap.codecs.parts import Float32s

CODECS: list[QuantizedCodec] = [Int8Codec(), K8V4Codec()]
GROUP = K8V4Codec.int4_group
SHAPE = PartShape("bfloat16", layers=2, tokens=16, heads=2, channels=64, order=parts.BY_TOKEN)
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
LARGEST = {"bfloat16": 3.3895314e38, "float16": 65504.0, "float32": 3.4028235e38}
LEAST_SCALE = 2.0**-100


def round_trip(codec: QuantizedCodec, data: UInt8s, shape: PartShape) -> UInt8s:
    """What `data` becomes."""
    encoded = np.empty(codec.encoded_nbytes(shape), np.uint8)
    made = codec.encode(data, shape)
    assert isinstance(made, np.ndarray), made
    assert made.size == encoded.size
    into = np.empty(data.size, np.uint8)
    codec.decode(made, shape, into)
    return into


def bounded(scales: Float32s) -> Float32s:
    """The largest that scales of tiles ``[layer, kv, token, head, channel]`` may be: rounded up by a sixteenth at most,
    and no further apart than 255 steps."""
    reach = scales.max(axis=(2, 4), keepdims=True) * 2.0**-15
    return np.maximum(np.maximum(scales, reach) * (1 + 1 / 16), LEAST_SCALE)


def int8_scales(numbers: Float32s) -> Float32s:
    """The largest scale that each number ``[layer, kv, token, head, channel]`` may have."""
    of_channel = {"axis": 1, "keepdims": True}
    spread = numbers[:, 0].max(**of_channel) / 2 - numbers[:, 0].min(**of_channel) / 2
    keys = np.maximum(spread / 119, np.abs(numbers[:, 0]).max(**of_channel) / 231) + np.zeros_like(numbers[:, 0])
    values = np.abs(numbers[:, 1]).max(axis=-1, keepdims=True) / 127 + np.zeros_like(numbers[:, 1])
    return bounded(np.stack((keys, values), axis=1))


def int4_levels(values: Float32s) -> Float32s:
    """The largest distance of levels that each of the values ``[layer, token, head, channel]`` may have."""
    distances = np.empty_like(values)
    for start in range(0, values.shape[-1], GROUP):
        some = values[..., start : start + GROUP]
        low, high = np.minimum(some.min(axis=-1), 0), np.maximum(some.max(axis=-1), 0)
        distances[..., start : start + GROUP] = (high / 15 - low / 15)[..., None]
    return 16 * bounded(distances[:, None] / 16)[:, 0]


def assert_within_bound(data: UInt8s, decoded: UInt8s, shape: PartShape, codec: QuantizedCodec) -> None:
    """Each number is half a scale away at most, in 4 bits half the distance of two levels and what rounding them adds;
    and what rounding to the dtype adds."""
    exact, others = (parts.to_numbers(each, shape).astype(np.float64) for each in (data, decoded))
    scales = int8_scales(exact)
    most = scales / 2 * (1 + 1e-5)
    if not codec.wide_values:
        scales[:, 1] = int4_levels(exact[:, 1])
        most[:, 1] = scales[:, 1] * (1 / 2 + 1 / 16)
    bound = most + np.abs(exact) * EPSILON[shape.dtype] * 1.1 + scales * EPSILON[shape.dtype]
    if shape.dtype == "float16":
        bound += 2.0**-25
    assert (np.abs(exact - others) <= bound).all(), np.max(np.abs(exact - others) / bound)


@settings(max_examples=60, deadline=None)
@given(parts.shapes.filter(lambda shape: shape.tokens > 2 and shape.channels > 8), st.integers(0, 99), st.booleans())
def test_no_number_is_further_away_than_half_its_scale(shape: PartShape, seed: int, wide: bool) -> None:
    codec = CODECS[0 if wide else 1]
    data = parts.random_part(shape, seed, channel_spread=2)
    assert_within_bound(data, round_trip(codec, data, shape), shape, codec)


def test_the_worst_error_of_int8_values_of_128_channels() -> None:
    """A row has one number that needs the next scale, and others that lie between two steps of it."""
    shape = PartShape("float32", 1, 64, 1, 128, parts.BY_LAYER)
    numbers = np.ones((1, 2, 64, 1, 128), np.float32)
    numbers[0, 1] = 0.4999 * 17 / 16
    numbers[0, 1, :, :, 0] = 127.001
    largest, rms = parts.plain_errors(data := parts.to_bytes(numbers, shape), round_trip(CODECS[0], data, shape), shape)
    assert 0.047 < rms.max() < 0.048 and largest.max() < 0.048


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_zeros_and_the_largest_and_smallest_numbers_keep_the_bound(codec: QuantizedCodec, dtype: str) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    numbers = parts.to_numbers(parts.random_part(shape), shape).copy()
    numbers[0, :, :, 0] = 0
    numbers[0, :, :, 1, 7] = 0
    numbers[1, :, 3] *= np.float32(LARGEST[dtype] / np.abs(numbers[1, :, 3]).max())
    numbers[1, 0, 5, 0, 9] = -LARGEST[dtype]
    numbers[1, :, 2] = 1e-40 if dtype != "float16" else 2.0**-24
    data = parts.to_bytes(numbers, shape)
    decoded = round_trip(codec, data, shape)
    others = parts.to_numbers(decoded, shape)
    assert np.isfinite(others).all()
    assert not others[0, :, :, 0].any() and not others[0, : 2 if codec.wide_values else 1, :, 1, 7].any()
    assert_within_bound(data, decoded, shape, codec)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-90, 2.0**-14, 2.0**15, 2.0**126])
def test_numbers_of_any_size_keep_the_bound(codec: QuantizedCodec, dtype: str, scale: float) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    numbers = parts.to_numbers(parts.random_part(shape, channel_spread=0.2), shape).copy()
    numbers *= np.float32(scale / np.abs(numbers).max())
    data = parts.to_bytes(np.clip(numbers, -LARGEST[dtype], LARGEST[dtype]), shape)
    assert_within_bound(data, round_trip(codec, data, shape), shape, codec)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_encoding_is_the_same_for_every_order_of_axes(codec: QuantizedCodec) -> None:
    numbers = parts.to_numbers(parts.random_part(SHAPE), SHAPE)
    made = set()
    for order in parts.ORDERS:
        shape = dataclasses.replace(SHAPE, order=order)
        data = parts.to_bytes(numbers, shape)
        encoded = codec.encode(data, shape)
        assert isinstance(encoded, np.ndarray)
        made.add(encoded.tobytes())
        assert np.array_equal(
            parts.to_numbers(round_trip(codec, data, shape), shape),
            parts.to_numbers(round_trip(codec, parts.random_part(SHAPE), SHAPE), SHAPE),
        )
    assert len(made) == 1


@pytest.mark.parametrize(("tokens", "int8", "k8v4"), [(16, 0.527, 0.411), (64, 0.509, 0.39)])
def test_scales_do_not_eat_the_gain(tokens: int, int8: float, k8v4: float) -> None:
    shape = PartShape("bfloat16", 32, tokens, 8, 128, parts.BY_TOKEN)
    assert CODECS[0].encoded_nbytes(shape) <= int8 * shape.nbytes
    assert CODECS[1].encoded_nbytes(shape) <= k8v4 * shape.nbytes


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bytes_that_are_not_aligned_give_the_same(codec: QuantizedCodec, dtype: str) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    data = parts.random_part(shape)
    around = np.zeros(data.size + 1, np.uint8)
    around[1:] = data
    encoded = codec.encode(around[1:], shape)
    assert isinstance(encoded, np.ndarray) and np.array_equal(encoded, codec.encode(data, shape))
    into = np.zeros(data.size + 3, np.uint8)
    codec.decode(encoded, shape, into[1:-2])
    assert np.array_equal(into[1:-2], round_trip(codec, data, shape))
    assert not into[0] and not into[-2:].any()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_encoded_bytes_of_another_length_are_refused(codec: QuantizedCodec) -> None:
    encoded = codec.encode(parts.random_part(SHAPE), SHAPE)
    assert isinstance(encoded, np.ndarray)
    into = np.empty(SHAPE.nbytes, np.uint8)
    with pytest.raises(EncodingError, match=f"which takes {encoded.size}"):
        codec.decode(encoded[:-1], SHAPE, into)
    with pytest.raises(EncodingError, match="cannot be"):
        codec.decode(encoded, None, into)
    with pytest.raises(EncodingError, match="cannot be"):
        codec.decode(encoded, SHAPE, into[:-2])


def test_keys_that_differ_little_from_token_to_token_lose_less_than_around_zero() -> None:
    """The reason for centers: slow rotary positions have such channels."""
    numbers = parts.to_numbers(parts.random_part(SHAPE), SHAPE).copy()
    numbers[:, 0] = 10 + 0.5 * numbers[:, 0]
    shape = dataclasses.replace(SHAPE, dtype="float32")
    keys = parts.to_numbers(round_trip(CODECS[0], data := parts.to_bytes(numbers, shape), shape), shape)[:, 0]
    exact = parts.to_numbers(data, shape)[:, 0]
    scale = np.abs(exact).max(axis=1, keepdims=True) / 127
    around_zero = np.sqrt(((np.rint(exact / scale) * scale - exact) ** 2).mean())
    assert np.sqrt(((keys - exact) ** 2).mean()) < 0.6 * around_zero


def error_of_values(numbers: Float32s) -> float:
    """The relative RMS error of k8v4 values ``[token, channel]``."""
    shape = PartShape("float32", 1, len(numbers), 1, numbers.shape[1], parts.BY_LAYER)
    data = parts.to_bytes(np.stack((numbers, numbers))[None, :, :, None].astype(np.float32), shape)
    values = parts.to_numbers(round_trip(CODECS[1], data, shape), shape)[0, 1, :, 0]
    return float(np.sqrt(((values - numbers) ** 2).mean() / (numbers**2).mean()))


def test_int4_levels_lie_where_the_numbers_are() -> None:
    """The reason for a center."""
    normal = np.random.default_rng(0).standard_normal((64, 128))
    groups = normal.reshape(64, -1, GROUP)
    around_zero = np.abs(groups).max(axis=-1, keepdims=True) / 7
    symmetric = np.sqrt(((np.rint(groups / around_zero) * around_zero - groups) ** 2).mean())
    assert error_of_values(normal) < 0.9 * symmetric
    assert error_of_values(np.abs(normal)) < 0.6 * symmetric, "all 16 levels are above zero"


@pytest.mark.parametrize("sink", [0, 3, 15])
@pytest.mark.parametrize("channels", [64, 70, 33])
def test_the_smallest_token_of_int4_values_has_four_times_as_many_levels(sink: int, channels: int) -> None:
    shape = dataclasses.replace(SHAPE, dtype="float32", channels=channels)
    numbers = parts.to_numbers(parts.random_part(shape, channel_spread=0), shape).copy()
    numbers[:, 1, sink] /= 10
    others = parts.to_numbers(round_trip(CODECS[1], data := parts.to_bytes(numbers, shape), shape), shape)[:, 1]
    exact = parts.to_numbers(data, shape)[:, 1]
    errors = np.sqrt(((others - exact) ** 2).mean((0, 2, 3)) / (exact**2).mean((0, 2, 3)))
    assert errors[sink] < 0.35 * np.delete(errors, sink).min()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("largest", [1e-38, 1e-30, 1e-5, 1.0])
def test_threads_that_flush_denormal_numbers_to_zero_decode_the_same(
    codec: QuantizedCodec, dtype: str, largest: float
) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    data = parts.to_bytes(parts.to_numbers(parts.random_part(shape), shape) * np.float32(largest), shape)
    encoded = codec.encode(data, shape)
    assert isinstance(encoded, np.ndarray)
    plain, flushed = np.empty(data.size, np.uint8), np.empty(data.size, np.uint8)
    codec.decode(encoded, shape, plain)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such mode")
    try:
        codec.decode(encoded, shape, flushed)
    finally:
        torch.set_flush_denormal(False)
    assert np.array_equal(plain, flushed)
