"""What mapping and copying cost on this GPU."""

from __future__ import annotations

import asyncio
import mmap
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import harness
from prefixd_swap.copies import CopyEngine, CudaCopyEngine, register_host, unregister_host
from prefixd_swap.errors import SwapError
from prefixd_swap.spans import Span
from prefixd_swap.vmem import VirtualMemory, VirtualRange, create_memory

DESCRIPTION = """\
Measures, on one GPU, what a chunk (2 MiB) costs to create, map and unmap, in microseconds, and how fast
chunks are copied between pinned host memory and the GPU, in GB/s: one at a time, many in scattered order,
and many in one run, beside torch's copy_ from pinned memory of the same sizes in the same process.

Mapping costs are medians of `rounds` rounds. set_access_us is derived: mapping n chunks in one run takes n
times the mapping and once the setting of access, so two sizes of run tell them apart. Where there is no GPU
the result is {"skipped": reason} and the exit status 0."""

_WARM_UP = 3


def measure_mapping(memory: VirtualMemory, chunks: int, rounds: int) -> dict[str, float]:
    """Microseconds to create, map and unmap a chunk of `memory`, alone and in runs of `chunks`."""
    created = [_timed(lambda: memory.create(chunks)) for _ in range(_WARM_UP)]
    ids = memory.create(chunks)
    mapped = memory.reserve(chunks * memory.chunk_bytes)
    one: list[float] = []
    run: list[float] = []
    unmap: list[float] = []
    for number in range(_WARM_UP + rounds):
        first = _timed(lambda: mapped.map(0, ids[:1]))
        mapped.unmap(0, memory.chunk_bytes)
        whole = _timed(lambda: mapped.map(0, ids))
        away = _timed(lambda: mapped.unmap(0, mapped.nbytes))
        if number >= _WARM_UP:
            one.append(first)
            run.append(whole)
            unmap.append(away / chunks)
    mapped.close()
    per_chunk = (statistics.median(run) - statistics.median(one)) / (chunks - 1)
    return {
        "create_us": _microseconds([time_s / chunks for time_s in created]),
        "map_one_us": _microseconds(one),
        "map_in_a_run_us": _microseconds([time_s / chunks for time_s in run]),
        "set_access_us": round((statistics.median(one) - per_chunk) * 1e6, 2),
        "unmap_us": _microseconds(unmap),
    }


def measure_copies(memory: VirtualMemory, engine: CopyEngine, chunks: int, rounds: int) -> dict[str, float]:
    """GB/s of `engine` between pinned host memory and `chunks` chunks, with every byte compared at the end.

    Raises BenchmarkError when a byte is wrong.
    """
    size = memory.chunk_bytes
    nbytes = chunks * size
    place = memory.reserve(nbytes)
    place.map(0, memory.create(chunks))
    host = np.frombuffer(mmap.mmap(-1, 2 * nbytes), np.uint8)
    host[:nbytes] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    register_host(host.ctypes.data, host.nbytes)
    try:
        result = asyncio.run(_copies(place, engine, host, chunks, rounds))
    finally:
        unregister_host(host.ctypes.data)
        place.discard()
    if not np.array_equal(host[:nbytes], host[nbytes:]):
        raise harness.BenchmarkError("what came back from the GPU is not what was copied to it")
    return result


async def _copies(
    place: VirtualRange, engine: CopyEngine, host: npt.NDArray[np.uint8], chunks: int, rounds: int
) -> dict[str, float]:
    size = place.memory.chunk_bytes
    source, target = host.ctypes.data, host.ctypes.data + place.nbytes
    order = list(range(chunks))
    random.Random(0).shuffle(order)

    def pairs(indices: list[int], up: bool) -> list[tuple[Span, Span]]:
        if up:
            return [(place.span(i * size, size), Span(source + i * size, size)) for i in indices]
        return [(Span(target + i * size, size), place.span(i * size, size)) for i in indices]

    result: dict[str, float] = {}
    for direction, up in (("h2d", True), ("d2h", False)):
        for name, indices in (("one", [0]), ("scattered", order), ("run", sorted(order))):
            work = pairs(indices, up)
            times = []
            for number in range(_WARM_UP + rounds):
                begin = time.perf_counter()
                await engine.copy(work)
                if number >= _WARM_UP:
                    times.append(time.perf_counter() - begin)
            result[f"{direction}_{name}_gbps"] = _gbps(len(indices) * size, times)
    return result


def measure_torch(ordinal: int, chunk_bytes: int, chunks: int, rounds: int) -> dict[str, float]:
    """GB/s of torch's `copy_` between pinned and GPU memory: one chunk, as many copies, and as one copy."""
    device = torch.device("cuda", ordinal)
    there = torch.empty(chunks, chunk_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(chunks, chunk_bytes, dtype=torch.uint8, pin_memory=True)
    result: dict[str, float] = {}

    def copies(target: torch.Tensor, source: torch.Tensor, rows: range | None) -> None:
        if rows is None:
            target.copy_(source, non_blocking=True)
        else:
            for row in rows:
                target[row].copy_(source[row], non_blocking=True)
        torch.cuda.synchronize(device)

    for direction, (target, source) in (("h2d", (there, here)), ("d2h", (here, there))):
        for name, rows in (("one", range(1)), ("scattered", range(chunks)), ("run", None)):
            times = []
            for number in range(_WARM_UP + rounds):
                begin = time.perf_counter()
                copies(target, source, rows)
                if number >= _WARM_UP:
                    times.append(time.perf_counter() - begin)
            nbytes = chunk_bytes * (chunks if rows is None else len(rows))
            result[f"torch_{direction}_{name}_gbps"] = _gbps(nbytes, times)
    return result


def measure(ordinal: int, chunks: int, rounds: int) -> dict[str, Any]:
    """Everything, on the GPU `ordinal`."""
    engine = CudaCopyEngine(ordinal)
    try:
        with create_memory(f"cuda:{ordinal}") as memory:
            mapping = measure_mapping(memory, chunks, rounds)
            ours = measure_copies(memory, engine, chunks, rounds)
            theirs = measure_torch(ordinal, memory.chunk_bytes, chunks, rounds)
            copies = {key: both[key] for name in ours for key, both in ((name, ours), (f"torch_{name}", theirs))}
            return {
                "gpu": torch.cuda.get_device_name(ordinal),
                "chunk_bytes": memory.chunk_bytes,
                "chunks": chunks,
                "rounds": rounds,
                **mapping,
                **copies,
            }
    finally:
        engine.close()


def _timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _microseconds(times: list[float]) -> float:
    return round(statistics.median(times) * 1e6, 2)


def _gbps(nbytes: int, times: list[float]) -> float:
    return round(nbytes / statistics.median(times) / 1e9, 3)


def main() -> None:
    """The command. Raises BenchmarkError."""
    parser = harness.parser("gpu_copy", DESCRIPTION)
    parser.add_argument("--ordinal", type=int, default=0, help="which GPU (0)")
    parser.add_argument("--chunks", type=harness.positive, default=64, help="chunks of a run (64)")
    parser.add_argument("--rounds", type=harness.positive, default=20, help="rounds to take medians of (20)")
    options = parser.parse_args()
    if options.chunks < 2:
        parser.error("--chunks must be at least 2, to tell mapping from setting access")
    if not torch.cuda.is_available():
        harness.finish("gpu_copy", {"skipped": "torch sees no CUDA GPU on this machine"}, options.json)
        return
    try:
        result = measure(options.ordinal, options.chunks, options.rounds)
    except SwapError as error:
        raise harness.BenchmarkError(str(error)) from error
    harness.finish("gpu_copy", result, options.json)

    def draw(axes: Any) -> None:
        names = [f"{way}_{how}" for way in ("h2d", "d2h") for how in ("one", "scattered", "run")]
        rows = np.arange(len(names))
        axes.barh(rows - 0.2, [result[f"{name}_gbps"] for name in names], 0.4, label="prefixd")
        axes.barh(rows + 0.2, [result[f"torch_{name}_gbps"] for name in names], 0.4, label="torch")
        axes.set_yticks(rows, names)
        axes.set_xlabel("GB/s")
        axes.legend()

    harness.plot(options.plot, draw)


if __name__ == "__main__":
    harness.run(main)
