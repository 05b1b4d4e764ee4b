"""What the machine can do at most: copies on the device, to and from pinned memory, and plain reads of its disk."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd_swap.arena import CpuArena
from prefixd_swap.copies.copy_engine import register_host, unregister_host
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice, open_device

_SIZES = (64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
_SMALL_SIZES = (64 << 10, 1 << 20)
_DEPTHS = (1, 8, 32)
_READ_BYTES = 1 << 20
_READS, _SMALL_READS = 384, 8


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """GB/s of plain copies by size, of both ways at once, and of direct reads of the disk by depth.

    copies: d2d, h2d and d2h by the driver, from and to pinned memory. both_gbps: the sum of h2d and d2h at once, each
    on a stream. disk: O_DIRECT reads of 1 MiB, `depth` of them at a time, in the order of the file.
    """
    if device.kind == "cpu":
        raise Unavailable("copies of a GPU are measured, and there is none")
    sizes, rounds = (_SIZES, 9) if device.measures else (_SMALL_SIZES, 2)
    with ExitStack() as stack:
        copies = _Copies(device, sizes[-1], rounds, stack)
        reads = _READS if device.measures else _SMALL_READS
        points = []
        for nbytes in sizes:
            if budget.allows(f"copies of {nbytes} bytes"):
                points.append({"bytes": nbytes, **copies.each(nbytes)})
        both = copies.both() if budget.allows("both ways") else None
    disk: list[dict[str, Any]] = []
    with budget.attempt("disk"), tempfile.TemporaryDirectory(prefix="prefixd-disk-") as folder:
        disk += _reads(Path(folder) / "file", reads * _READ_BYTES, budget)
    return {"points": points, "both_gbps": both, "disk": disk}


class _Copies:
    """A range on the device with two halves of `half` bytes, and as much pinned memory."""

    def __init__(self, device: Device, half: int, rounds: int, stack: ExitStack) -> None:
        self._device, self._rounds, self._half = device, rounds, half
        memory = stack.enter_context(device.memory())
        chunks = -(-2 * half // CHUNK_BYTES)
        there = memory.reserve(chunks * CHUNK_BYTES)
        there.map(0, memory.create(chunks))
        arena = CpuArena(2 * half)
        stack.callback(arena.close)
        self._here = arena.span(0, 2 * half).address
        for at in (self._here, self._here + half):  # by halves: a copy may not lie in two registrations
            register_host(at, half, device.ordinal)
            stack.callback(unregister_host, at, device.ordinal)
        self._there = there.base
        self._cuda = open_device(device.ordinal)
        self._cuda.use_context()
        self._streams = [_stream(self._cuda, stack) for _ in range(2)]

    def each(self, nbytes: int) -> dict[str, float]:
        return {f"{way}_gbps": self._gbps([way], nbytes) for way in ("d2d", "h2d", "d2h")}

    def both(self) -> float:
        return self._gbps(["h2d", "d2h"], self._half)

    def _gbps(self, ways: list[str], nbytes: int) -> float:
        call, first, second = self._cuda.call, *self._streams
        copies: dict[str, Callable[[], object]] = {
            "d2d": lambda: call("cuMemcpyDtoDAsync", self._there + self._half, self._there, nbytes, first),
            "h2d": lambda: call("cuMemcpyHtoDAsync", self._there, self._here, nbytes, first),
            "d2h": lambda: call("cuMemcpyDtoHAsync", self._here + self._half, self._there + self._half, nbytes, second),
        }

        def run() -> None:
            for way in ways:
                copies[way]()
            for stream in self._streams:
                call("cuStreamSynchronize", stream)

        return round(len(ways) * nbytes / self._device.wall_us(run, self._rounds) / 1e3, 3)


def _stream(cuda: CudaDevice, stack: ExitStack) -> Any:
    made = cuda.call("cuStreamCreate", cuda.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
    stack.callback(cuda.call, "cuStreamDestroy", made)
    return made


def _reads(file: Path, nbytes: int, budget: Budget) -> list[dict[str, Any]]:
    with file.open("wb") as written:
        for _ in range(nbytes // _READ_BYTES):
            written.write(os.urandom(_READ_BYTES))
        written.flush()
        os.fsync(written.fileno())
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise Unavailable(f"{file.parent} takes no direct reads: {error}") from error
    try:
        return [_depth(descriptor, nbytes, depth) for depth in _DEPTHS if budget.allows(f"disk at depth {depth}")]
    finally:
        os.close(descriptor)


def _depth(descriptor: int, nbytes: int, depth: int) -> dict[str, Any]:
    buffers = [mmap.mmap(-1, _READ_BYTES) for _ in range(depth)]

    def lane(number: int) -> None:
        for at in range(number * _READ_BYTES, nbytes, depth * _READ_BYTES):
            os.preadv(descriptor, [buffers[number]], at)

    with ThreadPoolExecutor(depth) as threads:
        begin = time.perf_counter()
        list(threads.map(lane, range(depth)))
        elapsed_s = time.perf_counter() - begin
    for buffer in buffers:
        buffer.close()
    return {"depth": depth, "gbps": round(nbytes / elapsed_s / 1e9, 3)}


def _best_copy(answer: Mapping[str, Any]) -> float | None:
    return max((point["h2d_gbps"] for point in answer.get("points", ())), default=None)


def _both(answer: Mapping[str, Any]) -> float | None:
    figure: float | None = answer.get("both_gbps")
    return figure


def _best_read(answer: Mapping[str, Any]) -> float | None:
    return max((point["gbps"] for point in answer.get("disk", ())), default=None)


PREDICTIONS = (
    Prediction("the best copy from pinned memory", "54 GB/s", _best_copy, at_least=48.0),
    Prediction("copies both ways at once, together", "85 to 105 GB/s", _both, at_least=70.0),
    Prediction("the best direct read of the disk", "1.7 GB/s, as a sister machine's", _best_read, at_least=1.2),
)

PART = Part("machine", 12, measure, predictions=PREDICTIONS)
