"""Whether the kernels give on a device what the codec on the CPU gives, asked once before they make any that count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from prefixd_swap.codecs.codec import Refused, UInt8s
from prefixd_swap.codecs.coding import Coded, Coding, code, decode_object
from prefixd_swap.codecs.object_header import header_nbytes
from prefixd_swap.codecs.on_device.certified import certify, object_nbytes
from prefixd_swap.codecs.on_device.paged_parts import PagedLayers
from prefixd_swap.codecs.part_shape import AXES, PartShape
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.errors import DeviceError

Ids = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
Pack = Callable[[PagedLayers, Ids, Ids], npt.NDArray[np.float64]]
Unpack = Callable[[PagedLayers, Ids, Ids], None]

_PARTS = 2
_SUMS = 1e-4  # how far errors may differ, which are sums in another order


def check_tiles(shape: PartShape, device: torch.device, pack: Pack, unpack: Unpack) -> None:
    """Makes objects of a small cache of numbers, and another cache of them, by `ObjectCopies.pack` and `unpack`.

    Args:
        shape: its dtype, tokens and channels are those of the cache.
        device: where it is.
        pack, unpack: of `ObjectCopies`.

    Raises:
        DeviceError: a byte differs from what the codec makes on the CPU.
    """
    shape = replace(shape, layers=1, heads=2, order=AXES)
    pages = 2 if shape.tokens % 2 == 0 else 1
    exact = np.stack([made_up(shape, seed) for seed in range(_PARTS)])
    numbers = torch.from_numpy(exact).to(getattr(torch, shape.dtype))
    blocks = np.random.default_rng(0).permutation(_PARTS * pages).reshape(_PARTS, pages).astype(np.int64)
    paged = numbers.reshape(_PARTS, 2, pages, shape.tokens // pages, shape.heads, shape.channels).transpose(1, 2)
    cache = torch.empty((_PARTS * pages, *paged.shape[2:]), dtype=numbers.dtype)
    cache[blocks.reshape(-1)] = paged.reshape(cache.shape)
    caches = (cache.to(device), torch.zeros_like(cache).to(device))  # written when `to` returns, for any stream
    written, read = (PagedLayers(shape, ((each[:, 0], each[:, 1]),)) for each in caches)
    objects = np.zeros((_PARTS, object_nbytes(shape)), np.uint8)
    addresses = objects.ctypes.data + objects.shape[1] * np.arange(_PARTS)
    measured = pack(written, blocks, addresses)
    wanted = [_coded(each, shape) for each in numbers]
    at = header_nbytes(shape.layers)
    for made, of_part, right in zip(objects, measured, wanted, strict=True):
        if not np.array_equal(made[at:], right.data[at:]):
            raise _wrong("tiles", shape)
        found = certify(made, of_part, shape, most_error=np.inf)
        if isinstance(found, Refused) or not np.allclose(_errors(found), _errors(right), rtol=_SUMS):
            raise _wrong("errors", shape)
    unpack(read, blocks, addresses)
    decoded = torch.stack([layer.cpu() for layer in read.layers[0]], dim=1)[blocks.reshape(-1)]
    decoded = decoded.reshape(paged.shape).transpose(1, 2).contiguous().view(torch.uint8)
    if not all(
        np.array_equal(found.reshape(-1).numpy(), _decoded(right.data, shape))
        for found, right in zip(decoded, wanted, strict=True)
    ):
        raise _wrong("pages", shape)


def made_up(shape: PartShape, seed: int) -> Float32s:
    """Numbers ``[kv, token, head, channel]`` that show whether a product is fused with a sum: ties in head 0."""
    random = np.random.default_rng(seed)
    numbers = random.standard_normal((2, shape.tokens, shape.heads, shape.channels)).astype(np.float32)
    numbers[0] *= np.exp(random.standard_normal((shape.heads, shape.channels)))
    numbers[0, :, 0] = _ties(random, shape.channels, shape.tokens, 119).T
    numbers[1, :, 0] = _ties(random, shape.tokens, shape.channels, 127)
    return numbers


def _ties(random: np.random.Generator, rows: int, columns: int, most: int) -> Float32s:
    """``[rows, columns]``: each row has one of the 16 scales between powers of two, and numbers halfway between steps.

    Their quotients are rounded to even. A product with the inverse that keeps more bits than a float32 is no tie.

    Args:
        most: the steps that the largest number of a row may have; it has 8 bits, as a bfloat16.
    """
    scale = 1 + np.arange(rows)[:, None] % 16 / 16
    ties = scale * (random.integers(0, 4, (rows, columns)) + 0.5) * random.choice([-1, 1], (rows, columns))
    step = 2.0 ** np.floor(np.log2(most * scale)) / 128
    ties[:, :1] = np.floor(most * scale / step) * step
    ties[:, 1:2] = -ties[:, :1][:, : ties.shape[1] - 1]
    as_floats: Float32s = ties.astype(np.float32)
    return as_floats


def _coded(numbers: torch.Tensor, shape: PartShape) -> Coded:
    data = numbers.reshape(1, *numbers.shape).contiguous().view(torch.uint8).numpy().reshape(-1)
    made = code(data, Coding(find_codec("int8"), shape, most_error=np.inf))
    if isinstance(made, Refused):
        raise DeviceError(f"the codec int8 takes no parts of {shape} ({made.value}); use more tokens a block")
    return made


def _errors(made: Coded) -> Float32s:
    """The largest and the RMS error of each layer."""
    assert made.errors is not None, "int8 is lossy"
    return np.concatenate((made.errors.largest, made.errors.rms))


def _decoded(stored: UInt8s, shape: PartShape) -> UInt8s:
    into = np.empty(shape.nbytes, np.uint8)
    decode_object(stored, into)
    return into


def _wrong(what: str, shape: PartShape) -> DeviceError:
    return DeviceError(
        f"the kernels for int8 make {what} of {shape.dtype} on this device that differ from the CPU's; report the GPU, "
        "and the versions of its driver and of Triton"
    )
