"""int8 objects made of an engine's pages by Triton: bit for bit what the codec makes of the same numbers.

By Triton's interpreter (TRITON_INTERPRET=1, where Triton is installed), and on a GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd_swap.codecs.codec import Refused, UInt8s
from prefixd_swap.codecs.coding import Coded, Coding, code, decode_object
from prefixd_swap.codecs.object_header import header_nbytes
from prefixd_swap.codecs.on_device.certified import certify, object_nbytes
from prefixd_swap.codecs.on_device.paged_parts import PagedParts
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import GeometryError
from tests.swap.codecs import parts

_OUTSIDE = 77  # what memory beside pages and objects holds


@dataclass(frozen=True)
class Cache:
    """An engine's cache of numbers ``[layer, kv, page, token, head, channel]``, in one of its layouts."""

    layers: torch.Tensor
    shape: PartShape
    ids: npt.NDArray[np.int64]

    @classmethod
    def make(cls, shape: PartShape, pages: int, count: int, layout: str, device: torch.device, seed: int) -> Cache:
        """A cache that holds `count` parts of so many pages each, scattered, and two pages more."""
        all_pages, tokens = count * pages + 2, shape.tokens // pages
        sizes = {"layer": shape.layers, "kv": 2, "page": all_pages, "token": tokens, "head": shape.heads}
        words = torch.full((*(sizes[axis] for axis in layout.split()), shape.channels), _OUTSIDE, dtype=torch.int16)
        order = [layout.split().index(axis) for axis in sizes]
        layers = words.to(device).view(getattr(torch, shape.dtype)).permute(*order, 5)
        ids = np.random.default_rng(seed).permutation(all_pages)[: count * pages].reshape(count, pages)
        return cls(layers, shape, ids.astype(np.int64))

    @property
    def parts(self) -> PagedParts:
        return PagedParts.of_layers(self.shape, [(layer[0], layer[1]) for layer in self.layers], self.ids)

    def write(self, number: int, data: UInt8s) -> None:
        """Puts a part's bytes into its pages."""
        words = data.view(np.int16).reshape(self.shape.sizes)
        words = words.transpose([self.shape.order.index(axis) for axis in parts.AXES])
        paged = words.reshape(*words.shape[:2], self.ids.shape[1], -1, *words.shape[3:])
        self.layers[:, :, self.ids[number]] = (
            torch.from_numpy(paged.copy()).view(self.layers.dtype).to(self.layers.device)
        )

    def read(self, number: int) -> UInt8s:
        """The bytes of a part as its pages are."""
        paged = self.layers[:, :, self.ids[number]].cpu().contiguous().view(torch.int16).numpy()
        words = paged.reshape(*paged.shape[:2], -1, *paged.shape[4:])
        turned = words.transpose([parts.AXES.index(axis) for axis in self.shape.order])
        return np.ascontiguousarray(turned).reshape(-1).view(np.uint8)


LAYOUTS = (
    "layer kv page token head",
    "layer page kv token head",
    "page layer kv head token",
    "layer page head token kv",
)
shapes = st.builds(
    PartShape,
    st.sampled_from(["bfloat16", "float16"]),
    layers=st.integers(1, 2),
    tokens=st.integers(1, 20),
    heads=st.integers(1, 3),
    channels=st.integers(1, 70),
    order=st.sampled_from(parts.ORDERS),
)


def triton_kernels() -> tuple[Any, torch.device]:
    """The kernels, and where they run."""
    module = pytest.importorskip("prefixd_swap.codecs.on_device.int8_triton", exc_type=ImportError)
    if torch.cuda.is_available() and "PREFIXD_TEST_STAND_IN" not in os.environ:
        return module, torch.device("cuda")
    if "Interpreted" not in type(module._encode).__name__:
        pytest.skip("Triton compiles for a GPU here, and there is none")
    return module, torch.device("cpu")


def encode(module: Any, cache: Cache) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    """The objects without headers, and what was measured. Nothing behind an object is written."""
    shape, device = cache.shape, cache.layers.device
    nbytes, paged = object_nbytes(shape), cache.parts
    objects = torch.full((len(cache.ids), nbytes + 3), _OUTSIDE, dtype=torch.uint8, device=device)
    measured = torch.empty((len(cache.ids), paged.tiles, 3), dtype=torch.float64, device=device)
    module.encode_parts(paged, objects, header_nbytes(shape.layers), measured)
    made = objects.cpu().numpy()
    assert (made[:, nbytes:] == _OUTSIDE).all() and (made[:, : header_nbytes(shape.layers)] == _OUTSIDE).all()
    return np.ascontiguousarray(made[:, :nbytes]), measured.cpu().numpy()


def assert_as_codec(module: Any, cache: Cache, written: list[UInt8s]) -> None:
    """What is made of the pages is what `code` makes of the bytes, and becomes pages again."""
    shape = cache.shape
    for number, data in enumerate(written):
        cache.write(number, data)
    objects, measured = encode(module, cache)
    decoded = Cache(torch.full_like(cache.layers, 3.0), shape, cache.ids)
    there = torch.from_numpy(objects).to(cache.layers.device)
    module.decode_parts(decoded.parts, there, header_nbytes(shape.layers))
    at = header_nbytes(shape.layers)
    for number, data in enumerate(written):
        wanted = find_codec("int8").encode(data, shape)
        made = code(data, Coding(find_codec("int8"), shape, most_error=np.inf))
        found = certify(objects[number], measured[number], shape, most_error=np.inf)
        if isinstance(made, Refused):
            assert found is made
            if not isinstance(wanted, Refused):
                np.testing.assert_array_equal(objects[number][at:], wanted)
            continue
        assert isinstance(found, Coded) and found.errors is not None and made.errors is not None
        np.testing.assert_array_equal(found.data[at:], made.data[at:])
        assert found.decoded_checksum == made.decoded_checksum
        np.testing.assert_allclose(found.errors.largest, made.errors.largest, rtol=1e-6)
        np.testing.assert_allclose(found.errors.rms, made.errors.rms, rtol=1e-6)
        into = np.empty(shape.nbytes, np.uint8)
        assert decode_object(found.data, into).checksum == made.decoded_checksum
        np.testing.assert_array_equal(decoded.read(number), into)


@pytest.mark.gpu
@pytest.mark.real_gpu
@settings(max_examples=15, deadline=None)
@given(st.data(), shapes, st.integers(1, 2), st.sampled_from(LAYOUTS), st.integers(0, 99))
def test_pages_become_what_the_codec_makes_of_their_numbers(
    data: st.DataObject, shape: PartShape, count: int, layout: str, seed: int
) -> None:
    module, device = triton_kernels()
    pages = data.draw(st.sampled_from([each for each in range(1, shape.tokens + 1) if shape.tokens % each == 0]))
    cache = Cache.make(shape, pages, count, layout, device, seed)
    spread = data.draw(st.sampled_from([0.0, 0.7, 4.0]))
    assert_as_codec(module, cache, [parts.random_part(shape, seed + number, spread) for number in range(count)])


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@settings(max_examples=15, deadline=None)
@given(words=st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64), seed=st.integers(0, 99))
def test_any_bits_become_what_the_codec_makes_of_them(dtype: str, words: list[int], seed: int) -> None:
    """Zeros, numbers that are denormal, the largest, and those that are none."""
    module, device = triton_kernels()
    shape = PartShape(dtype, 1, 4, 2, 24, parts.BY_TOKEN)
    chosen = np.random.default_rng(seed).choice(np.array(words, np.uint16), shape.nbytes // 2)
    assert_as_codec(module, Cache.make(shape, 2, 1, LAYOUTS[0], device, seed), [chosen.view(np.uint8)])


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_of_several_turns_and_more_of_them_than_programs(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, device = triton_kernels()
    monkeypatch.setattr(module, "_PROGRAMS", 3)
    monkeypatch.setattr(module, "_TILE", 128)  # four tokens
    shape = PartShape(dtype, 2, 15, 2, 20, parts.BY_LAYER)
    cache = Cache.make(shape, 3, 2, LAYOUTS[1], device, 5)
    assert_as_codec(module, cache, [parts.random_part(shape, number) for number in range(2)])


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_ties_are_rounded_as_the_codec_does() -> None:
    """Numbers halfway between two steps of a scale that is a power of two, and their neighbours."""
    module, device = triton_kernels()
    shape = PartShape("bfloat16", 1, 8, 1, 64, parts.BY_LAYER)
    numbers = np.zeros((1, 2, 8, 1, 64), np.float32)
    numbers[...] = (np.arange(64, dtype=np.float32) + 0.5) * np.where(np.arange(8) % 2, 1, -1)[
        None, None, :, None, None
    ]
    numbers[:, 0, 0] = numbers[:, 1, :, :, 0] = 127
    assert_as_codec(module, Cache.make(shape, 4, 1, LAYOUTS[0], device, 1), [parts.to_bytes(numbers, shape)])


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_a_page_that_is_left_out_keeps_its_bytes_when_a_part_is_decoded() -> None:
    module, device = triton_kernels()
    shape = PartShape("bfloat16", 2, 8, 2, 16, parts.BY_LAYER)
    cache = Cache.make(shape, 4, 1, LAYOUTS[0], device, 2)
    cache.write(0, parts.random_part(shape))
    objects, _ = encode(module, cache)
    some = Cache(cache.layers.clone(), shape, cache.ids.copy())
    some.ids[0, 1] = -1
    module.decode_parts(some.parts, torch.from_numpy(objects).to(device), header_nbytes(shape.layers))
    at = int(cache.ids[0, 1])
    assert torch.equal(some.layers[:, :, at], cache.layers[:, :, at])
    others = [int(page) for page in some.ids[0] if page >= 0]
    assert not torch.equal(some.layers[:, :, others], cache.layers[:, :, others])


def test_an_object_is_refused_for_what_the_device_has_measured() -> None:
    shape = PartShape("bfloat16", 2, 16, 2, 64, parts.BY_LAYER)
    data = parts.random_part(shape)
    made = code(data, Coding(find_codec("int8"), shape))
    assert isinstance(made, Coded)
    measured = np.ones((8, 3))
    measured[:, 1] = 1e-4  # an RMS error of 0.01
    stored = np.array(made.data)
    stored[: header_nbytes(2)] = 0
    found = certify(stored, measured, shape)
    assert isinstance(found, Coded) and found.errors is not None
    np.testing.assert_allclose(found.errors.rms, 0.01, rtol=1e-6)
    np.testing.assert_allclose(found.errors.largest, np.sqrt(shape.tokens * shape.channels), rtol=1e-6)
    assert decode_object(found.data, np.empty(shape.nbytes, np.uint8)).checksum == made.decoded_checksum
    assert certify(stored, measured, shape, most_error=0.009) is Refused.ABOVE_BOUND
    measured[3, 0] = np.inf
    assert certify(stored, measured, shape) is Refused.NOT_FINITE
    for channels, why in ((15, Refused.NOT_TAKEN), (16, Refused.NOT_FEWER)):
        small = PartShape("bfloat16", 1, 1, 1, channels, parts.BY_LAYER)
        assert certify(np.zeros(object_nbytes(small), np.uint8), np.ones((2, 3)), small) is why


def test_a_layer_that_had_only_zeros_and_has_others_is_infinitely_far() -> None:
    shape = PartShape("bfloat16", 1, 16, 1, 64, parts.BY_LAYER)
    zeros, stored = np.zeros((2, 3)), np.zeros(object_nbytes(shape), np.uint8)
    found = certify(stored, zeros, shape)
    assert isinstance(found, Coded) and found.errors is not None and found.errors.rms.max() == 0
    zeros[1, 1:] = 1
    assert certify(stored, zeros, shape) is Refused.ABOVE_BOUND


@pytest.mark.parametrize("wrong", ["dtype", "tokens", "strides", "channels"])
def test_pages_that_are_not_what_the_shape_says_are_refused(wrong: str) -> None:
    shape = PartShape("bfloat16", 1, 8, 2, 16, parts.BY_LAYER)
    keys = torch.zeros((3, 4, 2, 16), dtype=torch.float16 if wrong == "dtype" else torch.bfloat16)
    values = torch.zeros((3, 4, 2, 32), dtype=keys.dtype)[..., :16] if wrong == "strides" else keys.clone()
    if wrong == "channels":
        keys = values = torch.zeros((3, 4, 16, 2), dtype=keys.dtype).transpose(2, 3)
    ids = np.zeros((1, 3 if wrong == "tokens" else 2), np.int64)
    with pytest.raises(GeometryError):
        PagedParts.of_layers(shape, [(keys, values)], ids)
