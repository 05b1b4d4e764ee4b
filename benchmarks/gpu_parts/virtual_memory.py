"""What it costs to create, map, give access to and unmap chunks, by the length of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from prefixd_swap.vmem.cuda import CudaMemory
from prefixd_swap.vmem.cuda_driver import open_device

_RUNS = (1, 8, 64, 512)
_SMALL_RUNS = (1, 8)
_SIZES = (8 << 20, 32 << 20, 128 << 20)  # of chunks, besides CHUNK_BYTES
_SMALL_SIZES = (4 << 20,)
_SIZED_RUN = 8
_WARM_UP = 2
_OPERATIONS = ("create", "map", "access", "unmap", "release")


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds a chunk of each operation, for each length of a run: driver calls, and the same through our classes.

    The driver is called as `CudaMemory` calls it: a create, map and release a chunk, an access and unmap a run. sizes:
    the driver's calls for runs of 8 chunks that are larger, to tell what costs by the chunk and what by the byte.
    """
    if device.kind == "cpu":
        raise Unavailable("the CUDA driver's calls are measured, and host memory has none")
    runs, sizes, rounds = (_RUNS, _SIZES, 20) if device.measures else (_SMALL_RUNS, _SMALL_SIZES, 2)
    points, larger = [], []
    with device.memory() as memory:
        assert isinstance(memory, CudaMemory)
        for run in runs:
            if budget.allows(name := f"run of {run}"):
                with budget.attempt(name):
                    point = {"chunks": run, **_driver(device, memory, run, CHUNK_BYTES, rounds)}
                    points.append({**point, **_classes(device, memory, run, rounds)})
        for size in sizes:
            name = f"chunks of {size} bytes"
            if 2 * _SIZED_RUN * size > device.free_bytes():
                budget.skipped.append(f"{name}: not enough memory")
            elif budget.allows(name):
                with budget.attempt(name):
                    larger.append({"chunk_bytes": size, **_driver(device, memory, _SIZED_RUN, size, rounds)})
    return {"chunk_bytes": CHUNK_BYTES, "points": points, "sizes": larger}


def _driver(device: Device, memory: CudaMemory, run: int, chunk_bytes: int, rounds: int) -> dict[str, float]:
    cuda = open_device(device.ordinal)
    cuda.use_context()
    properties, access = memory._properties, [memory._access]
    base = int(cuda.call("cuMemAddressReserve", run * chunk_bytes, 0, 0, 0))
    times: dict[str, list[float]] = {name: [] for name in _OPERATIONS}
    for number in range(_WARM_UP + rounds):
        handles: list[Any] = []

        def create(into: list[Any] = handles) -> None:
            into.extend(cuda.call("cuMemCreate", chunk_bytes, properties, 0) for _ in range(run))

        def map_(of: list[Any] = handles) -> None:
            for index, handle in enumerate(of):
                cuda.call("cuMemMap", base + index * chunk_bytes, chunk_bytes, 0, handle, 0)

        def release(of: list[Any] = handles) -> None:
            for handle in of:
                cuda.call("cuMemRelease", handle)

        operations: dict[str, Callable[[], object]] = {
            "create": create,
            "map": map_,
            "access": lambda: cuda.call("cuMemSetAccess", base, run * chunk_bytes, access, 1),
            "unmap": lambda: cuda.call("cuMemUnmap", base, run * chunk_bytes),
            "release": release,
        }
        for name, work in operations.items():
            begin = time.perf_counter()
            work()
            if number >= _WARM_UP:
                times[name].append((time.perf_counter() - begin) / run)
    cuda.call("cuMemAddressFree", base, run * chunk_bytes)
    return {f"{name}_us": round(statistics.median(taken) * 1e6, 3) for name, taken in times.items()}


def _classes(device: Device, memory: CudaMemory, run: int, rounds: int) -> dict[str, float]:
    chunks = memory.create(run)
    reserved = memory.reserve(run * CHUNK_BYTES)
    mapping = device.wall_us(
        lambda: reserved.map(0, chunks), rounds, after=lambda: reserved.unmap(0, reserved.nbytes), warm_up=_WARM_UP
    )
    reserved.map(0, chunks)
    unmapping = device.wall_us(
        lambda: reserved.unmap(0, reserved.nbytes), rounds, after=lambda: reserved.map(0, chunks), warm_up=_WARM_UP
    )
    reserved.discard()
    memory.destroy(chunks)
    return {"range_map_us": round(mapping / run, 3), "range_unmap_us": round(unmapping / run, 3)}


PART = Part("virtual_memory", 15, measure)
