"""The GPU tier is created in a thread: the daemon serves meanwhile, and can be ended."""

from __future__ import annotations

import asyncio
import logging
import resource
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.base.errors import ConfigError, UnavailableError
from prefixd.cache import TieredCache
from prefixd.images.token_counts import FixedCount, ImageProcessor
from prefixd.serving.images.image_decoder import ImageDecoder
from prefixd.serving.models import gpu_memory
from prefixd.serving.models.gpu_memory import most_frames
from prefixd.serving.models.models import Models
from prefixd.settings import Settings
from prefixd.worker_protocol.protocol import ImageShape
from prefixd_swap import FramePool, SwapError, VirtualMemory
from prefixd_swap.vmem import HostMemory
from tests.hello import hello as hello_with
from tests.waiting import WAIT_S, until


@pytest.fixture
def models(cache: TieredCache, model_directory: Path, tmp_path: Path) -> Models:
    settings = Settings.model_validate(
        {
            "data_dir": tmp_path,
            "gpu": {"bytes": 1 << 20, "device": "cpu"},
            "worker": {"model": model_directory, "threads": 1},
        }
    )
    return Models(settings, "cpu", cache, time.monotonic)


@pytest.mark.slow
async def test_the_loop_runs_while_the_tier_is_created(
    models: Models, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Creating waits for the loop, and the worker, which waits for its memory, gets it."""
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FramePool):
        def __init__(self, *arguments: Any) -> None:
            begun.set()
            if not go_on.wait(WAIT_S):
                raise SwapError("the loop stood still")
            super().__init__(*arguments)

    monkeypatch.setattr(gpu_memory, "FramePool", Slow)
    models.start()
    try:
        await until(begun.is_set)
        assert not cache.tiers.compute.capacity_bytes
        go_on.set()
        model = await asyncio.wait_for(models.first.model(), WAIT_S)
        assert model.frames == cache.tiers.frames.capacity == 128
    finally:
        await models.stop()


@pytest.mark.slow
async def test_a_stop_does_not_wait_for_the_rest_of_the_tier(
    models: Models, cache: TieredCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    memories: list[VirtualMemory] = []

    class Endless(FramePool):
        def __init__(self, memory: VirtualMemory, frame_bytes: int, frames: int, most: int) -> None:
            memories.append(memory)
            while True:
                memory.destroy(memory.create(1))
                begun.set()

    monkeypatch.setattr(gpu_memory, "FramePool", Endless)
    models.start()
    await until(begun.is_set)
    await asyncio.wait_for(models.stop(), WAIT_S)
    assert memories[0]._closed and not cache.tiers.compute.capacity_bytes


@pytest.mark.slow
async def test_auto_takes_a_share_of_what_is_free_after_the_weights(
    models: Models, cache: TieredCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And counts with memory that the CPU tier was promised and has not touched."""
    caplog.set_level(logging.INFO)
    automatic = models.gpu._settings.gpu.model_copy(update={"bytes": "auto"})
    monkeypatch.setattr(models.gpu, "_settings", models.gpu._settings.model_copy(update={"gpu": automatic}))
    untouched = cache.tiers.arena.untouched_bytes()
    assert untouched == 1 << 20
    free = 64 << 20
    monkeypatch.setattr(HostMemory, "available_bytes", lambda _: free)
    models.start()
    try:
        model = await asyncio.wait_for(models.first.model(), WAIT_S)
        hello = model.hello
        assert hello.weights_bytes >= hello.parameters * 4 and hello.working_bytes > 0
        left = free - untouched - hello.weights_bytes - hello.working_bytes
        assert model.frames == int(left * 0.9) // 8192
        (line,) = [record.getMessage() for record in caplog.records if "gpu.bytes = auto" in record.getMessage()]
        for number in (free, untouched, hello.weights_bytes, hello.working_bytes):
            assert str(number) in line
        cache.tiers.frames.plan(7)
        assert (await models.first.model()).frames == 7, "of the size that it has now, or will have"
    finally:
        await models.stop()


@pytest.mark.slow
async def test_auto_on_a_device_without_room_for_the_model(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    automatic = models.gpu._settings.gpu.model_copy(update={"bytes": "auto"})
    monkeypatch.setattr(models.gpu, "_settings", models.gpu._settings.model_copy(update={"gpu": automatic}))
    monkeypatch.setattr(HostMemory, "available_bytes", lambda _: 1 << 20)
    models.start()
    try:
        with pytest.raises(UnavailableError, match=r"gpu.bytes = auto, -\d+ bytes, holds 0 frames of 8192 bytes"):
            await asyncio.wait_for(models.first.model(), WAIT_S)
    finally:
        await models.stop()


def test_addresses_for_all_that_the_device_has_unless_they_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with HostMemory(4096) as memory:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert most_frames(memory, 4096, 3) == memory.total_bytes() // 4096
        assert most_frames(memory, 4096, 1 << 50) == 1 << 50
        monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, resource.RLIM_INFINITY))
        assert most_frames(memory, 4096, 3) == 3


async def test_blocks_that_cannot_tell_images_apart_are_refused(models: Models) -> None:
    hello = hello_with(frame_bytes=8192, block_tokens=4, chunk_bytes=8192, images=ImageShape(90, "rows"))
    with pytest.raises(ConfigError, match=r"worker.block_tokens = 4: .* raise it to 8"):
        await models.first._on_hello(hello)
    await models.stop()


async def test_a_step_that_cannot_hold_an_image_is_refused(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(_: ImageDecoder) -> ImageProcessor:
        return ImageProcessor(FixedCount(513), bytes(32))

    monkeypatch.setattr(ImageDecoder, "start", start)
    hello = SimpleNamespace(images=ImageShape(90, "rows", both_ways=True))
    with pytest.raises(ConfigError, match=r"worker.max_step_tokens = 512 is below the 513 tokens of an image"):
        await models.first._read_image_processor(hello)  # type: ignore[arg-type]
    hello.images = ImageShape(90, "rows")
    assert (await models.first._read_image_processor(hello)).processor.counts == FixedCount(513)  # type: ignore[arg-type]
    await models.stop()
