"""The cache on tiers that are simulated: it asks for none by number or kind, and demand comes first in every one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest

from prefixd.base.tenancy.tenants import Quota, Tenants
from prefixd.cache import BlockChain, Namespace, NamespaceSpec, PartSpec, Session, TieredCache, Tiers, check_integrity
from prefixd.cache.index.trie import Rows
from prefixd.cache.options import CacheOptions
from prefixd.planner.simulation.event_loop import SimulatedTimeLoop
from prefixd.planner.simulation.link import SimulatedLink
from prefixd_swap import create_eviction_policy
from prefixd_swap.transfers import DeviceLimits, Transfers
from tests.swap.simulated_memory import SimulatedMemoryTier
from tests.swap.tiers.simulated import (
    SimulatedCopyEngine,
    SimulatedFaults,
    SimulatedStoreTier,
)

T = TypeVar("T")

TOKENS = 4
BLOCK = 64 << 10
STORE_BYTES_PER_S = 100e6
COPY_BYTES_PER_S = 100e6


@dataclass
class House:
    """A cache with three simulated tiers, and one session."""

    cache: TieredCache
    near: SimulatedMemoryTier
    middle: SimulatedMemoryTier
    far: SimulatedStoreTier
    faults: SimulatedFaults
    session: Session
    namespace: Namespace

    def chain(self, prompt: int, blocks: int) -> BlockChain:
        tokens = np.arange(blocks * TOKENS, dtype="<u4") + prompt * 1_000_000
        return self.cache.chain(self.namespace, tokens.tobytes())

    def content(self, prompt: int, block: int) -> bytes:
        return bytes([prompt % 256, block % 256]) * (BLOCK // 2)

    async def commit(self, prompt: int, blocks: int) -> None:
        """Fills blocks of the shared tier as an engine does."""
        chain = self.chain(prompt, blocks)
        reservation = await self.cache.reserve(self.session, self.namespace, chain)
        assert not isinstance(reservation, int) and len(reservation.slots) == blocks
        for block, (slot,) in enumerate(reservation.slots.tolist()):
            self.middle.arena.array(slot, BLOCK)[:] = np.frombuffer(self.content(prompt, block), np.uint8)
        await self.cache.commit(reservation, blocks)
        while self.cache.mover.checksums.tasks:  # simulated time does not wait for threads
            time.sleep(0.001)
            await asyncio.sleep(0)

    async def put_far(self, prompt: int, blocks: int) -> None:
        """Stores a prompt that is in the far tier alone afterwards."""
        await self.commit(prompt, blocks)
        await self.cache.write_back.flush()
        rows = await self.rows(prompt, blocks)
        assert self.cache.placement.drop(self.cache.trie(self.namespace), rows[::-1], self.middle) == blocks

    async def rows(self, prompt: int, blocks: int) -> Rows:
        return await self.cache.match(self.namespace, self.chain(prompt, blocks))

    async def load(self, prompt: int, blocks: int) -> float:
        """Leases a prompt and compares its bytes; the simulated seconds until it was there."""
        began_s = now_s()
        lease = await self.cache.acquire(self.session, self.namespace, self.chain(prompt, blocks))
        took_s = now_s() - began_s
        assert lease is not None and len(lease.rows) == blocks
        for block, slot in enumerate(lease.trie.slots[lease.rows, self.middle.level, 0].tolist()):
            assert self.middle.arena.array(slot, BLOCK).tobytes() == self.content(prompt, block)
        self.cache.release(self.session, lease.id)
        return took_s


def now_s() -> float:
    return asyncio.get_running_loop().time()


def simulate(work: Callable[[], Awaitable[T]]) -> T:
    async def run() -> T:
        return await work()

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(run())


@asynccontextmanager
async def house(
    *, urgency: bool = True, near: int = 8, middle: int = 1024, tenants: Tenants | None = None
) -> AsyncIterator[House]:
    clock = asyncio.get_running_loop().time
    transfers = Transfers(urgency_enabled=urgency, clock=clock)
    first = SimulatedMemoryTier(near * BLOCK, name="near", level=0, on_device=True)
    second = SimulatedMemoryTier(middle * BLOCK, name="middle", level=1, shared=True)
    faults = SimulatedFaults()
    third = SimulatedStoreTier(
        transfers,
        name="far",
        level=2,
        capacity_bytes=1 << 30,
        link=SimulatedLink(STORE_BYTES_PER_S, 0.0, clock, asyncio.sleep),
        faults=faults,
        limits=DeviceLimits(in_flight=2, reserved=1),
    )
    tiers = Tiers(transfers, compute=first, shared=second, durable=third)
    engine = SimulatedCopyEngine(SimulatedLink(COPY_BYTES_PER_S, 0.0, clock, asyncio.sleep))
    policy = create_eviction_policy("lru", 0)
    options = CacheOptions(write_back=False, reserved_bytes=second.capacity_bytes)
    cache = TieredCache(tiers, engine, policy, clock, options, tenants=tenants)
    namespace = cache.register(NamespaceSpec("model", TOKENS, (PartSpec("all", 0, BLOCK),)))
    yield House(
        cache, first, second, third, faults, cache.leases.open("test", 1, 0.0, cache.tenants.default), namespace
    )
    await cache.close()
    check_integrity(cache)
    for tier in (first, second):
        tier.close()
    engine.close()


def test_blocks_go_down_and_come_up_with_their_bytes() -> None:
    async def work() -> None:
        async with house(middle=16) as here:
            for prompt in range(4):  # four times what the shared tier holds, so that eviction writes
                await here.commit(prompt, 16)
            assert here.cache.tiers.counters[here.middle.level].demoted == 48
            for prompt in range(4):
                await here.load(prompt, 16)

    simulate(work)


def test_what_the_store_refuses_costs_its_blocks_only() -> None:
    async def work() -> None:
        async with house() as here:
            await here.put_far(1, 8)
            here.faults.down.add("read")
            assert await here.cache.acquire(here.session, here.namespace, here.chain(1, 8)) is None
            assert here.cache.tiers.troubles.of_tier(here.far)
            here.faults.down.clear()
            assert await here.cache.mover.disk.health.revive()
            await here.load(1, 8)

    simulate(work)


@pytest.mark.parametrize(("urgency", "least", "most"), [(True, 1.0, 2.0), (False, 5.0, 100.0)])
def test_demand_waits_for_no_prefetch(urgency: bool, least: float, most: float) -> None:
    """A prefetch of 900 blocks is under way when somebody wants 64 others."""

    async def work() -> float:
        async with house(urgency=urgency) as here:
            for prompt, blocks in ((1, 64), (2, 64), (3, 900)):
                await here.put_far(prompt, blocks)
            idle_s = await here.load(1, 64)
            assert await here.cache.prefetch(here.session, here.namespace, here.chain(3, 900)) == 512, "the limit"
            await asyncio.sleep(idle_s)
            return await here.load(2, 64) / idle_s

    assert least <= simulate(work) <= most


def test_who_needs_what_is_being_prefetched_makes_it_urgent() -> None:
    async def work() -> tuple[float, float]:
        async with house() as here:
            for prompt, blocks in ((1, 256), (2, 256), (3, 256)):
                await here.put_far(prompt, blocks)
            for prompt in (1, 2):
                assert await here.cache.prefetch(here.session, here.namespace, here.chain(prompt, 256)) == 256
            await asyncio.sleep(0.001)
            wanted_s = await here.load(2, 256)
            await here.cache.mover.quiesce()
            return wanted_s, await here.load(3, 256)

    wanted_s, idle_s = simulate(work)
    assert wanted_s <= 1.5 * idle_s, "it is brought before the prefetch that was asked for earlier"


def test_sessions_of_one_tenant_share_its_prefetches() -> None:
    async def work() -> None:
        async with house() as here:
            for prompt in (1, 2):
                await here.put_far(prompt, 300)
            cache, chains = here.cache, [here.chain(prompt, 300) for prompt in (1, 2)]
            tenants = [cache.tenants.default, cache.tenants.default, cache.tenants.known("other")]
            first, second, others = [cache.leases.open("one", 1, 0.0, tenant) for tenant in tenants]
            assert await cache.prefetch(first, here.namespace, chains[0]) == 300
            assert await cache.prefetch(second, here.namespace, chains[1]) == 212, "what is left of 512"
            assert await cache.prefetch(others, here.namespace, chains[1]) == 300, "another tenant's"
            cache.leases.close(first)
            await cache.mover.quiesce()
            assert not cache._prefetches._bytes_of.total()

    simulate(work)


@pytest.mark.parametrize("alone", [True, False])
def test_between_tenants_prefetches_of_one_have_half_of_the_time(alone: bool) -> None:
    """512 blocks take 0.34 s, some at a time and one after the other, if nobody else has to be served."""

    async def work() -> tuple[float, float]:
        async with house(tenants=Tenants({} if alone else {"a": Quota(), "b": Quota()})) as here:
            cache = here.cache
            for prompt in (1, 2):
                await here.put_far(prompt, 256)
            tenant = cache.tenants.default if alone else cache.tenants.known("a")
            sessions = [cache.leases.open(name, 1, 0.0, tenant) for name in "xy"]
            begin_s, moved = now_s(), here.far.link.moved_bytes
            for session, prompt in zip(sessions, (1, 2), strict=True):
                assert await cache.prefetch(session, here.namespace, here.chain(prompt, 256)) == 256
            while here.far.link.moved_bytes < moved + 256 * BLOCK:
                await asyncio.sleep(0.001)
            half_s = now_s() - begin_s
            await cache.mover.quiesce()
            assert not cache._prefetches._bytes_of.total()
            for prompt in (1, 2):
                assert await here.load(prompt, 256) < 0.01, "it is there"
            return half_s, now_s() - begin_s

    half_s, all_s = simulate(work)
    alone_s = 512 * BLOCK / STORE_BYTES_PER_S
    # The last pause keeps nobody waiting.
    assert all_s == pytest.approx(alone_s if alone else alone_s * 7 / 4, rel=0.1)
    assert half_s == pytest.approx(alone_s / 2 if alone else alone_s * 3 / 4, rel=0.1)


def test_a_prefetch_ends_with_its_session_and_holds_nothing_then() -> None:
    async def work() -> None:
        async with house() as here:
            await here.put_far(1, 900)
            other = here.cache.leases.open("another", 2, 0.0, here.cache.tenants.default)
            assert await here.cache.prefetch(other, here.namespace, here.chain(1, 900)) == 512
            assert await here.cache.prefetch(other, here.namespace, here.chain(1, 900)) == 0, "as much as it may"
            await asyncio.sleep(0.05)
            assert any(owner.startswith("prefetch of session") for owner in here.cache.holds.blocks_by_owner())
            here.cache.leases.close(other)
            await here.cache.mover.quiesce()
            assert not here.cache.holds.live
            moved = here.far.link.moved_bytes
            await asyncio.sleep(1.0)
            assert here.far.link.moved_bytes == moved, "nobody reads on"
            assert not here.near.in_flight and not here.middle.in_flight

    simulate(work)


def test_what_cannot_be_read_straight_comes_through_a_pipeline() -> None:
    """64 blocks are read and copied on at the same time: it takes little longer than the reads alone."""

    async def work() -> float:
        async with house(near=64) as here:
            await here.put_far(1, 64)
            trie, rows = here.cache.trie(here.namespace), await here.rows(1, 64)
            began_s = now_s()
            with here.cache.holds.hold("test", trie, rows, here.near):
                assert await here.cache.mover.bring(trie, rows, here.near) == 64
            return (now_s() - began_s) / (64 * BLOCK / STORE_BYTES_PER_S)

    assert 1.0 <= simulate(work) < 1.6, "one after the other takes 2"


def test_demand_does_not_wait_for_the_room_that_others_make() -> None:
    """A prefetch into the full shared tier evicts hundreds of blocks, which are written; a reservation wants one."""

    async def work() -> float:
        async with house(middle=512) as here:
            await here.put_far(1, 256)
            for prompt in range(2, 34):
                await here.commit(prompt, 16)
            assert await here.cache.prefetch(here.session, here.namespace, here.chain(1, 256)) == 256
            await asyncio.sleep(0.005)
            began_s = now_s()
            await here.commit(34, 1)
            return (now_s() - began_s) / (BLOCK / STORE_BYTES_PER_S)

    # One piece of a write of 64 blocks may be under way, and its own block is written.
    assert simulate(work) <= 64 + 2


def test_a_prefetch_that_ends_while_it_makes_room_costs_nobody_a_block() -> None:
    """What was to be written for its room, and was not, stays where it is."""

    async def work() -> None:
        async with house(middle=512) as here:
            await here.put_far(1, 256)
            for prompt in range(2, 34):
                await here.commit(prompt, 16)
            other = here.cache.leases.open("another", 2, 0.0, here.cache.tenants.default)
            assert await here.cache.prefetch(other, here.namespace, here.chain(1, 256)) == 256
            await asyncio.sleep(0.005)
            here.cache.leases.close(other)
            await here.cache.mover.quiesce()
            assert not here.cache.mover.lost
            for prompt in range(2, 34):
                await here.load(prompt, 16)

    simulate(work)
