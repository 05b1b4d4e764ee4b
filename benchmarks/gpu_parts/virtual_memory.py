"""What it costs to create, map, give access to and unmap chunks, by the length of a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd_swap.vmem.backends.cuda import CudaMemory
from prefixd_swap.vmem.backends.cuda_driver import open_device

_RUNS = (1, 8, 64, 512)
_SMALL_RUNS = (1, 8)
_SIZES, _SIZED_BYTES = (CHUNK_BYTES, 8 << 20, 32 << 20, 128 << 20), 2 << 30
_SMALL_SIZES, _SMALL_SIZED_BYTES = (CHUNK_BYTES, 4 << 20), 16 << 20
_THREADS = (1, 2, 4)
_WARM_UP = 2
_OPERATIONS = ("create", "map", "access", "unmap", "release")


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Microseconds a chunk of each operation, for each length of a run: driver calls, and the same through our classes.

    The driver is called as `CudaMemory` calls it: a create, map and release a chunk, an access and unmap a run. sizes:
    the driver's calls for 2 GiB in chunks of 2, 8, 32 and 128 MiB, to tell what costs by the chunk and by the byte.
    threads: each maps chunks of its own, gives access and unmaps them, all at once; of all together.
    """
    if device.kind == "cpu":
        raise Unavailable("the CUDA driver's calls are measured, and host memory has none")
    runs, sizes, rounds = (_RUNS, _SIZES, 20) if device.measures else (_SMALL_RUNS, _SMALL_SIZES, 2)
    sized_bytes = _SIZED_BYTES if device.measures else _SMALL_SIZED_BYTES
    points, larger, threads = [], [], []
    with device.memory() as memory:
        assert isinstance(memory, CudaMemory)
        for run in runs:
            if budget.allows(name := f"run of {run}"):
                with budget.attempt(name):
                    point = {"chunks": run, **_driver(device, memory, run, CHUNK_BYTES, rounds)}
                    points.append({**point, **_classes(device, memory, run, rounds)})
        for size in sizes:
            name = f"chunks of {size} bytes"
            if 2 * sized_bytes > device.free_bytes():
                budget.skipped.append(f"{name}: not enough memory")
            elif budget.allows(name):
                with budget.attempt(name):
                    run = sized_bytes // size
                    times = _driver(device, memory, run, size, max(2, rounds // 4))
                    larger.append({"chunk_bytes": size, "chunks": run, **times})
        for count in _THREADS:
            if budget.allows(name := f"{count} threads"):
                with budget.attempt(name):
                    us = _in_threads(device, memory, count, runs[-1] // _THREADS[-1], rounds)
                    threads.append({"threads": count, "chunk_us": us})
    return {"chunk_bytes": CHUNK_BYTES, "points": points, "sizes": larger, "threads": threads}


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


def _in_threads(device: Device, memory: CudaMemory, count: int, run: int, rounds: int) -> float:
    """Microseconds a chunk to map it, give access to it and unmap it, where `count` threads do so with `run` each."""
    cuda = open_device(device.ordinal)
    cuda.use_context()
    properties, access, nbytes = memory._properties, [memory._access], run * CHUNK_BYTES
    with ExitStack() as stack:
        parts: list[tuple[int, list[Any]]] = []
        for _ in range(count):
            base = int(cuda.call("cuMemAddressReserve", nbytes, 0, 0, 0))
            stack.callback(cuda.call, "cuMemAddressFree", base, nbytes)
            handles = [cuda.call("cuMemCreate", CHUNK_BYTES, properties, 0) for _ in range(run)]
            for handle in handles:
                stack.callback(cuda.call, "cuMemRelease", handle)
            parts.append((base, handles))

        def work(base: int, handles: list[Any]) -> None:
            cuda.use_context()
            for _ in range(rounds):
                for index, handle in enumerate(handles):
                    cuda.call("cuMemMap", base + index * CHUNK_BYTES, CHUNK_BYTES, 0, handle, 0)
                cuda.call("cuMemSetAccess", base, nbytes, access, 1)
                cuda.call("cuMemUnmap", base, nbytes)

        with ThreadPoolExecutor(count) as threads:
            begin = time.perf_counter()
            list(threads.map(work, *zip(*parts, strict=True)))
            elapsed_s = time.perf_counter() - begin
    return round(elapsed_s * 1e6 / (count * run * rounds), 3)


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


def _larger_chunks(answer: Mapping[str, Any]) -> float | None:
    """What a chunk of 128 MiB costs over one of 2 MiB, from its creation to its unmapping."""
    costs = {
        point["chunk_bytes"]: sum(point[f"{name}_us"] for name in ("create", "map", "access", "unmap"))
        for point in answer.get("sizes", ())
    }
    small, large = costs.get(_SIZES[0]), costs.get(_SIZES[-1])
    return round(large / small, 3) if small and large else None


def _more_threads(answer: Mapping[str, Any]) -> float | None:
    """How many times as fast four threads map as one."""
    times = {point["threads"]: point["chunk_us"] for point in answer.get("threads", ())}
    return round(times[1] / times[4], 3) if {1, 4} <= times.keys() else None


PREDICTIONS = (
    Prediction("a chunk of 128 MiB against one of 2 MiB", "1.0 to 1.2 times the cost", _larger_chunks, at_most=1.5),
    Prediction("4 threads map against one", "0.8 to 1.3 times as fast: the driver locks", _more_threads, at_most=1.8),
)

PART = Part("virtual_memory", 12, measure, predictions=PREDICTIONS)
