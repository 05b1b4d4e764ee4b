"""How fast an engine's pages move between GPU and pinned memory: as int8 tiles made on the GPU, and as they are.

No engine and no daemon does so yet, see docs/design/codecs.md: this says whether it would pay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd_swap.codecs.codec import Refused
from prefixd_swap.codecs.object_header import header_nbytes
from prefixd_swap.codecs.part_shape import PartShape
from prefixd_swap.copies.page_copies import PageCopies
from prefixd_swap.copies.page_runs import PackedPages, PageRun
from prefixd_swap.errors import UnavailableCodecError

if TYPE_CHECKING:
    from prefixd_swap.codecs.on_device.paged_parts import PagedParts

_SHAPE = PartShape("bfloat16", 32, 16, 8, 128, ("layer", "kv", "token", "head", "channel"))  # 2 MiB
_PARTS, _ROUNDS = 256, 7
_HALF_BYTES = 32 << 20  # of staging, as `PageCopies` has


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """GB/s of exact bytes of 512 MiB of pages each way: a block of 16 tokens a page, 64 KiB in each of 32 layers.

    A point: way (h2d, d2h, and for int8 the kernel without a bus: encode, decode), and codec:

        exact    `PageCopies` by its kernel
        int8     tiles through a staging buffer of two halves, as `PageCopies` has

    Objects and the pages that they become are compared with what the codec on the CPU makes. Raises RuntimeError when
    one is wrong.
    """
    if not device.measures:
        raise Unavailable("tiles are made by kernels in Triton, which need a GPU")
    try:
        from prefixd_swap.codecs.on_device import int8_triton
        from prefixd_swap.codecs.registry import find_codec

        codec = find_codec("int8")
    except (ImportError, UnavailableCodecError) as error:
        raise Unavailable(f"a package is missing: {error}") from error
    points: list[dict[str, Any]] = []
    with ExitStack() as stack:
        bench = _Bench(device, stack)
        for name, works in (("exact", bench.exact_ways()), ("int8", bench.coded_ways(int8_triton))):
            for way, work in works.items():
                if budget.allows(f"{name}, {way}"):
                    with budget.attempt(f"{name}, {way}"):
                        us = device.wall_us(work, _ROUNDS)
                        gbps = round(_PARTS * _SHAPE.nbytes / us / 1e3, 3)
                        points.append({"way": way, "codec": name, "gbps": gbps})
        if {("d2h", "int8"), ("h2d", "int8")} <= {(point["way"], point["codec"]) for point in points}:
            bench.compare(codec)
    return {"bytes": _PARTS * _SHAPE.nbytes, "object_bytes": bench.object_bytes, "points": points}


class _Bench:
    """A cache of random numbers, a region a layer; a second one that objects are decoded to."""

    def __init__(self, device: Device, stack: ExitStack) -> None:
        from prefixd_swap.codecs.on_device.certified import object_nbytes

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
        self._step = _HALF_BYTES // self.object_bytes
        self._staging = torch.zeros((2, self._step, self.object_bytes), dtype=torch.uint8, device=self._device)
        tiles = 2 * _SHAPE.layers * _SHAPE.heads
        self._measured = torch.empty((_PARTS, tiles, 3), dtype=torch.float64, device=self._device)
        self._copies = PageCopies(device.ordinal, _SHAPE.nbytes, row_bytes=None)
        stack.callback(self._copies.close)
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

    def coded_ways(self, kernels: Any) -> dict[str, Callable[[], object]]:
        """Pages as objects; with a bus and without."""
        from prefixd_swap.codecs.on_device.paged_parts import PagedParts

        def steps(cache: torch.Tensor) -> list[PagedParts]:
            layers = [(layer[:, 0], layer[:, 1]) for layer in cache]
            firsts = range(0, _PARTS, self._step)
            return [PagedParts.of_layers(_SHAPE, layers, self._ids[at : at + self._step]) for at in firsts]

        saved, loaded = steps(self._cache), steps(self._decoded)

        def encode(number: int, staging: torch.Tensor) -> None:
            measured = self._measured[number * self._step :][: len(saved[number].ids)]
            kernels.encode_parts(saved[number], staging, self._header_bytes, measured)

        def decode(number: int, staging: torch.Tensor) -> None:
            kernels.decode_parts(loaded[number], staging, self._header_bytes)

        def all_of(kernel: Callable[[int, torch.Tensor], None]) -> Callable[[], object]:
            def work() -> None:
                for number, each in enumerate(saved):
                    kernel(number, self._staging[0, : len(each.ids)])

            return work

        return {
            "encode": all_of(encode),
            "decode": all_of(decode),
            "d2h": lambda: self._staged(saved, encode, to_host=True),
            "h2d": lambda: self._staged(loaded, decode, to_host=False),
        }

    def _staged(self, steps: list[PagedParts], kernel: Callable[[int, torch.Tensor], None], *, to_host: bool) -> None:
        """Kernels on one stream and copies on another, each a half behind the other."""
        kernels, copies = torch.cuda.Stream(), torch.cuda.Stream()
        first, second = (kernels, copies) if to_host else (copies, kernels)
        emptied: dict[int, Any] = {}
        at = 0
        for number, parts in enumerate(steps):
            half, count = number % 2, len(parts.ids)
            staging, host = self._staging[half, :count], self._objects[at : at + count]
            at += count

            def copy(staging: torch.Tensor = staging, host: torch.Tensor = host) -> None:
                (host if to_host else staging).copy_(staging if to_host else host, non_blocking=True)

            def launch(number: int = number, staging: torch.Tensor = staging) -> None:
                kernel(number, staging)

            if half in emptied:
                first.wait_event(emptied[half])
            with torch.cuda.stream(first):
                launch() if to_host else copy()
            second.wait_stream(first)
            with torch.cuda.stream(second):
                copy() if to_host else launch()
            emptied[half] = second.record_event()

    def compare(self, codec: Any) -> None:
        """Raises RuntimeError when an object, or what it was decoded to, is not what the codec makes."""
        from prefixd_swap.codecs.on_device.certified import certify

        for part in (0, _PARTS // 2, _PARTS - 1):
            page = int(self._ids[part, 0])
            exact, decoded = (_bytes_of(cache[:, page]) for cache in (self._cache, self._decoded))
            stored = self._objects[part].numpy()
            wanted = codec.encode(exact, _SHAPE)
            into = np.empty(_SHAPE.nbytes, np.uint8)
            codec.decode(wanted, _SHAPE, into)
            right = np.array_equal(stored[self._header_bytes :], wanted) and np.array_equal(decoded, into)
            found = certify(stored, self._measured[part].cpu().numpy(), _SHAPE)
            if not right or isinstance(found, Refused):
                raise RuntimeError(f"part {part} is not what the codec on the CPU makes of it ({found})")


def _bytes_of(numbers: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data: np.ndarray[Any, np.dtype[np.uint8]] = numbers.cpu().contiguous().view(torch.uint8).numpy().reshape(-1)
    return data


def _times_exact(way: str) -> Callable[[Mapping[str, Any]], float | None]:
    def find(answer: Mapping[str, Any]) -> float | None:
        coded, exact = (point_figure("gbps", way=way, codec=codec)(answer) for codec in ("int8", "exact"))
        return None if coded is None or not exact else round(coded / exact, 3)

    return find


PREDICTIONS = (
    *(
        Prediction(
            f"int8 pages, {way}, exact bytes a second against pages as they are", "1.8", _times_exact(way), at_least=1.6
        )
        for way in ("h2d", "d2h")
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
