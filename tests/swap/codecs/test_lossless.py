from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap.codecs.codec import Refused, UInt8s
from prefixd_swap.codecs.lossless import LosslessCodec
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.errors import EncodingError
from tests.swap.codecs import parts

CODEC = LosslessCodec()


def round_trip(data: UInt8s, shape: PartShape | None) -> int | None:
    """Encoded bytes; None where they would not be fewer. Fails if what comes back differs."""
    encoded = CODEC.encode(data, shape)
    if isinstance(encoded, Refused):
        assert encoded is Refused.NOT_FEWER
        return None
    into = np.empty(data.size, np.uint8)
    CODEC.decode(encoded, shape, into)
    assert np.array_equal(into, data)
    assert encoded.size < data.size
    return encoded.size


@settings(max_examples=100, deadline=None)
@given(parts.shapes, st.integers(0, 99), st.booleans())
def test_every_bit_of_a_part_comes_back(shape: PartShape, seed: int, is_known: bool) -> None:
    round_trip(parts.random_part(shape, seed), shape if is_known else None)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_come_back(content: bytes, times: int) -> None:
    """Of any length, also such as are no whole words, and with bits that are no numbers."""
    round_trip(np.frombuffer(content * times, np.uint8), None)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.70), ("float16", 0.89), ("float32", 0.86)])
def test_exponents_compress_and_mantissas_do_not(dtype: str, most: float) -> None:
    shape = PartShape(dtype, 8, 16, 8, 128, parts.BY_TOKEN)
    data = parts.random_part(shape)
    size = round_trip(data, shape)
    assert size is not None and 0.6 * data.size < size < most * data.size
    assert round_trip(data, None) == size, "the split that is found by trial is the one that the dtype has"


def test_zeros_and_noise() -> None:
    shape = PartShape("bfloat16", 8, 16, 8, 128, parts.BY_TOKEN)
    zeros = round_trip(np.zeros(shape.nbytes, np.uint8), shape)
    assert zeros is not None and zeros < shape.nbytes / 100
    noise = np.random.default_rng(0).integers(0, 256, shape.nbytes, np.uint8)
    assert round_trip(noise, shape) is None and round_trip(noise, None) is None


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_bytes_that_are_not_aligned_come_back(start: int) -> None:
    shape = PartShape("float32", 2, 16, 2, 64, parts.BY_TOKEN)
    around = np.zeros(shape.nbytes + 8, np.uint8)
    data = around[start : start + shape.nbytes]
    data[:] = parts.random_part(shape)
    encoded = CODEC.encode(data, shape)
    assert isinstance(encoded, np.ndarray)
    target = np.zeros(shape.nbytes + 8, np.uint8)
    CODEC.decode(encoded, shape, target[start : start + shape.nbytes])
    assert np.array_equal(target, around)


def test_threads_do_not_share_contexts() -> None:
    shape = PartShape("bfloat16", 4, 16, 4, 64, parts.BY_TOKEN)
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        barrier.wait()
        for turn in range(20):
            round_trip(parts.random_part(shape, 100 * seed + turn), shape)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_frame_that_promises_too_much_takes_no_memory() -> None:
    """A terabyte in zstd's own header, and bytes that go on where the plane has ended."""
    whole = np.zeros(1 << 16, np.uint8)
    good = CODEC.encode(whole, None)
    assert isinstance(good, np.ndarray)
    frame = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + bytes(40)
    planes = bytes([1]) + len(frame).to_bytes(8, "little")
    into = np.empty(whole.size, np.uint8)
    with pytest.raises(EncodingError, match="of 65536 bytes was compressed as one of 1099511627776"):
        CODEC.decode(np.frombuffer(planes + frame, np.uint8), None, into)
    again = good[9:].tobytes() + b"more"
    planes = bytes([1]) + len(again).to_bytes(8, "little")
    with pytest.raises(EncodingError, match="cannot be decompressed"):
        CODEC.decode(np.frombuffer(planes + again, np.uint8), None, into)
