"""Time to the first token of a prompt whose prefix is on the GPU, mapped or not, in CPU memory, on disk, or nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common.plots import lines
from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.engine_rig import EngineRig, Graphs, engine_rig
from benchmarks.gpu_parts.rig.layer_loads import first_token_by_layers
from benchmarks.gpu_parts.rig.lower_tiers import LowerTiers
from benchmarks.gpu_parts.rig.model import random_model, random_tokens, shape
from benchmarks.gpu_parts.rig.part import Budget, Part
from benchmarks.gpu_parts.rig.prediction import Prediction
from prefixd.worker.attention.choice.pass_plan import Plan, plain, split_long
from prefixd.worker.attention.flash_attention import FlashAttention
from prefixd_swap.vmem import FrameId

_TOKENS = (2048, 8192, 32768)
_SMALL_TOKENS = (256,)
_STEPS, _STEPS_BEHIND = (512, 2048, 8192), 8192
_SMALL_STEPS = (64, 256)
_NEW_TOKENS = 64
_STEP_TOKENS = 8192
_SOURCES = (
    *("gpu", "gpu_eager", "gpu_one_call", "gpu_split", "gpu_unmapped", "gpu_dirty"),
    *("cpu", "cpu_layers", "disk", "recomputed"),
)
_PLANS: Mapping[str, Plan] = {"gpu_one_call": plain, "gpu_split": split_long}
_OTHER_KERNELS = ("recomputed", "gpu_eager", "cpu_layers", *_PLANS)
"""The others run the same kernels on the same bytes."""


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Milliseconds from a request's arrival to its first token, by where its prefix is.

    In this process: the worker's engine, the GPU tier's frames, the CPU tier's arena and the disk tier's store, put
    together as the daemon does but without its index, queue and gRPC; a whole daemon would first have to write 16 GB of
    weights. Every prompt ends with 64 new tokens. On the GPU the prefix is mapped still, or nowhere (gpu_unmapped), or
    every row maps other frames (gpu_dirty). The cached ways must give the same token; they run the same kernels on the
    same bytes. The prompt's pass is a CUDA graph up to 16,384 tokens, but in gpu_eager; in cpu_layers, where the first
    layers are computed while the last ones come from CPU memory, which must agree with gpu_eager; and in gpu_one_call
    and gpu_split, where flash attention has one call, or the prefix in 8 pieces, whatever the worker would choose.
    "operators" are those of the part before, or merged: compiling takes time that this part has not.

    steps: a prompt of 8,192 tokens, computed in steps of so many tokens.
    """
    tokens, steps = (_TOKENS, _STEPS) if device.measures else (_SMALL_TOKENS, _SMALL_STEPS)
    model = random_model(device)
    if model.operators.operators == "model":
        model.rewrite("merged")
    graphs: Graphs = "graphs" if isinstance(model.attention, FlashAttention) else "none"
    geometry = model.spec.geometry
    per_prompt = -(-(max(tokens) + _NEW_TOKENS + 1) // geometry.block_tokens)
    with ExitStack() as stack:
        rig = stack.enter_context(engine_rig(device, 2 * per_prompt, 4, _STEP_TOKENS, graphs))
        tiers = stack.enter_context(LowerTiers(device, rig, per_prompt * geometry.block_bytes))
        _prompt(rig, tiers, min(tokens) // 2, budget)
        points = []
        for length in tokens:
            if budget.allows(name := f"{length} tokens"):
                with budget.attempt(name):
                    points.append(_prompt(rig, tiers, length, budget))
        by_step = []
        for count in steps:
            if budget.allows(name := f"steps of {count} tokens"):
                with budget.attempt(name):
                    by_step.append(_steps(rig, count, _STEPS_BEHIND if device.measures else tokens[0]))
        return {
            "model": shape(model),
            "step_tokens": _STEP_TOKENS,
            "operators": model.operators.reason or model.operators.operators,
            "disk_io": tiers.store.io,
            "arena_bytes": tiers.arena.capacity_bytes,
            "pinned_bytes": tiers.pinned_bytes,
            "points": points,
            "steps": by_step,
        }


def _steps(rig: EngineRig, step_tokens: int, length: int) -> dict[str, Any]:
    tokens = random_tokens(length + 1, length)
    frames = rig.frames(-(-(length + 1) // rig.geometry.block_tokens))
    times = []
    try:
        with rig.step_tokens(step_tokens):
            for _ in range(2):  # the first one chooses kernels
                begin = time.perf_counter()
                rig.first_token(tokens, frames, 0)
                times.append(time.perf_counter() - begin)
                rig.settle()
    finally:
        rig.pool.free(frames)
    return {"step_tokens": step_tokens, "tokens": length, "recomputed_ms": round(1e3 * times[-1], 2)}


def _prompt(rig: EngineRig, tiers: LowerTiers, length: int, budget: Budget) -> dict[str, Any]:
    geometry = rig.geometry
    blocks = length // geometry.block_tokens
    tokens = random_tokens(length, blocks * geometry.block_tokens + _NEW_TOKENS)
    needed = -(-(len(tokens) + 1) // geometry.block_tokens)
    computed, loaded = rig.frames(needed), rig.frames(needed)
    try:
        return _sources(rig, tiers, tokens, blocks, computed, loaded, budget)
    finally:
        rig.settle()
        rig.pool.free(computed)
        rig.pool.free(loaded)


def _sources(
    rig: EngineRig,
    tiers: LowerTiers,
    tokens: Sequence[int],
    blocks: int,
    computed: Sequence[FrameId],
    loaded: Sequence[FrameId],
    budget: Budget,
) -> dict[str, Any]:
    """The prompt's prefix, its first `blocks` blocks, is computed into some frames and loaded into others."""
    sampled: dict[str, int] = {}
    point: dict[str, Any] = {"tokens": len(tokens)}

    def run(source: str, frames: Sequence[FrameId], before: Callable[[], object] = lambda: None) -> None:
        begin = time.perf_counter()
        before()
        if source == "cpu_layers":
            sampled[source] = first_token_by_layers(rig, tiers.arena, tiers.copies, tokens, frames, blocks)
        else:
            sampled[source] = rig.first_token(tokens, frames, 0 if source == "recomputed" else blocks)
        point[f"{source}_ms"] = round((time.perf_counter() - begin) * 1e3, 2)
        rig.settle()

    if (why_no_plan := rig.why_no_plan()) is not None:
        budget.skipped.append(f"{len(tokens)} tokens by a plan: {why_no_plan}")
    run("recomputed", computed)
    with rig.without_graphs():
        run("gpu_eager", computed)
        for source, plan in _PLANS.items() if why_no_plan is None else ():
            with rig.planned(plan):
                run(source, computed)  # compiles
                run(source, computed)
    run("gpu", computed)  # captures
    run("gpu", computed)
    rig.kv.manager.unused.reclaim()
    run("gpu_unmapped", computed)
    rig.map_everywhere(loaded)
    run("gpu_dirty", computed)
    tiers.save(computed[:blocks])
    rig.zero(loaded)
    run("cpu", loaded, lambda: tiers.load(loaded[:blocks]))
    rig.zero(loaded)
    run("cpu_layers", loaded)
    if tiers.write(blocks, budget):
        rig.zero(loaded)
        tiers.forget()
        run("disk", loaded, lambda: tiers.read(loaded[:blocks]))
    else:
        budget.skipped.append(f"{len(tokens)} tokens from disk: writing them took too long")
    cached = {source: token for source, token in sampled.items() if source not in _OTHER_KERNELS}
    if len(set(cached.values())) != 1 or sampled["cpu_layers"] != sampled["gpu_eager"]:
        raise RuntimeError(f"the first token depends on where the prefix of {len(tokens)} tokens was: {sampled}")
    point |= {f"{source}_the_same": sampled[source] == sampled["gpu"] for source in _OTHER_KERNELS if source in sampled}
    return point


def _draw(axes: Any, result: Mapping[str, Any]) -> None:
    series = {}
    for source in _SOURCES:
        points = [point for point in result["points"] if f"{source}_ms" in point]
        series[source] = [point["tokens"] for point in points], [point[f"{source}_ms"] for point in points]
    lines(
        axes, series, "tokens of the prompt", "ms to the first token", "First token by the tier of the prefix", "prefix"
    )


def _at(tokens: int, key: str, less: str | None = None) -> Callable[[Mapping[str, Any]], float | None]:
    """Of the prompt behind `tokens` tokens, `key` or what it is longer than `less`."""

    def find(answer: Mapping[str, Any]) -> float | None:
        for point in answer.get("points", ()):
            if point["tokens"] == tokens + _NEW_TOKENS and key in point:
                return float(point[key] - (0 if less is None else point[less]))
        return None

    return find


def _share(tokens: int, key: str, of: str) -> Callable[[Mapping[str, Any]], float | None]:
    """Of the prompt behind `tokens` tokens, `key` as a share of another figure."""

    def find(answer: Mapping[str, Any]) -> float | None:
        part, whole = (_at(tokens, each)(answer) for each in (key, of))
        return None if part is None or whole is None else part / whole

    return find


def _by_step(small: int, large: int) -> Callable[[Mapping[str, Any]], float | None]:
    """The time in small steps over that in large ones."""

    def find(answer: Mapping[str, Any]) -> float | None:
        times = {point["step_tokens"]: point["recomputed_ms"] for point in answer.get("steps", ())}
        return times[small] / times[large] if {small, large} <= times.keys() else None

    return find


PREDICTIONS = (
    Prediction("first token behind 8,192 tokens on the GPU", "9 to 11 ms", _at(8192, "gpu_ms"), at_most=14.0),
    Prediction("first token behind 32,768 tokens on the GPU", "22 to 28 ms", _at(32768, "gpu_ms"), at_most=35.0),
    Prediction(
        "the same with a split prefix, without a graph", "22 to 28 ms", _at(32768, "gpu_split_ms"), at_most=35.0
    ),
    Prediction(
        "32,768 tokens that are not mapped against mapped ones",
        "5 ms more at most",
        _at(32768, "gpu_unmapped_ms", "gpu_ms"),
        at_most=10.0,
    ),
    Prediction(
        "32,768 tokens from CPU memory, layer by layer against whole",
        "0.79 to 0.83 of the time",
        _share(32768, "cpu_layers_ms", "cpu_ms"),
        at_most=0.92,
    ),
    Prediction(
        "8,192 tokens computed in steps of 512 against one step",
        "1.2 to 1.8 times as long",
        _by_step(512, 8192),
        at_least=1.05,
    ),
)

PART = Part("first_token", 45, measure, _draw, PREDICTIONS)
