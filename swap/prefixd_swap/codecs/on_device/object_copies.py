"""Copies between pages that are scattered over a device and int8 objects in host memory.

Kernels make tiles while they pack, and pages of tiles, so the bus moves half of the bytes.

        pages (any order)            staging                      host
        layer 0: [ b7 .. b2 .. ]     part 0: | room | tiles |     part 0: | header | tiles |  at any address
        layer 1: [ b7 .. b2 .. ] <-> part 1: | room | tiles |     part 1: | header | tiles |  at any address

Unverified on a GPU: the tests run it in Triton's interpreter, on a CPU, where there are no streams.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from prefixd_swap.codecs.codec import Refused, UInt8s
from prefixd_swap.codecs.object_header import header_nbytes
from prefixd_swap.codecs.on_device import int8_triton
from prefixd_swap.codecs.on_device.certified import certify, check_object, object_nbytes
from prefixd_swap.codecs.on_device.paged_parts import PagedLayers
from prefixd_swap.codecs.on_device.staged_moves import StagedMoves
from prefixd_swap.codecs.on_device.tile_check import check_tiles
from prefixd_swap.errors import DeviceError, MemoryMisuseError

_HALF_BYTES = 32 << 20

Ids = npt.NDArray[np.int64]


class ObjectCopies:
    """Copies parts of an engine's caches, both ways.

    Args:
        groups: the caches, of one device.
        half_bytes: of each half of a staging buffer; at least one object.

    Raises:
        DeviceError: the device runs no kernels of Triton, or these give other bytes there than the codec on the CPU.
        GeometryError: layers do not lie as their shape says.
        OutOfMemoryError: the system has no threads.
        torch.OutOfMemoryError: the device has no room for the staging buffers, 128 MiB.
    """

    def __init__(self, groups: Sequence[PagedLayers], half_bytes: int = _HALF_BYTES) -> None:
        device = groups[0].layers[0][0].device
        if device.type != "cuda" and not int8_triton.INTERPRETED:
            raise DeviceError(f"Triton runs no kernels on a device of type {device.type}; a CUDA device is needed")
        for group in groups:
            group.parts(np.zeros((1, group.blocks), np.int64))
        self._groups = list(groups)
        half_bytes = max(half_bytes, *(object_nbytes(group.shape) for group in groups))
        self._ways = [StagedMoves(device, half_bytes, name) for name in ("pack", "unpack")]
        try:
            for group in groups:
                check_tiles(group.shape, device, self.pack, self.unpack)
        except BaseException:
            self.close()
            raise

    async def gather(self, group: int, blocks: Ids, addresses: Ids) -> list[Refused | None]:
        """Makes objects of parts; returns why a part must not be kept, or None for each whose object is there.

        The numbers of the pages must be complete. When this returns or raises, also by cancellation, the memory is not
        touched any more.

        Args:
            group: the cache, of the constructor's.
            blocks: the engine's blocks ``[parts, blocks of a part]``.
            addresses: where each part's object goes in host memory, of `object_nbytes`.

        Raises:
            MemoryMisuseError: a part lacks a block.
        """
        if (blocks < 0).any():
            raise MemoryMisuseError("a part that is saved needs a block in every place; leave the part out")
        layers = self._groups[group]
        made: list[Refused | None] = []

        def work() -> None:
            measured = self.pack(layers, blocks, addresses)
            for address, of_part in zip(addresses.tolist(), measured, strict=True):
                found = certify(_host_bytes(address, object_nbytes(layers.shape)), of_part, layers.shape)
                made.append(found if isinstance(found, Refused) else None)

        await self._ways[0].run(work)
        return made

    async def scatter(self, group: int, blocks: Ids, addresses: Ids) -> None:
        """Makes pages of objects, pages that nothing reads or writes any more. Otherwise as `gather`.

        When it returns, work that is submitted to any stream reads the new numbers. A negative block is left out.

        Raises:
            EncodingError: an object is damaged, or is none of such a part. Any pages may have been written.
        """
        await self._ways[1].run(lambda: self.unpack(self._groups[group], blocks, addresses))

    def pack(self, layers: PagedLayers, blocks: Ids, addresses: Ids) -> npt.NDArray[np.float64]:
        """Makes objects without headers; returns what `encode_parts` has measured, ``[parts, tiles, 3]``.

        For one thread at a time, as `unpack`, which may run beside it.
        """
        way = self._ways[0]
        at, nbytes = header_nbytes(layers.shape.layers), object_nbytes(layers.shape)
        with way.kernels():
            paged = layers.parts(blocks)
            measured = torch.empty((len(blocks), paged.tiles, 3), dtype=torch.float64, device=paged.ids.device)

        def encode(first: int, count: int, staged: torch.Tensor) -> None:
            int8_triton.encode_parts(paged.some(first, count), staged, at, measured[first : first + count])

        def copy(first: int, count: int, staged: torch.Tensor) -> None:
            for address, each in zip(addresses[first : first + count].tolist(), staged, strict=True):
                torch.from_numpy(_host_bytes(address, nbytes)[at:]).copy_(each[at:], non_blocking=True)

        way.move(len(blocks), nbytes, encode, copy, kernels_first=True)
        with way.kernels():
            return measured.cpu().numpy()

    def unpack(self, layers: PagedLayers, blocks: Ids, addresses: Ids) -> None:
        """Makes pages of objects, each of which is verified before it is copied. Raises EncodingError."""
        way = self._ways[1]
        at, nbytes = header_nbytes(layers.shape.layers), object_nbytes(layers.shape)
        with way.kernels():
            paged = layers.parts(blocks)

        def copy(first: int, count: int, staged: torch.Tensor) -> None:
            for address, each in zip(addresses[first : first + count].tolist(), staged, strict=True):
                data = _host_bytes(address, nbytes)
                check_object(data, layers.shape)
                each[at:].copy_(torch.from_numpy(data[at:]), non_blocking=True)

        def decode(first: int, count: int, staged: torch.Tensor) -> None:
            int8_triton.decode_parts(paged.some(first, count), staged, at)

        way.move(len(blocks), nbytes, copy, decode, kernels_first=False)

    def close(self) -> None:
        """Waits for copies under way and ends the threads. Can be called twice."""
        for way in self._ways:
            way.close()


def _host_bytes(address: int, nbytes: int) -> UInt8s:
    """Memory that the caller keeps, writable."""
    return np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"), np.uint8)
