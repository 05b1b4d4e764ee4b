from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap.codecs.codec import LayerErrors, Refused, UInt8s
from prefixd_swap.codecs.coding import Coded, Coding, code, code_or_lossless, decode_object
from prefixd_swap.codecs.object_header import header_nbytes, read_header
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.quantized import LEAST_CHANNELS
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import EncodingError
from tests.swap.codecs import parts

SHAPE = PartShape("bfloat16", layers=4, tokens=16, heads=2, channels=64, order=parts.BY_TOKEN)
PART = parts.random_part(SHAPE)
LOSSY = ("int8", "k8v4")


def coded(name: str, data: UInt8s = PART, shape: PartShape | None = SHAPE, bound: float | None = None) -> Coded:
    """A part that is encoded, or the test fails."""
    result = code(data, Coding(find_codec(name), shape, bound))
    assert isinstance(result, Coded), result
    return result


@pytest.mark.parametrize("name", ["lossless", *LOSSY])
def test_an_object_decodes_to_the_bytes_that_were_certified(name: str) -> None:
    result = coded(name)
    into = np.zeros(PART.size, np.uint8)
    decoded = decode_object(result.data, into)
    assert xxhash.xxh3_64_intdigest(into.data) == decoded.checksum == result.decoded_checksum
    assert decoded.codec == result.codec == name
    assert decoded.lossy == (name in LOSSY) == (not np.array_equal(into, PART))
    if not decoded.lossy:
        assert (decoded.largest, decoded.rms, decoded.errors, result.errors) == (0, 0, None, None)
        return
    largest, rms = parts.plain_errors(PART, into, SHAPE)
    for errors in (decoded.errors, result.errors):
        assert errors is not None
        assert errors.largest == pytest.approx(largest, rel=1e-5)
        assert errors.rms == pytest.approx(rms, rel=1e-5)
    assert decoded.largest == pytest.approx(largest.max(), rel=1e-5)
    assert decoded.rms == pytest.approx(rms.max(), rel=1e-5)


@pytest.mark.parametrize("name", ["lossless", *LOSSY])
def test_a_header_says_what_the_object_is(name: str) -> None:
    result = coded(name)
    header = read_header(result.data)
    assert (header.codec, header.nbytes, header.shape) == (name, PART.size, SHAPE)
    assert header.checksum == result.decoded_checksum
    assert header.header_nbytes + header.payload_nbytes == result.data.size < PART.size
    assert (header.errors is None) == (name == "lossless")


def test_a_part_of_unknown_shape_is_lossless_only() -> None:
    assert read_header(coded("lossless", shape=None).data).shape is None
    for name in LOSSY:
        assert code(PART, Coding(find_codec(name))) is Refused.NOT_TAKEN
    other = dataclasses.replace(SHAPE, tokens=8)
    for name in ("lossless", *LOSSY):
        assert code(PART, Coding(find_codec(name), other)) is Refused.NOT_TAKEN


@pytest.mark.parametrize("name", LOSSY)
def test_rows_of_few_channels_would_take_too_long(name: str) -> None:
    few = dataclasses.replace(SHAPE, heads=16, channels=8)
    assert few.nbytes == SHAPE.nbytes
    assert code(PART, Coding(find_codec(name), few)) is Refused.NOT_TAKEN
    assert isinstance(code(PART, Coding(find_codec(name), dataclasses.replace(SHAPE, heads=8, channels=16))), Coded)


def test_what_is_not_fewer_bytes_with_its_header_stays() -> None:
    noise = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    assert code(noise, Coding(find_codec("lossless"))) is Refused.NOT_FEWER
    assert code(PART, Coding(find_codec("exact"), SHAPE)) is Refused.NOT_FEWER
    small = PartShape("bfloat16", layers=1, tokens=2, heads=1, channels=16, order=parts.BY_LAYER)
    assert find_codec("int8").encode(parts.random_part(small), small) is not Refused.NOT_FEWER
    assert code(parts.random_part(small), Coding(find_codec("int8"), small)) is Refused.NOT_FEWER


@pytest.mark.parametrize("name", LOSSY)
def test_a_part_above_the_bound_stays(name: str) -> None:
    errors = coded(name).errors
    assert errors is not None
    most = float(errors.rms.max())
    assert coded(name, bound=most).errors is not None
    assert code(PART, Coding(find_codec(name), SHAPE, most * 0.999)) is Refused.ABOVE_BOUND
    spread = parts.random_part(SHAPE, channel_spread=0)
    numbers = parts.to_numbers(spread, SHAPE).copy()
    numbers[1, 1] *= 1e-3
    numbers[1, 1, :, :, 0] = 30  # an outlier in each row of values: the others get few levels
    assert code(parts.to_bytes(numbers, SHAPE), Coding(find_codec("k8v4"), SHAPE, 0.01)) is Refused.ABOVE_BOUND


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kv", [0, 1])
def test_a_part_with_a_number_that_is_not_finite_stays(name: str, dtype: str, number: float, kv: int) -> None:
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    numbers = parts.to_numbers(parts.random_part(shape), shape).copy()
    numbers[2, kv, 3, 1, 5] = number
    with np.errstate(over="ignore"):
        data = parts.to_bytes(numbers, shape)
    assert code(data, Coding(find_codec(name), shape)) is Refused.NOT_FINITE
    into = np.empty(data.size, np.uint8)
    decode_object(coded("lossless", data, shape).data, into)
    assert np.array_equal(into, data)


@pytest.mark.parametrize("name", LOSSY)
def test_what_a_lossy_codec_refuses_for_its_numbers_is_coded_without_loss(name: str) -> None:
    made, refused = code_or_lossless(PART, Coding(find_codec(name), SHAPE, 1e-6))
    assert made is not None and made.codec == "lossless" and refused is Refused.ABOVE_BOUND
    numbers = parts.to_numbers(PART, SHAPE).copy()
    numbers[0, 0, 0] = np.inf
    made, refused = code_or_lossless(parts.to_bytes(numbers, SHAPE), Coding(find_codec(name), SHAPE))
    assert made is not None and made.codec == "lossless" and refused is Refused.NOT_FINITE
    made, refused = code_or_lossless(PART, Coding(find_codec(name), SHAPE))
    assert made is not None and made.codec == name and refused is None
    assert code_or_lossless(PART, Coding(find_codec(name))) == (None, Refused.NOT_TAKEN)


def decodes_or_refuses(stored: UInt8s, nbytes: int = PART.size) -> UInt8s | None:
    """Decodes between guards, which must be untouched; None where it is refused as malformed."""
    around = np.full(nbytes + 128, 0xA5, np.uint8)
    into = around[64:-64]
    try:
        decode_object(stored, into)
        result = into
    except EncodingError:
        result = None
    assert (around[:64] == 0xA5).all() and (around[-64:] == 0xA5).all()
    return result


def sealed(stored: UInt8s) -> UInt8s:
    """The same object with a header whose checksum is right again, as far as it has one."""
    stored = stored.copy()
    (layers,) = struct.unpack_from("<I", stored, 56)
    end = header_nbytes(layers) - 8
    if end + 8 <= stored.size:
        check = xxhash.xxh3_64_intdigest(stored[:end].tobytes())
        stored[end : end + 8] = np.frombuffer(check.to_bytes(8, "little"), np.uint8)
    return stored


OBJECTS = {name: coded(name).data for name in ("lossless", *LOSSY)} | {"opaque": coded("lossless", shape=None).data}


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.sampled_from(sorted(OBJECTS)), st.booleans())
def test_random_bytes_are_refused(noise: bytes, name: str, has_a_head: bool) -> None:
    content = OBJECTS[name][: header_nbytes(0)].tobytes() + noise if has_a_head else noise
    assert decodes_or_refuses(np.frombuffer(content, np.uint8)) is None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(OBJECTS)), st.data(), st.booleans())
def test_an_object_with_a_flipped_bit_is_refused(name: str, data: Any, forged: bool) -> None:
    """Also with a header that was made to fit, unless what was flipped is what it says of errors."""
    stored = OBJECTS[name].copy()
    layers = 0 if name in ("lossless", "opaque") else SHAPE.layers
    head = header_nbytes(layers)
    at = data.draw(st.one_of(st.integers(0, stored.size - 1), st.integers(0, head + 64)))
    stored[at] ^= 1 << data.draw(st.integers(0, 7))
    if forged:
        stored = sealed(stored)
        decodes_or_refuses(stored)
    else:
        assert decodes_or_refuses(stored) is None


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(OBJECTS)), st.data())
def test_a_truncated_object_or_one_with_more_behind_it_is_refused(name: str, data: Any) -> None:
    stored = OBJECTS[name]
    kept = data.draw(st.integers(0, stored.size - 1))
    assert decodes_or_refuses(stored[:kept]) is None
    assert decodes_or_refuses(np.concatenate((stored, stored[: kept + 1]))) is None


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(sorted(OBJECTS)),
    st.lists(
        st.tuples(
            st.sampled_from(
                [(5, 1), (6, 1), (7, 1), (8, 1), (11, 1), (16, 8), (24, 8), (40, 4), (44, 4), (52, 4), (56, 4)]
            ),
            st.one_of(st.integers(0, 20), st.integers(0, 2**64 - 1), st.sampled_from([2**31, 2**32 - 1, PART.size])),
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_a_header_that_lies_is_refused_or_harmless(name: str, lies: list[tuple[tuple[int, int], int]]) -> None:
    """Codec, dtype, axes, lengths and sizes, with a checksum that fits."""
    stored = OBJECTS[name].copy()
    for (at, nbytes), value in lies:
        stored[at : at + nbytes] = np.frombuffer((value % (1 << 8 * nbytes)).to_bytes(nbytes, "little"), np.uint8)
    result = decodes_or_refuses(sealed(stored))
    assert result is None or np.array_equal(result, decodes_or_refuses(OBJECTS[name]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_planes_that_lie_are_refused(data: Any) -> None:
    """The split, the planes' lengths and zstd's own header, which may promise any number of bytes."""
    stored = OBJECTS["lossless"].copy()
    start = header_nbytes(0)
    for at in data.draw(st.lists(st.integers(start, start + 40), min_size=1, max_size=4)):
        stored[at] = data.draw(st.integers(0, 255))
    result = decodes_or_refuses(sealed(stored))
    assert result is None or np.array_equal(result, PART)


def test_an_object_of_another_part_is_refused() -> None:
    with pytest.raises(EncodingError, match="a part with 32768 bytes was read for one with 32760"):
        decode_object(OBJECTS["int8"], np.empty(PART.size - 8, np.uint8))


def test_a_newer_version_and_an_unknown_codec_are_named() -> None:
    newer = OBJECTS["int8"].copy()
    newer[4] = 2
    with pytest.raises(EncodingError, match="has version 2; this prefixd reads version 1"):
        read_header(newer)
    unknown = OBJECTS["int8"].copy()
    unknown[5] = 77
    with pytest.raises(EncodingError, match="has codec 77; this prefixd has exact, lossless, int8, k8v4"):
        read_header(sealed(unknown))


@settings(max_examples=40, deadline=None)
@given(parts.shapes, st.integers(0, 2**32 - 1), st.sampled_from(["lossless", *LOSSY]))
def test_any_shape_decodes_from_its_object_alone(shape: PartShape, seed: int, name: str) -> None:
    data = parts.random_part(shape, seed)
    result = code(data, Coding(find_codec(name), shape, most_error=1.0))
    if isinstance(result, Refused):
        few = name != "lossless" and shape.channels < LEAST_CHANNELS
        assert result is (Refused.NOT_TAKEN if few else Refused.NOT_FEWER)
        return
    into = np.empty(data.size, np.uint8)
    decoded = decode_object(result.data, into)
    assert read_header(result.data).shape == shape
    if name == "lossless":
        assert np.array_equal(into, data)
    else:
        assert isinstance(decoded.errors, LayerErrors)
        largest, rms = parts.plain_errors(data, into, shape)
        assert decoded.errors.largest == pytest.approx(largest, rel=1e-5)
        assert decoded.errors.rms == pytest.approx(rms, rel=1e-5)
