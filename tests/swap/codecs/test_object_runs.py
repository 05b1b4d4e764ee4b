"""Runs of coded objects are decoded and verified as one by one; what is damaged is left to be decoded alone."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from prefixd_swap.codecs.codec import UInt8s
from prefixd_swap.codecs.coding import Coded, Coding, Decoded, code, decode_object, decode_run
from prefixd_swap.codecs.kernels.xxh3 import LEAST_BYTES, hash_at
from prefixd_swap.codecs.object_header import header_nbytes
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.registry import find_codec
from tests.swap.codecs.parts import BY_LAYER, BY_TOKEN, random_part

SHAPE = PartShape("bfloat16", 2, 16, 2, 64, BY_TOKEN)
COUNT = 3


class Run:
    """Objects in one array with gaps between them, and memory for what they are decoded to."""

    def __init__(self, codec: str = "int8", shape: PartShape = SHAPE) -> None:
        made = [code(random_part(shape, seed), Coding(find_codec(codec), shape)) for seed in range(COUNT)]
        self.objects = [each.data for each in made if isinstance(each, Coded)]
        self.sizes = [each.size for each in self.objects]
        self.starts = [(max(self.sizes) + 5) * at for at in range(COUNT)]
        self.stored = np.zeros(self.starts[-1] + self.sizes[-1], np.uint8)
        for start, each in zip(self.starts, self.objects, strict=True):
            self.stored[start : start + each.size] = each
        self.checksums = [xxhash.xxh3_64_intdigest(each.data) for each in self.objects]
        self.into = np.zeros((COUNT, shape.nbytes), np.uint8)

    def decode(self) -> list[Decoded | None]:
        into = [row.ctypes.data for row in self.into]
        return decode_run(self.stored, self.starts, self.sizes, self.checksums, into, self.into.shape[1])

    def alone(self, at: int) -> tuple[Decoded, UInt8s]:
        into = np.zeros(self.into.shape[1], np.uint8)
        return decode_object(self.objects[at], into), into


def test_the_kernel_hashes_as_xxhash() -> None:
    data = np.random.default_rng(1).integers(0, 256, 1 << 14, np.uint8)
    for nbytes in (*range(LEAST_BYTES, 1400), 2047, 2048, 2049, 8191, 1 << 13):
        for start in (0, 3):
            expected = xxhash.xxh3_64_intdigest(data[start : start + nbytes].data)
            assert int(hash_at(np.uint64(data.ctypes.data + start), nbytes)) == expected


@pytest.mark.parametrize("codec", ["int8", "k8v4"])
@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        PartShape("float16", 2, 16, 2, 64, BY_LAYER),
        PartShape("float32", 1, 7, 3, 20, BY_TOKEN),
        PartShape("bfloat16", 2, 5, 1, 37, BY_LAYER),
    ],
    ids=str,
)
def test_a_run_is_decoded_as_its_objects(codec: str, shape: PartShape) -> None:
    run = Run(codec, shape)
    decoded = run.decode()
    run.stored[:] = 0  # the buffer is read into again
    for at, each in enumerate(decoded):
        expected, into = run.alone(at)
        assert each is not None and each.errors is not None and expected.errors is not None
        assert (each.checksum, each.codec, each.lossy) == (expected.checksum, codec, True)
        assert (each.errors.rms == expected.errors.rms).all() and (each.errors.largest == expected.errors.largest).all()
        assert (run.into[at] == into).all()


def test_only_an_object_with_altered_bytes_is_left_out() -> None:
    run = Run()
    run.stored[run.starts[1] + run.sizes[1] - 1] ^= 1
    assert [each is None for each in run.decode()] == [False, True, False]
    run = Run()
    run.checksums[2] ^= 1
    assert [each is None for each in run.decode()] == [False, False, True]


def test_an_object_that_does_not_decode_to_what_was_encoded_is_left_out() -> None:
    run, at = Run(), 1
    run.stored[run.starts[at] + header_nbytes(SHAPE.layers) + 100] ^= 1  # and stored so
    stored = run.stored[run.starts[at] : run.starts[at] + run.sizes[at]]
    run.checksums[at] = xxhash.xxh3_64_intdigest(stored.tobytes())
    assert [each is None for each in run.decode()] == [False, True, False]


def test_a_run_of_other_objects_is_decoded_one_by_one() -> None:
    run = Run()
    run.stored[run.starts[1]] ^= 1  # no header
    assert run.decode() == [None] * COUNT
    assert Run("lossless").decode() == [None] * COUNT
    run = Run()
    run.into = np.zeros((COUNT, SHAPE.nbytes // 2), np.uint8)  # parts of other sizes
    assert run.decode() == [None] * COUNT
    run = Run()
    run.into = np.zeros(COUNT * SHAPE.nbytes + 1, np.uint8)[1:].reshape(COUNT, -1)  # no words begin there
    assert run.decode() == [None] * COUNT
    run, other = Run(), Run(shape=PartShape("bfloat16", 2, 16, 2, 64, BY_LAYER))
    run.stored[run.starts[2] : run.starts[2] + run.sizes[2]] = other.objects[2]
    assert run.decode() == [None] * COUNT
