"""A double of the device's copies: the same objects of the same pages, made by the codec on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from prefixd_swap.codecs.codec import Refused, UInt8s
from prefixd_swap.codecs.coding import Coded, Coding, code, decode_object
from prefixd_swap.codecs.on_device.certified import certify, check_object, object_nbytes
from prefixd_swap.codecs.on_device.paged_parts import PagedLayers
from prefixd_swap.codecs.part_shape import AXES
from prefixd_swap.codecs.registry import find_codec

Ids = npt.NDArray[np.int64]


class CodecCopies:
    """As `ObjectCopies`, of caches in host memory."""

    def __init__(self, groups: Sequence[PagedLayers]) -> None:
        self._groups = list(groups)
        self.closed = False

    async def gather(self, group: int, blocks: Ids, addresses: Ids) -> list[Refused | None]:
        layers = self._groups[group]
        return [self._save(layers, *part) for part in zip(layers.parts(blocks).ids, addresses.tolist(), strict=True)]

    async def scatter(self, group: int, blocks: Ids, addresses: Ids) -> None:
        layers = self._groups[group]
        for ids, address in zip(layers.parts(blocks).ids, addresses.tolist(), strict=True):
            self._load(layers, ids, address)

    def close(self) -> None:
        self.closed = True

    def _save(self, layers: PagedLayers, ids: torch.Tensor, address: int) -> Refused | None:
        shape = layers.shape
        assert shape.order == AXES
        numbers = torch.stack([torch.stack([half[ids].flatten(0, 1) for half in layer]) for layer in layers.layers])
        made = code(numbers.contiguous().view(torch.uint8).numpy().reshape(-1), Coding(find_codec("int8"), shape))
        if isinstance(made, Refused):
            return made
        into = host(address, layers)
        into[:] = made.data
        assert isinstance(certify(into, np.ones((2 * shape.layers * shape.heads, 3)), shape, np.inf), Coded)
        return None

    def _load(self, layers: PagedLayers, ids: torch.Tensor, address: int) -> None:
        shape = layers.shape
        stored, decoded = host(address, layers), np.empty(shape.nbytes, np.uint8)
        check_object(stored, shape)
        decode_object(stored, decoded)
        numbers = torch.from_numpy(decoded).view(getattr(torch, shape.dtype))
        pages = numbers.reshape(shape.layers, 2, len(ids), -1, shape.heads, shape.channels)
        for layer, of_layer in zip(layers.layers, pages, strict=True):
            for half, of_half in zip(layer, of_layer, strict=True):
                half[ids[ids >= 0]] = of_half[ids >= 0]


def host(address: int, layers: PagedLayers) -> UInt8s:
    """The object at an address."""
    return np.frombuffer((ctypes.c_uint8 * object_nbytes(layers.shape)).from_address(address), np.uint8)
