"""How fast an engine's pages move between GPU and pinned arena: by one kernel, strided copies, or a batch of copies.

layers     a region a layer; a part has 2 blocks, anywhere
in order   the same, and the blocks of a part follow each other
blocks     the layers of a block together (vLLM's layout BLNHC); a part has 2 blocks, anywhere
whole      the same, a part has one block: pages of 2 MiB
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd_swap.arena import CpuArena
from prefixd_swap.copies.copy_engine import register_host, unregister_host
from prefixd_swap.copies.page_copies import PageCopies
from prefixd_swap.copies.page_runs import PackedPages, PageRun
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice, open_device

_KIB = 1 << 10
_SHAPES = (
    *(("layers", kib) for kib in (8, 16, 32, 64)),
    ("in order", 64),
    ("blocks", 64),
    ("whole", 64),
    ("blocks", 16),
)


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """GB/s of 512 MiB of pages each way, alone; and beside a kernel that reads memory as decoding does.

    A point: layout, page_kib (of a layer), way (h2d, d2h), by:

        kernel   `PageCopies`, always by its kernel and its staging buffer
        strided  `PageCopies` without them, where the layout allows it
        batch    every page listed for one `cuMemcpyBatchAsync`, without what listing takes

    beside: the same of 64 KiB pages, by kernel and by batch, while a matrix of 1 GiB is multiplied without a pause, as
    decoding reads its weights, and how much longer a multiplication takes. Every byte that comes back is compared.
    Raises RuntimeError when one is wrong.
    """
    if device.kind == "cpu":
        raise Unavailable("copies between a GPU and pinned memory are measured, and there is no GPU")
    layers, nbytes, rounds = (32, 512 << 20, 7) if device.measures else (4, 2 << 20, 1)
    points: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    with ExitStack() as stack:
        bench = _Bench(device, layers, nbytes, rounds, stack)
        for layout, kib in _SHAPES if device.measures else _SHAPES[3:7]:
            for by in ("kernel", "strided", "batch"):
                name = f"{layout}, {kib} KiB, {by}"
                if (by == "strided") > (layout != "layers") or not budget.allows(name):
                    continue
                with budget.attempt(name):
                    gbps = bench.both_ways(layout, kib * _KIB, by)
                    points += [
                        {"layout": layout, "page_kib": kib, "by": by, "way": way, "gbps": each}
                        for way, each in gbps.items()
                    ]
        for by, way in itertools.product(("kernel", "batch"), ("h2d", "d2h")):
            name = f"beside, {by}, {way}"
            if budget.allows(name):
                with budget.attempt(name):
                    beside.append({"by": by, "way": way, **bench.beside(by, way)})
    return {"bytes": nbytes, "layers": layers, "points": points, "beside": beside}


class _Bench:
    """The first half of the arena is copied to the GPU, and what is there to the second half."""

    def __init__(self, device: Device, layers: int, nbytes: int, rounds: int, stack: ExitStack) -> None:
        self._device, self._layers, self._nbytes, self._rounds = device, layers, nbytes, rounds
        memory = stack.enter_context(device.memory())
        there = memory.reserve(nbytes)
        there.map(0, memory.create(nbytes // CHUNK_BYTES))
        self._base = there.base
        arena = CpuArena(2 * nbytes)
        stack.callback(arena.close)
        self._source, self._back = arena.array(0, nbytes), arena.array(nbytes, nbytes)
        self._source[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        for half in (self._source, self._back):
            register_host(half.ctypes.data, nbytes, device.ordinal)
            stack.callback(unregister_host, half.ctypes.data, device.ordinal)
        longest = 2 * layers * max(kib for _, kib in _SHAPES) * _KIB
        self._by_kernel = PageCopies(device.ordinal, longest, row_bytes=None)
        stack.callback(self._by_kernel.close)
        self._strided = PageCopies(device.ordinal, longest, row_bytes=1, call_bytes=1)
        stack.callback(self._strided.close)
        self._cuda = open_device(device.ordinal)
        self._cuda.use_context()
        self._stream = self._cuda.call("cuStreamCreate", self._cuda.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stack.callback(self._cuda.call, "cuStreamDestroy", self._stream)

    def both_ways(self, layout: str, page_bytes: int, by: str) -> dict[str, float]:
        """GB/s to the GPU and back."""
        self._back[:] = 0
        work = {way: self._work(layout, page_bytes, by, way) for way in ("h2d", "d2h")}
        gbps = {way: self._gbps(each) for way, each in work.items()}
        if not np.array_equal(self._source, self._back):
            raise RuntimeError(f"what came back from the GPU ({layout}, {by}) is not what was copied to it")
        return gbps

    def beside(self, by: str, way: str) -> dict[str, float]:
        """GB/s while a matrix is multiplied, and the time of a multiplication in times of one alone."""
        rows = (1 << 29) // 8192 if self._device.measures else 64
        matrix = torch.ones(rows, 8192, dtype=torch.bfloat16, device=self._device.torch_device)
        vector = torch.ones(8192, 1, dtype=torch.bfloat16, device=self._device.torch_device)
        copy = self._work("layers", 64 * _KIB, by, way)

        def multiply() -> None:
            torch.mm(matrix, vector)

        alone_us = self._device.stream_us(multiply, 50 * self._rounds)
        with _without_pause(copy):
            beside_us = self._device.stream_us(multiply, 50 * self._rounds)
        with _without_pause(multiply, torch.cuda.synchronize if self._device.measures else None):
            gbps = self._gbps(copy)
        return {"gbps": gbps, "slower": round(beside_us / alone_us, 3)}

    def _work(self, layout: str, page_bytes: int, by: str, way: str) -> Callable[[], object]:
        packed = self._packed(layout, page_bytes, self._source if way == "h2d" else self._back)
        if by == "batch":
            return _batch(self._cuda, self._stream, packed, way)
        copies = self._by_kernel if by == "kernel" else self._strided
        move = copies.scatter if way == "h2d" else copies.gather
        return lambda: asyncio.run(move(packed))

    def _packed(self, layout: str, page_bytes: int, host: np.ndarray[Any, np.dtype[np.uint8]]) -> PackedPages:
        blocks = self._nbytes // (self._layers * page_bytes)
        if layout in ("layers", "in order"):
            offset, stride = blocks * page_bytes, page_bytes
        else:
            offset, stride = page_bytes, self._layers * page_bytes
        runs = [PageRun(self._base + layer * offset, stride, page_bytes) for layer in range(self._layers)]
        random = np.random.default_rng(1)
        if layout == "in order":
            ids = random.permutation(np.arange(blocks).reshape(-1, 2))
        else:
            ids = random.permutation(blocks).reshape(-1, 1 if layout == "whole" else 2)
        part_bytes = ids.shape[1] * self._layers * page_bytes
        return PackedPages(runs, ids.astype(np.int64), host.ctypes.data + part_bytes * np.arange(len(ids)))

    def _gbps(self, copy: Callable[[], object]) -> float:
        return round(self._nbytes / self._device.wall_us(copy, self._rounds) / 1e3, 3)


def _batch(cuda: CudaDevice, stream: Any, packed: PackedPages, way: str) -> Callable[[], object]:
    """One call with all pages. Raises Unavailable where bindings or driver lack it (before CUDA 12.8)."""
    if not hasattr(cuda.api, "cuMemcpyBatchAsync"):
        raise Unavailable("cuda-bindings has no cuMemcpyBatchAsync")
    packed = packed.in_order()
    run, part, place = np.meshgrid(*map(np.arange, (len(packed.runs), *packed.ids.shape)), indexing="ij")
    table = packed.table()
    address, stride, nbytes, before = (table[run.ravel(), column] for column in range(4))
    part, place = part.ravel(), place.ravel()
    pages = (address + packed.ids[part, place] * stride).tolist()
    hosts = (packed.addresses[part] + before + place * nbytes).tolist()
    devices, hosts = ([cuda.api.CUdeviceptr(each) for each in some] for some in (pages, hosts))
    to, at = (devices, hosts) if way == "h2d" else (hosts, devices)
    attributes = cuda.api.CUmemcpyAttributes()
    attributes.srcAccessOrder = cuda.api.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    sizes = nbytes.tolist()

    def copy() -> None:
        cuda.use_context()
        cuda.call("cuMemcpyBatchAsync", to, at, sizes, len(sizes), [attributes], [0], 1, stream)
        cuda.call("cuStreamSynchronize", stream)

    return copy


@contextmanager
def _without_pause(work: Callable[[], object], after: Callable[[], object] | None = None) -> Iterator[None]:
    """A context in which a thread does `work` over and over; what it raises is raised at the end of the context."""
    ended = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            while not ended.is_set():
                work()
                if after is not None:
                    after()
        except Exception as error:  # else the figures would be of work alone
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if errors:
        raise errors[0]


def _slower(answer: Mapping[str, Any]) -> float | None:
    return max((each["slower"] for each in answer.get("beside", ()) if each["by"] == "kernel"), default=None)


def _figure(layout: str, kib: int, by: str, way: str) -> Callable[[Mapping[str, Any]], float | None]:
    return point_figure("gbps", layout=layout, page_kib=kib, by=by, way=way)


PREDICTIONS = (
    *(
        Prediction(
            f"pages of {kib} KiB by one kernel, {way}",
            "48 GB/s or more",
            _figure("layers", kib, "kernel", way),
            at_least=42.0,
        )
        for kib in (16, 64)
        for way in ("h2d", "d2h")
    ),
    *(
        Prediction(
            f"rows of 64 KiB by strided copies, {way}",
            "48 GB/s or more",
            _figure("blocks", 64, "strided", way),
            at_least=42.0,
        )
        for way in ("h2d", "d2h")
    ),
    *(
        Prediction(
            f"pages of 64 KiB by cuMemcpyBatchAsync, {way}",
            "39 to 52 GB/s",
            _figure("layers", 64, "batch", way),
            at_least=39.0,
        )
        for way in ("h2d", "d2h")
    ),
    Prediction("reading memory beside page copies by the kernel, times as long", "1.02 to 1.1", _slower, at_most=1.15),
)

PART = Part("pages", 30, measure, predictions=PREDICTIONS)
