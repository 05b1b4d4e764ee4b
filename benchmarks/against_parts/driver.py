"""Daemons and their client of one tree, the first one on `PYTHONPATH`; a program of its own.

Reads lines "OPERATION CALLS" from stdin, and answers each with the seconds of its calls as a line of JSON. Uses nothing
of this repository but what older commits have too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import numpy as np
import numpy.typing as npt

from benchmarks.common import harness
from prefixd.client import AsyncCache, AsyncClient, NamespaceSpec, PartSpec, Sampling

_BLOCK_TOKENS = 16
_SMALL_BYTES, _LARGE_BYTES = 4096, 2 << 20
_MATCHED_BLOCKS, _MOVED_BLOCKS = 1000, 256
_PROMPT_TOKENS, _OUTPUT_TOKENS = 200, 16
_CACHE = {"cpu.bytes": 1 << 30, "disk.bytes": 0}
_MODEL = {"worker.embedded": True, "worker.threads": 1, "cpu.bytes": 64 << 20, "disk.bytes": 0}


class Moved:
    """Stores and loads of blocks of one size; each store has new tokens, and each load the last ones stored."""

    def __init__(self, client: AsyncClient, cache: AsyncCache, block_bytes: int, rng: np.random.Generator) -> None:
        self._client, self._cache, self._rng = client, cache, rng
        self._source = rng.integers(0, 256, _MOVED_BLOCKS * block_bytes, dtype=np.uint8)
        self._target = np.ones_like(self._source)
        self._tokens = _prompt(rng, _MOVED_BLOCKS)

    async def store(self) -> float:
        await self._client.evict(namespace_id=self._cache.namespace_id)
        self._tokens = _prompt(self._rng, _MOVED_BLOCKS)
        begin = time.perf_counter()
        stored = await self._cache.store(self._tokens, self._source)
        elapsed_s = time.perf_counter() - begin
        assert stored.committed == _MOVED_BLOCKS, stored
        return elapsed_s

    async def load(self) -> float:
        begin = time.perf_counter()
        loaded = await self._cache.load(self._tokens, self._target)
        elapsed_s = time.perf_counter() - begin
        assert loaded == _MOVED_BLOCKS, loaded
        return elapsed_s


def _prompt(rng: np.random.Generator, blocks: int) -> npt.NDArray[np.uint32]:
    return rng.integers(0, 128_000, blocks * _BLOCK_TOKENS, dtype=np.uint32)


async def _match(client: AsyncClient, rng: np.random.Generator) -> Callable[[], Awaitable[float]]:
    spec = NamespaceSpec("against-match", _BLOCK_TOKENS, (PartSpec("full", 0, _SMALL_BYTES),))
    cache, tokens = await client.register(spec), _prompt(rng, _MATCHED_BLOCKS)
    await cache.store(tokens, np.zeros(_MATCHED_BLOCKS * _SMALL_BYTES, np.uint8))

    async def match() -> float:
        begin = time.perf_counter()
        found = await cache.match(tokens)
        elapsed_s = time.perf_counter() - begin
        assert found.blocks == _MATCHED_BLOCKS, found
        return elapsed_s

    return match


async def _moved(client: AsyncClient, block_bytes: int, rng: np.random.Generator) -> Moved:
    spec = NamespaceSpec(f"against-{block_bytes}", _BLOCK_TOKENS, (PartSpec("full", 0, block_bytes),))
    return Moved(client, await client.register(spec), block_bytes, rng)


def _generate(client: AsyncClient, rng: np.random.Generator) -> Callable[[], Awaitable[float]]:
    async def generate() -> float:
        prompt = rng.integers(3, 200, _PROMPT_TOKENS, dtype=np.uint32)
        begin = time.perf_counter()
        async for _ in client.generate(prompt, sampling=Sampling(max_tokens=_OUTPUT_TOKENS, ignore_eos=True)):
            pass
        return time.perf_counter() - begin

    return generate


async def _serve() -> None:
    rng = np.random.default_rng(0)
    async with AsyncExitStack() as stack:
        address = stack.enter_context(harness.daemon_address(None, _CACHE))
        client = await stack.enter_async_context(AsyncClient(address, name="against", memory="shared"))
        small, large = await _moved(client, _SMALL_BYTES, rng), await _moved(client, _LARGE_BYTES, rng)
        operations = {
            "match": await _match(client, rng),
            "store_4kib": small.store,
            "load_4kib": small.load,
            "store_2mib": large.store,
            "load_2mib": large.load,
        }
        model_address = stack.enter_context(harness.daemon_address(None, _MODEL))
        with_model = await stack.enter_async_context(AsyncClient(model_address, name="against", timeout_s=120.0))
        operations["generate"] = _generate(with_model, rng)
        print("ready", flush=True)
        for line in iter(sys.stdin.readline, ""):
            name, calls = line.split()
            print(json.dumps([await operations[name]() for _ in range(int(calls))]), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
