"""Tokens a second in decoding, with and without CUDA graphs."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu_parts.device import Device
from benchmarks.gpu_parts.model import EngineRig, engine_rig, random_model, random_tokens, shape
from benchmarks.gpu_parts.part import Budget, Part

_BATCHES = (1, 8, 32, 64)
_SMALL_BATCHES = (1, 2)
_GRAPHS = "prefixd.worker.decode_graphs"


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Tokens a second by batch, at a context of 1,024 tokens, through the worker's engine.

    With graphs where the worker has them (`decode_graphs.capture(rig.engine)`); "graphs" says why not.
    """
    batches, context, steps = (_BATCHES, 1024, 30) if device.measures else (_SMALL_BATCHES, 64, 2)
    geometry = random_model(device).spec.geometry
    blocks = -(-(context + 2 * steps + 8) // geometry.block_tokens)
    capture, reason = _capture(device)
    modes: dict[str, Callable[[Any], object]] = {"eager": lambda engine: None}
    if capture is not None:
        modes["graphs"] = capture
    points = []
    for mode, prepare in modes.items():
        with budget.attempt(mode), engine_rig(device, max(batches) * blocks, max(batches) + 1, 512) as rig:
            rig.zero(frames := rig.frames(max(batches) * blocks))  # what is cached is zeros: any numbers will do
            rig.pool.free(frames)
            prepare(rig.engine)
            for batch in batches:
                if budget.allows(f"{mode} {batch}"):
                    tokens_s = _throughput(rig, batch, context, blocks, steps)
                    points.append({"mode": mode, "batch": batch, "tokens_per_s": tokens_s})
    return {"model": shape(random_model(device)), "context_tokens": context, "graphs": reason, "points": points}


def _capture(device: Device) -> tuple[Callable[[Any], object] | None, str]:
    if not device.measures:
        return None, "not captured: this is no GPU"
    if importlib.util.find_spec(_GRAPHS) is None:
        return None, f"not captured: there is no {_GRAPHS}"
    return importlib.import_module(_GRAPHS).capture, "captured"


def _throughput(rig: EngineRig, batch: int, context: int, blocks: int, steps: int) -> float:
    cached = context // rig.geometry.block_tokens - 1
    frames = []
    for number in range(batch):
        frames.append(rig.frames(blocks))
        rig.start(random_tokens(number, context), frames[-1], max(cached, 0), 2 * steps + 4)
    sampled = 0
    while sampled < 3 * batch:  # the prompts' ends, and warming up
        sampled += len(rig.step())
    begin, sampled = time.perf_counter(), 0
    while sampled < steps * batch:
        sampled += len(rig.step())
    elapsed_s = time.perf_counter() - begin
    while rig.engine.runnable:
        rig.step()
    rig.settle()
    for taken in frames:
        rig.pool.free(taken)
    return round(sampled / elapsed_s, 1)


def _draw(figure: Any, result: Mapping[str, Any]) -> None:
    axes = figure.add_subplot()
    for mode in dict.fromkeys(point["mode"] for point in result["points"]):
        points = [point for point in result["points"] if point["mode"] == mode]
        axes.plot([p["batch"] for p in points], [p["tokens_per_s"] for p in points], marker="o", label=mode)
    axes.set_xlabel("batch")
    axes.set_ylabel("tokens / s")
    axes.legend()


PART = Part("decode", 30, measure, _draw)
