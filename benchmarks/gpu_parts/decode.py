"""Tokens a second in decoding, with and without CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.model import EngineRig, engine_rig, random_model, random_tokens, shape
from benchmarks.gpu_parts.rig.part import Budget, Part
from prefixd.worker.attention.flash_attention import FlashAttention

_BATCHES = (1, 8, 32, 64)
_SMALL_BATCHES = (1, 2)


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """Tokens a second by batch, at a context of 1,024 tokens, through the worker's engine.

    With graphs where the worker would use them: with flash attention; "graphs" says why not.
    """
    batches, context, steps = (_BATCHES, 1024, 30) if device.measures else (_SMALL_BATCHES, 64, 2)
    model = random_model(device)
    blocks = -(-(context + 2 * steps + 8) // model.spec.geometry.block_tokens)
    attention = type(model.attention).__name__
    graphs = isinstance(model.attention, FlashAttention)
    reason = "captured" if graphs else f"not captured: attention is {attention}"
    points = []
    for mode in ("eager", "graphs") if graphs else ("eager",):
        rig_made = engine_rig(device, max(batches) * blocks, max(batches) + 1, 512, with_graphs=mode == "graphs")
        with budget.attempt(mode), rig_made as rig:
            rig.zero(frames := rig.frames(max(batches) * blocks))  # what is cached is zeros: any numbers will do
            rig.pool.free(frames)
            _throughput(rig, 1, context, blocks, steps)  # the first steps choose kernels
            for batch in batches:
                if budget.allows(f"{mode} {batch}"):
                    tokens_s = _throughput(rig, batch, context, blocks, steps)
                    points.append({"mode": mode, "batch": batch, "tokens_per_s": tokens_s})
    return {"model": shape(model), "context_tokens": context, "graphs": reason, "points": points}


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


PART = Part("decode", 30, measure)
