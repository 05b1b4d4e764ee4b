"""How fast KV moves between the GPU and the pinned arena, against the fastest copy that there is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.gpu_parts.rig.device import CHUNK_BYTES, Device
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd_swap.arena import CpuArena
from prefixd_swap.copies.copy_engine import CopyEngine, CudaCopyEngine, register_host, unregister_host
from prefixd_swap.vmem import VirtualRange
from prefixd_swap.vmem.backends.cuda_driver import open_device

_WAYS = ("h2d", "d2h")


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """GB/s each way: one large asynchronous copy (the peak), the copy engine, and its ratio to it.

    The engine copies one chunk, all in scattered order, and all in one run. Every byte that comes back is compared.
    Raises RuntimeError when one is wrong.
    """
    if device.kind == "cpu":
        raise Unavailable("copies between a GPU and pinned memory are measured, and there is no GPU")
    chunks, rounds = (512, 7) if device.measures else (4, 2)
    nbytes = chunks * CHUNK_BYTES
    with ExitStack() as stack:
        memory = stack.enter_context(device.memory())
        there = memory.reserve(nbytes)
        there.map(0, memory.create(chunks))
        arena = CpuArena(2 * nbytes)
        stack.callback(arena.close)
        source, back = arena.array(0, nbytes), arena.array(nbytes, nbytes)
        source[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        back[:] = 0
        # By halves: a copy may not lie in two registrations, and these are the halves that are copied.
        for half in (source, back):
            register_host(half.ctypes.data, nbytes, device.ordinal)
            stack.callback(unregister_host, half.ctypes.data, device.ordinal)
        engine = CudaCopyEngine(device.ordinal)
        stack.callback(engine.close)
        bench = _Bench(device, arena, there, engine, rounds)
        result: dict[str, Any] = {"bytes": nbytes, "chunk_bytes": CHUNK_BYTES}
        for name, measured in (("peak", bench.peak), ("engine", bench.engine)):
            if budget.allows(name):
                with budget.attempt(name):
                    back[:] = 0
                    times = measured()
                    if not np.array_equal(source, back):
                        raise RuntimeError(f"what came back from the GPU by {name} is not what was copied to it")
                    result |= {f"{key}_gbps": value for key, value in times.items()}
        ratios = {}
        for key, value in result.items():
            way = key.partition("_")[0]
            if key.endswith("_gbps") and f"{way}_peak_gbps" in result and "_peak" not in key:
                ratios[key.replace("_gbps", "_ratio")] = round(value / result[f"{way}_peak_gbps"], 3)
        return {**result, **ratios}


class _Bench:
    """The first half of the arena is copied to the GPU, and what is there to the second half."""

    def __init__(self, device: Device, arena: CpuArena, there: VirtualRange, engine: CopyEngine, rounds: int) -> None:
        self._device, self._arena, self._there, self._engine = device, arena, there, engine
        self._rounds = rounds
        self._nbytes = there.nbytes

    def peak(self) -> dict[str, float]:
        cuda = open_device(self._device.ordinal)
        cuda.use_context()
        stream = cuda.call("cuStreamCreate", cuda.api.CUstream_flags.CU_STREAM_NON_BLOCKING)
        source, back = (self._arena.span(at, self._nbytes).address for at in (0, self._nbytes))
        calls: dict[str, Callable[[], object]] = {
            "h2d": lambda: cuda.call("cuMemcpyHtoDAsync", self._there.base, source, self._nbytes, stream),
            "d2h": lambda: cuda.call("cuMemcpyDtoHAsync", back, self._there.base, self._nbytes, stream),
        }
        result = {}
        for way, call in calls.items():

            def copy(call: Callable[[], object] = call) -> None:
                call()
                cuda.call("cuStreamSynchronize", stream)

            result[f"{way}_peak"] = self._gbps(copy, self._nbytes)
        cuda.call("cuStreamDestroy", stream)
        return result

    def engine(self) -> dict[str, float]:
        order = list(range(self._nbytes // CHUNK_BYTES))
        scattered = random.Random(0).sample(order, len(order))
        result = {}
        for way in _WAYS:
            for name, indices in (("one", [0]), ("scattered", scattered), ("run", order)):
                pairs = [self._pair(way, index) for index in indices]
                result[f"{way}_engine_{name}"] = self._gbps(
                    lambda pairs=pairs: asyncio.run(self._engine.copy(pairs)),  # type: ignore[misc]
                    len(indices) * CHUNK_BYTES,
                )
        return result

    def _pair(self, way: str, index: int) -> Any:
        at = index * CHUNK_BYTES
        device = self._there.span(at, CHUNK_BYTES)
        if way == "h2d":
            return device, self._arena.span(at, CHUNK_BYTES)
        return self._arena.span(self._nbytes + at, CHUNK_BYTES), device

    def _gbps(self, copy: Callable[[], object], nbytes: int) -> float:
        return round(nbytes / self._device.wall_us(copy, self._rounds) / 1e3, 3)


def _ratio(way: str) -> Callable[[Mapping[str, Any]], float | None]:
    def find(answer: Mapping[str, Any]) -> float | None:
        figure: float | None = answer.get(f"{way}_engine_scattered_ratio")
        return figure

    return find


PREDICTIONS = tuple(
    Prediction(f"512 chunks in one call of the engine over one copy, {way}", "0.88 times", _ratio(way), at_least=0.82)
    for way in _WAYS
)

PART = Part("swap", 12, measure, predictions=PREDICTIONS)
