"""Holds the chats with the daemons of one run, and samples their memory meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from benchmarks.engines import hybrid_models
from benchmarks.jenga_parts.chats import Plan, picture
from benchmarks.workloads.asking import generated_tokens
from prefixd.client import AsyncClient, Sampling
from prefixd.v1 import admin_pb2, cache_pb2

SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a model is asked: a daemon's address, and the model's name there."""

    address: str
    model: str


@dataclass(slots=True)
class Memory:
    """The GPU tiers' bytes, summed over samples. wastes: of each sample, as `waste`."""

    samples: int = 0
    capacity: int = 0
    used: int = 0
    spare: int = 0
    unneeded: int = 0
    stranded: int = 0
    wastes: list[float] = field(default_factory=list)

    def add(self, daemons: Iterable[admin_pb2.StatsResponse]) -> None:
        self.samples += 1
        before = self._not_needed, self._allocated
        for stats in daemons:
            tier = gpu_tier(stats)
            self.capacity += tier.capacity_bytes
            self.used += tier.used_bytes
            self.spare += tier.spare_bytes
            self.unneeded += tier.unneeded_bytes
            self.stranded += tier.stranded_bytes
        self.wastes.append((self._not_needed - before[0]) / max(1, self._allocated - before[1]))

    @property
    def waste(self) -> float:
        """Bytes allocated and not needed, of all allocated."""
        return self._not_needed / max(1, self._allocated)

    @property
    def _not_needed(self) -> int:
        return self.unneeded + self.stranded

    @property
    def _allocated(self) -> int:
        return self.used - self.spare + self.stranded


@dataclass(frozen=True, slots=True)
class Talked:
    """How a run went.

    said: the tokens of each chat, the user's and the model's.
    elapsed_s: the seconds that all turns took together.
    gpu_blocks: at the end of each phase, how many blocks each model has in the GPU tier: [[33, 8], [9, 40], [25, 27]].
    stats: each daemon's figures at the end. violations: what each finds wrong in accounting for its memory.
    """

    said: list[list[int]]
    elapsed_s: float
    memory: Memory
    gpu_blocks: list[list[int]]
    stats: list[admin_pb2.StatsResponse]
    violations: list[str]


def gpu_tier(stats: admin_pb2.StatsResponse) -> admin_pb2.TierStats:
    """The GPU tier's figures."""
    return next(tier for tier in stats.tiers if tier.tier == cache_pb2.TIER_GPU)


async def talk(endpoints: Sequence[Endpoint], plan: Plan, with_images: bool, step: Callable[[], None]) -> Talked:
    """Holds all chats of the plan, `plan.chats` with each endpoint; `step` is called after each request."""
    async with AsyncExitStack() as stack:
        clients = {
            address: await stack.enter_async_context(AsyncClient(address, name="benchmark jenga", memory="streamed"))
            for address in dict.fromkeys(endpoint.address for endpoint in endpoints)
        }
        talk = _Talk(endpoints, clients, plan, with_images, step)
        return await talk.run()


class _Talk:
    """The chats of one run."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        clients: dict[str, AsyncClient],
        plan: Plan,
        with_images: bool,
        step: Callable[[], None],
    ) -> None:
        self._endpoints = endpoints
        self._clients = clients
        self._plan = plan
        self._with_images = with_images
        self._step = step
        chats = plan.chats * len(endpoints)
        self._said: list[list[int]] = [[] for _ in range(chats)]
        self._shown: list[list[bytes]] = [[] for _ in range(chats)]
        self._turns = [asyncio.Lock() for _ in range(chats)]
        self._taken = [0] * chats
        self._memory = Memory()

    async def run(self) -> Talked:
        for endpoint in self._endpoints:  # the model is loaded then; nothing of it is cached
            await generated_tokens(self._clients[endpoint.address], [3], Sampling(max_tokens=1), model=endpoint.model)
        gpu_blocks, elapsed_s = [], 0.0
        sampler = asyncio.create_task(self._sample())
        try:
            for phase in self._plan.phases(len(self._endpoints)):
                began, order = time.monotonic(), iter(phase)
                await asyncio.gather(*(self._ask_in_order(order) for _ in range(self._plan.at_once)))
                elapsed_s += time.monotonic() - began
                gpu_blocks.append(self._blocks(await self._stats()))
        finally:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
        stats = await self._stats()
        self._memory.add(stats.values())
        violations = [line for client in self._clients.values() for line in (await client.check_integrity()).violations]
        return Talked(self._said, elapsed_s, self._memory, gpu_blocks, list(stats.values()), violations)

    async def _ask_in_order(self, order: Iterator[int]) -> None:
        for chat in order:
            async with self._turns[chat]:
                await self._take_turn(chat)
            self._step()

    async def _take_turn(self, chat: int) -> None:
        endpoint = self._endpoints[chat // self._plan.chats]
        said, shown = self._said[chat], self._shown[chat]
        if self._with_images:
            shown.append(picture(self._plan.shown(chat, self._taken[chat])))
            said.append(hybrid_models.IMAGE_TOKEN)
        said += self._plan.said(chat, self._taken[chat])
        self._taken[chat] += 1
        answer = await generated_tokens(
            self._clients[endpoint.address],
            said,
            sampling=Sampling(max_tokens=self._plan.output_tokens, ignore_eos=True, temperature=0.0),
            images=shown,
            model=endpoint.model,
        )
        # An answer's placeholder would stand for an image in the next turn.
        said += [token for token in answer if not self._with_images or token < hybrid_models.IMAGE_TOKEN]

    async def _sample(self) -> None:
        while True:
            self._memory.add((await self._stats()).values())
            await asyncio.sleep(SAMPLE_S)

    async def _stats(self) -> dict[str, admin_pb2.StatsResponse]:
        return {address: await client.stats() for address, client in self._clients.items()}

    def _blocks(self, stats: dict[str, admin_pb2.StatsResponse]) -> list[int]:
        """What each endpoint's model has in the GPU tier."""
        blocks = []
        for endpoint in self._endpoints:
            of_daemon = stats[endpoint.address]
            names = {model.namespace for model in of_daemon.models if model.name == endpoint.model}
            blocks.append(sum(each.gpu_blocks for each in of_daemon.namespaces if each.namespace.name in names))
        return blocks
