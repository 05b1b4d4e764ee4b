"""The GPU tier is created in a thread: the daemon serves meanwhile, and can be ended."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from prefixd.cache import TieredCache
from prefixd.server import model_host
from prefixd.server.model_host import ModelHost
from prefixd.settings import Settings
from prefixd_swap import FramePool, KvGeometry, SwapError, VirtualMemory

WAIT_S = 60.0


@pytest.fixture
def host(cache: TieredCache, model_directory: Path, tmp_path: Path) -> ModelHost:
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path,
            "gpu": {"bytes": 1 << 20, "device": "cpu"},
            "worker": {"model": model_directory, "threads": 1},
        }
    )
    return ModelHost(settings, "cpu", cache, time.monotonic)


async def reached(event: threading.Event) -> None:
    async with asyncio.timeout(WAIT_S):
        while not event.is_set():
            await asyncio.sleep(0.001)


async def test_the_loop_runs_while_the_tier_is_created(
    host: ModelHost, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating waits for the loop, and the worker, which waits for its memory, gets it."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FramePool):
        def __init__(self, *arguments: Any) -> None:
            begun.set()
            if not go_on.wait(WAIT_S):
                raise SwapError("the loop stood still")
            super().__init__(*arguments)

    monkeypatch.setattr(model_host, "FramePool", Slow)
    host.start()
    try:
        await reached(begun)
        assert not cache.tiers.compute.capacity_bytes
        go_on.set()
        model = await asyncio.wait_for(host.model(), WAIT_S)
        assert model.frames == cache.tiers.frames.capacity == 128
    finally:
        await host.stop()


async def test_a_stop_does_not_wait_for_the_rest_of_the_tier(
    host: ModelHost, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    memories: list[VirtualMemory] = []

    class Endless(FramePool):
        def __init__(self, memory: VirtualMemory, geometry: KvGeometry, frames: int, most: int) -> None:
            memories.append(memory)
            while True:
                memory.destroy(memory.create(1))
                begun.set()

    monkeypatch.setattr(model_host, "FramePool", Endless)
    host.start()
    await reached(begun)
    await asyncio.wait_for(host.stop(), WAIT_S)
    assert memories[0]._closed and not cache.tiers.compute.capacity_bytes
