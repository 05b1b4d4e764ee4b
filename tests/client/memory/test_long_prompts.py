"""Prompts longer than the daemon's memory, through a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncCache, AsyncClient, NamespaceSpec, PartSpec, SlidingWindow

pytestmark = pytest.mark.slow

TIER, BLOCK = 64, 4096
SPEC = NamespaceSpec("long", 2, (PartSpec("kv", 0, BLOCK),))
WINDOWS = NamespaceSpec("windows", 2, (PartSpec("full", 0, BLOCK), PartSpec("window", 0, BLOCK, SlidingWindow(7))))


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess({"cpu.bytes": TIER * BLOCK, "disk.bytes": "64MiB"}) as started:
        yield started


@pytest.fixture(params=["shared", "streamed"])
async def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address, memory=request.param) as made:
        yield made


def prompt(seed: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, and the bytes of their blocks."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 1 << 31, 2 * blocks, np.uint32), rng.integers(0, 256, (blocks, BLOCK), np.uint8)


async def store(cache: AsyncCache, tokens: np.ndarray, kv: np.ndarray) -> None:
    done = 0
    while done < len(kv):
        kept = await cache.store(tokens, kv[done:], first_block=done, durable=True)
        assert kept.committed + kept.duplicates, "nothing more could be stored"
        done += kept.committed + kept.duplicates


@pytest.mark.parametrize("blocks", [32, 70, 150, 4 * TIER])
async def test_a_prompt_longer_than_the_tier_is_loaded_whole(client: AsyncClient, blocks: int) -> None:
    cache = await client.register(SPEC)
    tokens, kv = prompt(blocks, blocks)
    await store(cache, tokens, kv)
    before = await client.stats()
    for _ in range(2):
        into = np.zeros_like(kv)
        assert await cache.load(tokens, into) == blocks
        assert (into == kv).all()
    after = await client.stats()
    assert after.asked_tokens - before.asked_tokens == after.hit_tokens - before.hit_tokens == 2 * 2 * blocks


async def test_long_loads_get_on_beside_each_other_and_beside_a_lease(daemon: DaemonProcess) -> None:
    async with AsyncClient(daemon.address) as client:
        cache = await client.register(SPEC)
        prompts = [prompt(seed, 3 * TIER) for seed in range(4)]
        for tokens, kv in prompts:
            await store(cache, tokens, kv)
        others, kv = prompt(9, 40)
        await store(cache, others, kv)
        async with await cache.acquire(others) as lease:
            assert lease.blocks == 40
            into = [np.zeros_like(kv) for _, kv in prompts]
            loads = (cache.load(tokens, each) for (tokens, _), each in zip(prompts, into, strict=True))
            assert await asyncio.gather(*loads) == [3 * TIER] * len(prompts)
        assert all((each == kv).all() for (_, kv), each in zip(prompts, into, strict=True))


async def test_windows_of_a_long_prompt_are_those_of_its_end(client: AsyncClient) -> None:
    cache = await client.register(WINDOWS)
    blocks = 2 * TIER
    tokens, kv = prompt(77, blocks)
    window = 255 - kv
    for part, of_part in ((0, kv), (1, window)):
        for end in range(16, blocks + 1, 16):
            result = await cache.store(tokens[: 2 * end], of_part[end - 16 : end], first_block=end - 16, parts=[part])
            assert result.dropped == 0
    there = (await cache.match(tokens)).blocks
    assert there == blocks
    into = [np.zeros_like(kv), np.zeros_like(kv)]
    assert await cache.load(tokens, into) == blocks
    assert (into[0] == kv).all()
    assert (into[1][-3:] == window[-3:]).all()
    assert not into[1][:-3].any(), "no bytes of shorter prefixes"
