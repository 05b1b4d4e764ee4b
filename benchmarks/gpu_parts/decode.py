"""Tokens a second in decoding: eager, with CUDA graphs, and with fewer operators a layer (`worker.operators`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.engine_rig import EngineRig, Graphs, engine_rig
from benchmarks.gpu_parts.rig.model import random_model, random_tokens, shape
from benchmarks.gpu_parts.rig.part import Budget, Part, Unavailable
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd.worker.operators import Operators

_CONTEXT, _LONG_CONTEXT = 1024, 16384
_STEPS = 30
_SPARE_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Mode:
    """How decode steps are computed. ahead: a step is queued before the tokens of the last one are read.

    batches: requests at once, by their tokens; those that do not fit into memory are left out.
    """

    name: str
    graphs: Graphs
    operators: Operators = "model"
    ahead: bool = False
    batches: Mapping[int, Sequence[int]] = field(
        default_factory=lambda: {_CONTEXT: (1, 8, 64, 128, 256), _LONG_CONTEXT: (1, 8, 32, 64)}
    )


DEFAULT = "graphs, fused, read late"
"""What the worker does without settings."""
MODES = (
    Mode("eager", "none", batches={_CONTEXT: (1, 8, 64)}),
    Mode("graphs of one length", "one length", batches={_CONTEXT: (64,), _LONG_CONTEXT: (8,)}),
    Mode("graphs", "graphs"),
    Mode("graphs, merged", "graphs", "merged", batches={_CONTEXT: (1, 64)}),
    Mode("graphs, fused", "graphs", "fused", batches={_CONTEXT: (1, 64)}),
    Mode(DEFAULT, "graphs", "fused", ahead=True),
)
"""Graphs of one length have flash attention divide its work by as many keys as a row has; the others by as many as the
batch has, up to a power of two."""
_SMALL: tuple[int, Sequence[int]] = (64, (1, 2))


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Tokens a second by batch, behind 1,024 tokens."""
    return _measure(device, budget, _CONTEXT)


def measure_long(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Tokens a second by batch, behind 16,384 tokens; apart, so that it can come last."""
    if not device.measures:
        raise Unavailable("it differs from the part decode in its sizes alone, which are those of a GPU")
    return _measure(device, budget, _LONG_CONTEXT)


def _measure(device: Device, budget: Budget, context: int) -> Mapping[str, Any]:
    """Through the worker's engine, by mode and batch.

    With graphs where the worker would use them: with flash attention; "graphs" says why not. "operators" says how far
    the layers could be rewritten for the last mode. Without a GPU nothing is compiled.
    """
    model = random_model(device)
    attention = type(model.attention).__name__
    graphs = isinstance(model.attention, FlashAttention)
    reason = "captured" if graphs else f"not captured: attention is {attention}"
    points: list[dict[str, Any]] = []
    rewritten: Operators = "model"
    for mode in MODES if graphs else MODES[:1]:
        if context not in mode.batches:
            continue
        if mode.operators != rewritten:  # to compile takes its time
            model.rewrite(mode.operators if device.measures or mode.operators != "fused" else "merged")
            rewritten = mode.operators
        tokens, batches = (context, mode.batches[context]) if device.measures else _SMALL
        name = f"{mode.name}, {tokens} tokens"
        if budget.allows(name):
            with budget.attempt(name):
                points += _points(device, budget, mode, tokens, batches)
    return {
        "model": shape(model),
        "graphs": reason,
        "operators": model.operators.reason or model.operators.operators,
        "points": points,
    }


def _points(device: Device, budget: Budget, mode: Mode, context: int, batches: Sequence[int]) -> list[dict[str, Any]]:
    geometry, steps = random_model(device).spec.geometry, _STEPS if device.measures else 2
    blocks = -(-(context + 2 * steps + 8) // geometry.block_tokens)
    if device.measures:
        room = (device.free_bytes() - _SPARE_BYTES) // (blocks * geometry.block_bytes)
        lacking = [batch for batch in batches if batch > room]
        budget.skipped += [f"{mode.name}, {context} tokens, {batch} requests: no memory" for batch in lacking]
        batches = [batch for batch in batches if batch <= room]
    if not batches:
        return []
    points = []
    with engine_rig(device, max(batches) * blocks, max(batches) + 1, 512, mode.graphs, ahead=mode.ahead) as rig:
        rig.zero(frames := rig.frames(max(batches) * blocks))  # what is cached is zeros: any numbers will do
        rig.pool.free(frames)
        _throughput(rig, 1, context, blocks, steps)  # the first steps choose kernels
        for batch in batches:
            if budget.allows(f"{mode.name}, {context} tokens, {batch} requests"):
                rate = _throughput(rig, batch, context, blocks, steps)
                points.append({"mode": mode.name, "batch": batch, "context_tokens": context, "tokens_per_s": rate})
    return points


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


def _ratio(over: str, under: str, **conditions: object) -> Callable[[Mapping[str, Any]], float | None]:
    """Tokens a second of one mode over those of another."""

    def find(answer: Mapping[str, Any]) -> float | None:
        more, less = (point_figure("tokens_per_s", mode=mode, **conditions)(answer) for mode in (over, under))
        return None if more is None or not less else round(more / less, 2)

    return find


def _rate(batch: int, mode: str = DEFAULT) -> Callable[[Mapping[str, Any]], float | None]:
    return point_figure("tokens_per_s", mode=mode, batch=batch, context_tokens=_CONTEXT)


PREDICTIONS = (
    Prediction("eager, 8 requests", "290 to 310 tokens/s", _rate(8, mode="eager"), at_least=250.0),
    Prediction("graphs of one length, 64 requests", "4,400 tokens/s", _rate(64, mode="graphs of one length"), 4000.0),
    Prediction("the worker's default, 1 request", "145 to 155 tokens/s", _rate(1), at_least=130.0),
    Prediction("the worker's default, 64 requests", "6,200 to 6,900 tokens/s", _rate(64), at_least=5500.0),
    Prediction("the worker's default, 256 requests", "11,500 to 14,000 tokens/s", _rate(256), at_least=9500.0),
    Prediction(
        "tokens read late over tokens read at once, 64 requests of 1,024 tokens",
        "1.05 to 1.15 times",
        _ratio(DEFAULT, "graphs, fused", batch=64, context_tokens=1024),
        at_least=1.02,
    ),
)

LONG_PREDICTIONS = (
    Prediction(
        "graphs over graphs of one length, 8 requests of 16,384 tokens",
        "1.2 to 1.4 times",
        _ratio("graphs", "graphs of one length", batch=8, context_tokens=_LONG_CONTEXT),
        at_least=1.1,
    ),
)

PART = Part("decode", 55, measure, predictions=PREDICTIONS)
LONG_PART = Part("decode_16k", 25, measure_long, predictions=LONG_PREDICTIONS)
