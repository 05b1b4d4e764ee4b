"""What decoding loses while a thread maps and unmaps memory beside it (vAttention, section 6.1)."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.engine_rig import EngineRig, Graphs, engine_rig
from benchmarks.gpu_parts.rig.model import random_model, random_tokens, shape
from benchmarks.gpu_parts.rig.part import Budget, Part
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd_swap.vmem import VirtualMemory

_RUN = 64  # chunks that are mapped at once: a prefix of 1,024 tokens of an 8B model


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Milliseconds of a decode step, median and 99th percentile, alone and beside a thread that maps without a pause.

    The thread maps 64 chunks of its own memory, and unmaps them. mapped_chunks: while the steps were measured. Steps
    are CUDA graphs where the worker would use them.
    """
    batch, context, steps = (8, 1024, 200) if device.measures else (2, 64, 4)
    points = []
    model = random_model(device)
    block = model.spec.geometry.block_tokens
    graphs: Graphs = "graphs" if isinstance(model.attention, FlashAttention) else "none"
    blocks = -(-(context + 2 * steps + 16) // block)
    with engine_rig(device, batch * blocks, batch + 1, 512, graphs) as rig, device.memory() as memory:
        frames = [rig.frames(blocks) for _ in range(batch)]
        rig.zero([frame for taken in frames for frame in taken])
        for number, taken in enumerate(frames):
            rig.start(random_tokens(number, context), taken, max(0, context // block - 1), 2 * steps + 8)
        sampled = 0
        while sampled < 3 * batch:  # the prompts' ends, and warming up
            sampled += len(rig.step())
        for mapping in (False, True):
            if budget.allows("beside mapping" if mapping else "alone"):
                with _mapping(memory, mapping) as count:
                    times = _steps(rig, steps)
                points.append({"mapping": mapping, **times, "mapped_chunks": count[0]})
    return {"model": shape(model), "graphs": graphs, "batch": batch, "context_tokens": context, "points": points}


def _steps(rig: EngineRig, steps: int) -> dict[str, float]:
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        rig.step()
        times.append(1e3 * (time.perf_counter() - begin))
    return {"p50_ms": round(statistics.median(times), 3), "p99_ms": round(statistics.quantiles(times, n=100)[98], 3)}


@contextmanager
def _mapping(memory: VirtualMemory, really: bool) -> Iterator[list[int]]:
    """Chunks that a thread has mapped, as the only element; none if not `really`."""
    count, ended = [0], threading.Event()
    if not really:
        yield count
        return
    chunks = memory.create(_RUN)
    reserved = memory.reserve(_RUN * memory.chunk_bytes)
    errors: list[Exception] = []

    def run() -> None:
        try:
            while not ended.is_set():
                reserved.map(0, chunks)
                reserved.unmap(0, reserved.nbytes)
                count[0] += _RUN
        except Exception as error:  # else the figures would be of steps alone
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield count
    finally:
        ended.set()
        thread.join()
        reserved.discard()
        memory.destroy(chunks)
    if errors:
        raise errors[0]


def _slower(key: str) -> Callable[[Mapping[str, Any]], float | None]:
    def find(answer: Mapping[str, Any]) -> float | None:
        by_mapping = {point["mapping"]: point[key] for point in answer.get("points", ())}
        return round(by_mapping[True] / by_mapping[False], 3) if len(by_mapping) == 2 else None

    return find


PREDICTIONS = (
    Prediction("a decode step beside mapping against alone", "1.1 times at most", _slower("p50_ms"), at_most=1.25),
    Prediction("the slowest 1% of steps beside mapping against alone", "1.5 times", _slower("p99_ms"), at_most=2.5),
)

PART = Part("mapping_beside", 12, measure, predictions=PREDICTIONS)
