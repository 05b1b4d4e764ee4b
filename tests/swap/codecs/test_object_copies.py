"""Pages on a device become int8 objects in host memory and pages again: the objects that the codec makes of the bytes.

By Triton's interpreter (TRITON_INTERPRET=1, where Triton is installed), and on a GPU.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from prefixd_swap.codecs.codec import Refused, UInt8s
from prefixd_swap.codecs.coding import Coded, Coding, code, decode_object
from prefixd_swap.codecs.object_header import header_nbytes, read_header
from prefixd_swap.codecs.on_device.certified import certify, check_object, object_nbytes
from prefixd_swap.codecs.on_device.paged_parts import PagedLayers
from prefixd_swap.codecs.on_device.tile_check import check_tiles, made_up
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import DeviceError, EncodingError, MemoryMisuseError
from tests.swap.codecs import parts
from tests.swap.codecs.test_on_device import LAYOUTS, Cache, triton_kernels

SHAPE = PartShape("bfloat16", 2, 8, 2, 24, parts.BY_LAYER)
NOT_FINITE, COARSE = 1, 3  # parts that are refused


def layers_of(cache: Cache, pages: int = 1) -> PagedLayers:
    """As an engine has them, whose tables count blocks of so many pages."""
    return PagedLayers(cache.shape, tuple((layer[0], layer[1]) for layer in cache.layers), pages)


def copies_of(*caches: Cache, half_bytes: int = 1 << 20, pages: int = 1) -> Any:
    triton_kernels()
    from prefixd_swap.codecs.on_device.object_copies import ObjectCopies

    return ObjectCopies([layers_of(cache, pages) for cache in caches], half_bytes)


def object_of(data: UInt8s, shape: PartShape = SHAPE) -> UInt8s:
    """A completed object, by the codec on the CPU."""
    made = code(data, Coding(find_codec("int8"), shape, most_error=np.inf))
    assert isinstance(made, Coded)
    stored = np.array(made.data)
    measured = np.ones((2 * shape.layers * shape.heads, 3))
    assert isinstance(certify(stored, measured, shape, most_error=np.inf), Coded)
    return stored


def places(objects: UInt8s) -> npt.NDArray[np.int64]:
    return np.asarray(objects.ctypes.data + objects.strides[0] * np.arange(len(objects)), np.int64)


@pytest.mark.gpu
@pytest.mark.real_gpu
@pytest.mark.parametrize(("layout", "half"), list(zip(LAYOUTS, (1, 2, 3, 100), strict=True)))
def test_objects_are_the_codecs_and_become_pages_again(layout: str, half: int) -> None:
    """Staging of one object a half, of some, and of all of them."""
    _, device = triton_kernels()
    cache = Cache.make(SHAPE, 2, 5, layout, device, 3)
    written = [parts.random_part(SHAPE, number) for number in range(5)]
    for number, data in enumerate(written):
        cache.write(number, data)
    read = Cache(torch.full_like(cache.layers, 3.0), SHAPE, cache.ids)
    nbytes = object_nbytes(SHAPE)
    copies = copies_of(cache, read, half_bytes=half * nbytes)
    objects = np.full((5, nbytes + 3), 77, np.uint8)
    assert asyncio.run(copies.gather(0, cache.ids, places(objects))) == [None] * 5
    assert (objects[:, nbytes:] == 77).all(), "nothing behind an object is written"
    kept = cache.ids.copy()
    kept[2, 1] = -1
    before = read.layers[:, :, int(cache.ids[2, 1])].clone()
    asyncio.run(copies.scatter(1, kept, places(objects)))
    assert torch.equal(read.layers[:, :, int(cache.ids[2, 1])], before), "a block that is left out"
    for number in (0, 1, 3, 4):
        made = code(written[number], Coding(find_codec("int8"), SHAPE))
        assert isinstance(made, Coded)
        at = header_nbytes(SHAPE.layers)
        np.testing.assert_array_equal(objects[number, at:nbytes], made.data[at:])
        into = np.empty(SHAPE.nbytes, np.uint8)
        assert decode_object(objects[number, :nbytes], into).checksum == made.decoded_checksum
        np.testing.assert_array_equal(read.read(number), into)
    copies.close()


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_blocks_of_several_pages() -> None:
    _, device = triton_kernels()
    cache = Cache.make(SHAPE, 1, 3, LAYOUTS[0], device, 4)
    small = Cache(cache.layers.unflatten(3, (4, 2)).flatten(2, 3), SHAPE, cache.ids)  # four pages of two tokens a block
    assert small.layers.data_ptr() == cache.layers.data_ptr(), "a view"
    for number in range(3):
        cache.write(number, parts.random_part(SHAPE, number))
    copies = copies_of(small, pages=4)
    objects = np.zeros((3, object_nbytes(SHAPE)), np.uint8)
    assert asyncio.run(copies.gather(0, cache.ids, places(objects))) == [None] * 3
    at = header_nbytes(SHAPE.layers)
    for number in range(3):
        np.testing.assert_array_equal(objects[number, at:], object_of(parts.random_part(SHAPE, number))[at:])
    cache.layers[:] = 3.0
    if device.type == "cuda":
        torch.cuda.synchronize()
    ids = cache.ids.copy()
    ids[1] = -1
    asyncio.run(copies.scatter(0, ids, places(objects)))
    assert (cache.layers[:, :, int(cache.ids[1, 0])] == 3.0).all()
    into = np.empty(SHAPE.nbytes, np.uint8)
    decode_object(objects[2], into)
    np.testing.assert_array_equal(cache.read(2), into)
    copies.close()


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_a_part_that_int8_would_alter_too_much_is_refused_and_the_others_are_there() -> None:
    _, device = triton_kernels()
    cache = Cache.make(SHAPE, 2, 5, LAYOUTS[0], device, 5)
    written = [parts.random_part(SHAPE, number) for number in range(5)]
    written[NOT_FINITE].view(np.uint16)[7] = 0x7F80
    numbers = np.full((2, 2, 8, 2, 24), 0.003, np.float32)
    numbers[:, :, :, :, 0] = numbers[:, :, 0] = 1  # one scale for numbers that are less than half a step of it
    written[COARSE] = parts.to_bytes(numbers, SHAPE)
    for number, data in enumerate(written):
        cache.write(number, data)
    copies = copies_of(cache)
    objects = np.zeros((5, object_nbytes(SHAPE)), np.uint8)
    answers = asyncio.run(copies.gather(0, cache.ids, places(objects)))
    assert answers[NOT_FINITE] is Refused.NOT_FINITE
    for number, data in enumerate(written):
        made = code(data, Coding(find_codec("int8"), SHAPE))
        assert (answers[number] or type(None)) == (made if isinstance(made, Refused) else type(None))
    asyncio.run(copies.scatter(0, cache.ids[[0, 2, 4]], places(objects)[[0, 2, 4]]))
    with pytest.raises(EncodingError):
        asyncio.run(copies.scatter(0, cache.ids, places(objects)))
    with pytest.raises(MemoryMisuseError):
        asyncio.run(copies.gather(0, np.full_like(cache.ids, -1), places(objects)))
    copies.close()


@pytest.mark.parametrize("what", ["tiles", "pages", "errors"])
def test_a_device_that_computes_otherwise_is_refused_at_the_start(what: str) -> None:
    """The kernels' double is the codec on the CPU, which alters a byte of one of both."""

    def pack(layers: PagedLayers, blocks: Any, addresses: Any) -> npt.NDArray[np.float64]:
        measured = []
        for ids, address in zip(blocks, addresses.tolist(), strict=True):
            numbers = torch.stack([half[ids].flatten(0, 1) for half in layers.layers[0]])
            made = object_of(numbers.contiguous().view(torch.uint8).numpy().reshape(-1), layers.shape)
            made[-1] ^= wrong_tile
            host(address, made.size)[:] = made
            measured.append(measure(numbers, layers.shape) * wrong_error)
        return np.stack(measured)

    def unpack(layers: PagedLayers, blocks: Any, addresses: Any) -> None:
        for ids, address in zip(blocks, addresses.tolist(), strict=True):
            into = np.empty(layers.shape.nbytes, np.uint8)
            decode_object(host(address, object_nbytes(layers.shape)), into)
            into[-1] ^= wrong_page
            numbers = torch.from_numpy(into).view(torch.bfloat16).reshape(2, -1, *layers.layers[0][0].shape[1:])
            for half, of_half in zip(layers.layers[0], numbers, strict=True):
                half[ids] = of_half

    def measure(numbers: torch.Tensor, shape: PartShape) -> npt.NDArray[np.float64]:
        """As a kernel does: of each head, keys before values."""
        into = np.empty(shape.nbytes, np.uint8)
        exact = numbers.contiguous().view(torch.uint8).numpy().reshape(-1)
        decode_object(object_of(exact, shape), into)
        tiles = parts.to_numbers(exact, shape)[0].transpose(2, 0, 1, 3).reshape(2 * shape.heads, -1).astype(np.float64)
        apart = tiles - parts.to_numbers(into, shape)[0].transpose(2, 0, 1, 3).reshape(tiles.shape)
        return np.stack([(tiles**2).sum(axis=1), (apart**2).sum(axis=1), np.abs(apart).max(axis=1)], axis=1)

    def host(address: int, nbytes: int) -> UInt8s:
        import ctypes

        return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)

    wrong_tile = wrong_page = 0
    wrong_error = np.ones(3)
    check_tiles(SHAPE, torch.device("cpu"), pack, unpack)
    wrong_tile, wrong_page = int(what == "tiles"), int(what == "pages")
    wrong_error = np.array([1, 0.9, 1]) if what == "errors" else np.ones(3)
    with pytest.raises(DeviceError, match=f"make {what} of bfloat16"):
        check_tiles(SHAPE, torch.device("cpu"), pack, unpack)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("channels", [64, 128])
def test_the_check_has_numbers_that_a_product_fused_with_a_sum_rounds_otherwise(dtype: str, channels: int) -> None:
    """Of keys, which share a scale along tokens, and of values, which share one along channels."""
    shape = PartShape(dtype, 1, 32, 2, channels, parts.BY_LAYER)
    numbers = torch.from_numpy(made_up(shape, 0)).to(getattr(torch, dtype)).double().numpy()
    for kv, axis, share in ((0, 0, 1 / 119), (1, 1, 1 / 127)):
        exact = numbers[kv, :, 0]
        largest = np.abs(exact).max(axis=axis, keepdims=True).astype(np.float32) * np.float32(share)
        scale = ((largest.view(np.int32) + 0x7FFFF) >> 19 << 19).view(np.float32)
        assert len(np.unique(np.frexp(scale)[0])) == 16, "every scale between powers of two"
        inverse = (np.float32(1) / scale).astype(np.float64)
        apart = (exact * inverse).astype(np.float32) + np.float32(12582912)
        fused = (exact * inverse + 12582912.0).astype(np.float32)
        assert 0.01 < np.mean(apart != fused) < 1


@pytest.mark.parametrize("place", [0, 5, 20, 40, 60, 70, -300, -1])
def test_a_damaged_object_is_found_without_decoding_it(place: int) -> None:
    stored = object_of(parts.random_part(SHAPE))
    check_object(stored, SHAPE)
    stored[place] ^= 4
    with pytest.raises(EncodingError):
        check_object(stored, SHAPE)


def test_an_object_of_another_shape_codec_or_without_a_checksum_is_none_of_the_part() -> None:
    stored = object_of(parts.random_part(SHAPE))
    other = PartShape("bfloat16", 2, 8, 2, 24, parts.BY_TOKEN)
    with pytest.raises(EncodingError, match="was read for one of"):
        check_object(stored, other)
    made = code(parts.random_part(SHAPE), Coding(find_codec("int8"), SHAPE))
    assert isinstance(made, Coded) and read_header(made.data).payload_check == 0
    with pytest.raises(EncodingError, match="damaged"):
        check_object(made.data, SHAPE)
    with pytest.raises(EncodingError):
        check_object(np.zeros_like(stored), SHAPE)
