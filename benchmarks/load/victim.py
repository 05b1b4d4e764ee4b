"""A client that repeats one thing until killed: `python -m benchmarks.load.victim ADDRESS SCENE OWNER [TOKEN]`."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections.abc import Awaitable, Callable

import numpy as np

from benchmarks.load.mixed_load import LoadPlan, MixedLoad
from benchmarks.load.world import NAMESPACES, Prompt, content
from prefixd.client import AsyncCache, AsyncClient

_NUMBERS = 32
_PIECE_BYTES = 4096
_TTL_S = 600.0
"""Long enough that leases and reservations end only by the victim's death, never by expiry."""


class Victim:
    """One client, its prompts and its scene."""

    def __init__(self, address: str, owner: int, memory: str = "auto", token: str = "") -> None:
        self._address = address
        self._owner = owner
        self._rng = random.Random(owner)
        self._numbers = itertools.count(1)
        self._client = AsyncClient(address, name=f"victim {owner}", memory=memory, token=token)  # type: ignore[arg-type]
        self._caches: dict[int, AsyncCache] = {}

    async def connect(self) -> None:
        """Opens a session, maps the arena, registers, and closes."""
        async with AsyncClient(self._address, name=f"victim {self._owner}") as client:
            await client.register(NAMESPACES[0])

    async def reserve(self) -> None:
        prompt = self._prompt()
        async with await (await self._cache(prompt)).reserve(prompt.tokens, ttl_s=_TTL_S):
            await asyncio.sleep(self._rng.uniform(0, 0.05))

    async def copy(self) -> None:
        """Copies into the arena in small pieces, to be killed in the middle."""
        prompt = self._prompt()
        async with await (await self._cache(prompt)).reserve(prompt.tokens, ttl_s=_TTL_S) as reservation:
            source = content(prompt, reservation.first_block).tobytes()
            at = 0
            for block in range(reservation.blocks):
                for part, spec in enumerate(prompt.spec.parts):
                    slot = reservation.view(block, part)
                    for start in range(0, spec.nbytes, _PIECE_BYTES):
                        end = min(start + _PIECE_BYTES, spec.nbytes)
                        slot[start:end] = source[at + start : at + end]
                        await asyncio.sleep(0)
                    at += spec.nbytes
            await reservation.commit(durable=self._rng.random() < 0.3)

    async def lease(self) -> None:
        prompt = self._prompt()
        async with await (await self._cache(prompt)).acquire(prompt.tokens, ttl_s=_TTL_S):
            await asyncio.sleep(self._rng.uniform(0, 0.05))

    async def put(self) -> None:
        """Streams bytes to the daemon, to be killed in the middle."""
        prompt = self._prompt()
        await (await self._cache(prompt)).store(prompt.whole, content(prompt), durable=self._rng.random() < 0.3)

    async def get(self) -> None:
        """Streams bytes from the daemon, to be killed in the middle."""
        prompt = self._prompt(shared=True)
        await (await self._cache(prompt)).load(prompt.tokens, np.empty(len(content(prompt)), np.uint8))

    async def durable(self) -> None:
        """Stores durable blocks, to be killed while the daemon writes them to disk."""
        prompt = self._prompt()
        await (await self._cache(prompt)).store(prompt.whole, content(prompt), durable=True)

    async def mixed(self) -> None:
        """Runs eight calls of all kinds at once."""
        async with MixedLoad(self._address, LoadPlan(self._owner, 0, tasks=8, numbers=_NUMBERS)) as load:
            load.go()
            await asyncio.Event().wait()

    def _prompt(self, shared: bool | None = None) -> Prompt:
        """Returns a prompt that all clients ask for, or a new one of its own."""
        namespace = self._rng.randrange(len(NAMESPACES))
        if shared or (shared is None and self._rng.random() < 0.5):
            return Prompt(namespace, 0, self._rng.randrange(_NUMBERS))
        return Prompt(namespace, self._owner, next(self._numbers))

    async def _cache(self, prompt: Prompt) -> AsyncCache:
        cache = self._caches.get(prompt.namespace)
        if cache is None:
            cache = self._caches[prompt.namespace] = await self._client.register(prompt.spec)
        return cache


SCENES = ("connect", "reserve", "copy", "lease", "put", "get", "durable", "mixed")
STREAMED_SCENES = ("put", "get")
"""Scenes with bytes that go through gRPC; they can run over TCP."""


async def _repeat(do: Callable[[], Awaitable[None]]) -> None:
    print("ready", flush=True)
    while True:
        await do()


def main() -> None:
    """Runs the victim."""
    address, scene, owner, *token = sys.argv[1:]

    async def play() -> None:
        victim = Victim(address, int(owner), "streamed" if scene in STREAMED_SCENES else "auto", *token)
        await _repeat(getattr(victim, scene))

    asyncio.run(play())


if __name__ == "__main__":
    main()
