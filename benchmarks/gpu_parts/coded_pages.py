"""How fast an engine's pages move between GPU and pinned memory: as int8 tiles made on the GPU, and as they are.

vLLM's connector does so with `codec_on_device`, see docs/design/codecs.md: this says whether it pays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd_swap.codecs.coding import decode_object
from prefixd_swap.codecs.object_header import header_nbytes
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.codecs.registry import find_codec
from prefixd_swap.copies.page_copies import PageCopies
from prefixd_swap.copies.page_runs import PackedPages, PageRun

_SHAPE = PartShape("bfloat16", 32, 16, 8, 128, ("layer", "kv", "token", "head", "channel"))  # 2 MiB
_PARTS, _ROUNDS = 256, 7
_HALF_BYTES = 32 << 20  # of staging, as `ObjectCopies` has


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """GB/s of exact bytes of 512 MiB of pages each way: a block of 16 tokens a page, 64 KiB in each of 32 layers.

    A point: way and codec:

        exact    `PageCopies` by its kernel: d2h, h2d
        int8     `ObjectCopies`: d2h, h2d (which verifies on the host), save (d2h, then headers are made on the host);
                 the kernel without a bus: encode, decode

    Objects and the pages that they become are compared with what the codec on the CPU makes. Raises RuntimeError when
    one is wrong.
    """
    if not device.measures:
        raise Unavailable("tiles are made by kernels in Triton, which need a GPU")
    try:
        from prefixd_swap.codecs.on_device import int8_triton, object_copies  # noqa: F401
    except ImportError as error:
        raise Unavailable(f"a package is missing: {error}") from error
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        bench = _Bench(device, stack)
        for name, works in (("exact", bench.exact_ways()), ("int8", bench.coded_ways())):
            for way, work in works.items():
                if budget.allows(f"{name}, {way}"):
                    with budget.attempt(f"{name}, {way}"):
                        us = device.wall_us(work, _ROUNDS)
                        gbps = round(_PARTS * _SHAPE.nbytes / us / 1e3, 3)
                        points.append({"way": way, "codec": name, "gbps": gbps})
        if {("d2h", "int8"), ("h2d", "int8")} <= {(point["way"], point["codec"]) for point in points}:
            bench.compare(find_codec("int8"))
    return {"bytes": _PARTS * _SHAPE.nbytes, "object_bytes": bench.object_bytes, "points": points}


class _Bench:
    """A cache of random numbers, a region a layer; a second one that objects are decoded to."""

    def __init__(self, device: Device, stack: ExitStack) -> None:
        from prefixd_swap.codecs.on_device import int8_triton
        from prefixd_swap.codecs.on_device.certified import object_nbytes
        from prefixd_swap.codecs.on_device.object_copies import ObjectCopies
        from prefixd_swap.codecs.on_device.paged_parts import PagedLayers

        self._kernels = int8_triton
        self.object_bytes = object_nbytes(_SHAPE)
        self._header_bytes = header_nbytes(_SHAPE.layers)
        self._device = device.torch_device
        sizes = (_SHAPE.layers, _PARTS, 2, _SHAPE.tokens, _SHAPE.heads, _SHAPE.channels)
        generator = torch.Generator(self._device).manual_seed(0)
        self._cache = torch.randn(sizes, dtype=torch.bfloat16, device=self._device, generator=generator)
        self._decoded = torch.zeros_like(self._cache)
        self._ids = np.random.default_rng(1).permutation(_PARTS).reshape(-1, 1).astype(np.int64)
        self._host = torch.empty((_PARTS, _SHAPE.nbytes), dtype=torch.uint8, pin_memory=True)
        self._objects = torch.zeros((_PARTS, self.object_bytes), dtype=torch.uint8, pin_memory=True)
        self._addresses = self._objects.data_ptr() + self.object_bytes * np.arange(_PARTS)
        step = _HALF_BYTES // self.object_bytes
        self._staging = torch.zeros((step, self.object_bytes), dtype=torch.uint8, device=self._device)
        tiles = 2 * _SHAPE.layers * _SHAPE.heads
        self._measured = torch.empty((_PARTS, tiles, 3), dtype=torch.float64, device=self._device)
        self._layers = [
            PagedLayers(_SHAPE, tuple((layer[:, 0], layer[:, 1]) for layer in cache))
            for cache in (self._cache, self._decoded)
        ]
        self._copies = PageCopies(device.ordinal, _SHAPE.nbytes, row_bytes=None)
        stack.callback(self._copies.close)
        self._object_copies = ObjectCopies(self._layers)
        stack.callback(self._object_copies.close)
        device.synchronize()

    def exact_ways(self) -> dict[str, Callable[[], object]]:
        """Pages as they are."""
        page_bytes = _SHAPE.nbytes // _SHAPE.layers
        runs = [PageRun(layer.data_ptr(), page_bytes, page_bytes) for layer in self._cache]
        packed = PackedPages(runs, self._ids, self._host.data_ptr() + _SHAPE.nbytes * np.arange(_PARTS))
        return {
            "d2h": lambda: asyncio.run(self._copies.gather(packed)),
            "h2d": lambda: asyncio.run(self._copies.scatter(packed)),
        }

    def coded_ways(self) -> dict[str, Callable[[], object]]:
        """Pages as objects; with a bus and without."""
        copies, measured = self._object_copies, self._measured
        saved, loaded = (layers.parts(self._ids) for layers in self._layers)
        firsts = range(0, _PARTS, len(self._staging))

        def encode() -> None:
            for at in firsts:
                parts = saved.some(at, len(self._staging))
                staging, into = self._staging[: len(parts.ids)], measured[at : at + len(parts.ids)]
                self._kernels.encode_parts(parts, staging, self._header_bytes, into)

        def decode() -> None:
            for at in firsts:
                parts = loaded.some(at, len(self._staging))
                self._kernels.decode_parts(parts, self._staging[: len(parts.ids)], self._header_bytes)

        def save() -> None:
            if any(asyncio.run(copies.gather(0, self._ids, self._addresses))):
                raise RuntimeError("a part of normal numbers is refused")

        save()  # a load verifies headers
        return {
            "encode": encode,
            "decode": decode,
            "d2h": lambda: copies.pack(self._layers[0], self._ids, self._addresses),
            "h2d": lambda: copies.unpack(self._layers[1], self._ids, self._addresses),
            "save": save,
        }

    def compare(self, codec: Any) -> None:
        """Raises RuntimeError when an object, or what it was decoded to, is not what the codec makes."""
        for part in (0, _PARTS // 2, _PARTS - 1):
            page = int(self._ids[part, 0])
            exact, decoded = (_bytes_of(cache[:, page]) for cache in (self._cache, self._decoded))
            stored = self._objects[part].numpy()
            wanted = codec.encode(exact, _SHAPE)
            into = np.empty(_SHAPE.nbytes, np.uint8)
            codec.decode(wanted, _SHAPE, into)
            right = np.array_equal(stored[self._header_bytes :], wanted) and np.array_equal(decoded, into)
            if not right or decode_object(stored, into).codec != codec.name:
                raise RuntimeError(f"part {part} is not what the codec on the CPU makes of it")


def _bytes_of(numbers: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data: np.ndarray[Any, np.dtype[np.uint8]] = numbers.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
    return data


def _times_exact(way: str) -> Callable[[Mapping[str, Any]], float | None]:
    def find(answer: Mapping[str, Any]) -> float | None:
        coded, exact = (point_figure("gbps", way=way, codec=codec)(answer) for codec in ("int8", "exact"))
        return None if coded is None or not exact else round(coded / exact, 3)

    return find


PREDICTIONS = (
    Prediction(
        "int8 pages, d2h, exact bytes a second against pages as they are", "1.8", _times_exact("d2h"), at_least=1.6
    ),
    Prediction(
        "int8 pages, h2d, the same; one core verifies what moves",
        "1.8, or 30 to 50 GB/s if that is less",
        _times_exact("h2d"),
        at_least=0.5,
    ),
    *(
        Prediction(
            f"the kernel that {way}s tiles, of exact bytes",
            "200 GB/s or more",
            point_figure("gbps", way=way, codec="int8"),
            at_least=120.0,
        )
        for way in ("encode", "decode")
    ),
)

PART = Part("coded_pages", 30, measure, predictions=PREDICTIONS)
