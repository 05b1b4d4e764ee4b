"""A daemon with a random model, and requests to it over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from prefixd.base.tiers import Tier
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, Finished, Sampling, Tokens
from prefixd.v1 import admin_pb2

_LOAD_S = 150.0


@dataclass(frozen=True, slots=True)
class Clocked:
    """A request that was answered. sent_s, times_s: when it was sent, and when each of its tokens came."""

    sent_s: float
    times_s: Sequence[float]
    tokens: Sequence[int]
    hit_tokens: Mapping[Tier, int]

    @property
    def wait_ms(self) -> float:
        """What the client waited for the first token."""
        return 1e3 * (self.times_s[0] - self.sent_s)


@dataclass(frozen=True, slots=True)
class Asked:
    """A daemon that has loaded its model. loaded_s: seconds that it took after it answered first."""

    client: AsyncClient
    loaded_s: float

    async def ask(self, prompt: Sequence[int], output: int, *, cached: bool = True) -> Clocked:
        """A greedy request. cached: False: it finds nothing in the cache, and leaves nothing there."""
        apart: dict[str, Any] = {} if cached else {"salt": b"apart", "read_only": True}
        sampling = Sampling(max_tokens=output, ignore_eos=True, temperature=0.0)
        sent_s = time.monotonic()
        times_s: list[float] = []
        tokens: list[int] = []
        async for event in self.client.generate(prompt, sampling=sampling, **apart):
            if isinstance(event, Tokens):
                times_s += [time.monotonic()] * len(event.token_ids)
                tokens += event.token_ids
            elif isinstance(event, Finished):
                return Clocked(sent_s, times_s, tokens, event.hit_tokens)
        raise RuntimeError("the daemon ended a request without an end; see its log")

    async def ask_all(
        self, prompts: Sequence[Sequence[int]], output: int, outstanding: int, *, cached: bool = True
    ) -> list[Clocked]:
        """Requests of which so many are under way at a time, in the order of the prompts."""
        places = asyncio.Semaphore(outstanding)

        async def ask(prompt: Sequence[int]) -> Clocked:
            async with places:
                return await self.ask(prompt, output, cached=cached)

        return await asyncio.gather(*(ask(prompt) for prompt in prompts))


@asynccontextmanager
async def asked_daemon(device: Device, model: Path, settings: Mapping[str, object]) -> AsyncIterator[Asked]:
    """A daemon with a model and these settings; what it has cached is thrown away at the end.

    Raises DaemonFailed, and RuntimeError where the model cannot be loaded.
    """
    given = {"worker.model": model, "gpu.device": str(device.torch_device), **settings}
    with DaemonProcess(given, start_timeout_s=_LOAD_S) as daemon:
        try:
            async with AsyncClient(daemon.address) as client:
                begin = time.monotonic()
                await _ready(client)
                yield Asked(client, round(time.monotonic() - begin, 1))
        finally:
            daemon.kill()


async def _ready(client: AsyncClient) -> None:
    end = time.monotonic() + _LOAD_S
    while (worker := (await client.stats()).worker).state != admin_pb2.WorkerStats.STATE_READY:
        if worker.state == admin_pb2.WorkerStats.STATE_FAILED:
            raise RuntimeError(f"the worker failed: {worker.error}")
        if time.monotonic() > end:
            raise RuntimeError(f"the worker did not load its model within {_LOAD_S:g} s")
        await asyncio.sleep(0.1)
