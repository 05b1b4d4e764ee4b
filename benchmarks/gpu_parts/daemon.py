"""Tokens a second of a whole daemon with the settings that it has by itself: gRPC, queue, cache and worker."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.model import random_model, random_tokens, shape, write
from benchmarks.gpu_parts.rig.part import Budget, Part
from benchmarks.gpu_parts.rig.prediction import Prediction, point_figure
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, Sampling, Tokens
from prefixd.v1 import admin_pb2

_REQUESTS = (1, 64)
_SMALL_REQUESTS = (1, 2)


def measure(device: Device, budget: Budget) -> Mapping[str, Any]:
    """By requests at a time: tokens a second while all of them decode, and what the clients waited for a first token.

    The weights are written to a temporary directory first. Prompts have 1,024 tokens of their own. Every point is run
    twice: in its first run graphs are captured, and in its second the prompts are cached.
    """
    requests, context, output = (_REQUESTS, 1024, 128) if device.measures else (_SMALL_REQUESTS, 64, 12)
    model = random_model(device)
    described = shape(model)
    with tempfile.TemporaryDirectory(prefix="prefixd-model-") as folder:
        begin = time.monotonic()
        write(model, Path(folder))
        written_s = time.monotonic() - begin
        del model
        random_model.cache_clear()
        settings = {
            "worker.model": folder,
            "gpu.device": str(device.torch_device),
            **({} if device.measures else {"gpu.bytes": 64 << 20, "cpu.bytes": 64 << 20}),
        }
        with DaemonProcess(settings, start_timeout_s=180.0) as daemon:
            answer = asyncio.run(_ask(daemon.address, requests, context, output, budget))
            daemon.kill()  # what it has cached is not wanted any more
    return {
        "model": described,
        "context_tokens": context,
        "output_tokens": output,
        "written_s": round(written_s, 1),
        **answer,
    }


async def _ask(address: str, requests: tuple[int, ...], context: int, output: int, budget: Budget) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    async with AsyncClient(address) as client:
        begin = time.monotonic()
        await _ready(client)
        loaded_s = time.monotonic() - begin
        for count in requests:
            if not budget.allows(f"{count} requests"):
                continue
            for run in ("first", "again"):
                prompts = [random_tokens(1000 * count + number, context) for number in range(count)]
                clocked = await asyncio.gather(*(_tokens(client, prompt, output) for prompt in prompts))
                started, ended = max(times[0] for times, _ in clocked), min(times[-1] for times, _ in clocked)
                sampled = sum(started < at <= ended for times, _ in clocked for at in times)
                waits = sorted(times[0] - sent for times, sent in clocked)
                points.append(
                    {
                        "requests": count,
                        "run": run,
                        "tokens_per_s": round(sampled / (ended - started), 1) if sampled else 0.0,
                        "first_token_ms": [round(1e3 * wait, 1) for wait in (waits[len(waits) // 2], waits[-1])],
                    }
                )
        worker = (await client.stats()).worker
    return {"loaded_s": round(loaded_s, 1), "graphs": worker.cuda_graphs_reason or worker.cuda_graphs, "points": points}


async def _ready(client: AsyncClient) -> None:
    while (worker := (await client.stats()).worker).state != admin_pb2.WorkerStats.STATE_READY:
        if worker.state == admin_pb2.WorkerStats.STATE_FAILED:
            raise RuntimeError(f"the worker failed: {worker.error}")
        await asyncio.sleep(0.1)


async def _tokens(client: AsyncClient, prompt: list[int], output: int) -> tuple[list[float], float]:
    """When each token came, and when the request was sent."""
    sent = time.monotonic()
    times: list[float] = []
    async for event in client.generate(prompt, sampling=Sampling(max_tokens=output, ignore_eos=True, temperature=0.0)):
        if isinstance(event, Tokens):
            times += [time.monotonic()] * len(event.token_ids)
    return times, sent


PREDICTIONS = (
    Prediction(
        "a daemon with no setting but its model, 64 requests of 1,024 tokens",
        "4,000 tokens/s or more",
        point_figure("tokens_per_s", requests=64, run="again"),
        at_least=3500.0,
    ),
)

PART = Part("daemon", 90, measure, predictions=PREDICTIONS)
