"""The client against the real daemon, over real sockets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import (
    AsyncCache,
    AsyncClient,
    Client,
    ExhaustedError,
    InvalidArgumentError,
    LeaseLost,
    LoadEstimate,
    NamespaceSpec,
    NotFoundError,
    PartSpec,
    PreconditionError,
    Prefill,
    Retention,
    Sampling,
    ServerUnavailable,
    StoreResult,
    Tier,
    TierRun,
    UnsupportedError,
)
from prefixd.v1 import cache_pb2
from tests.waiting import until, wait_until

BLOCKS = 5
TOKENS = np.arange(2 * BLOCKS + 1, dtype=np.uint32)
KV = np.random.default_rng(1).integers(0, 256, BLOCKS * 128, dtype=np.uint8)


@pytest.fixture(params=["shared", "streamed"])
async def client(request: pytest.FixtureRequest, daemon: DaemonProcess) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(daemon.address, name="test", memory=request.param) as made:
        yield made


async def test_what_was_stored_is_found_and_loaded(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    assert (await cache.match(TOKENS)).blocks == 0
    assert await cache.load(TOKENS, bytearray(KV.nbytes)) == 0
    assert await cache.store(TOKENS, KV) == StoreResult(BLOCKS, 0)
    matched = await cache.match(TOKENS)
    assert (matched.blocks, matched.runs) == (BLOCKS, (TierRun(Tier.CPU, BLOCKS),))
    target = np.zeros_like(KV)
    assert await cache.load(TOKENS, target) == BLOCKS
    assert np.array_equal(target, KV)
    assert await cache.store(TOKENS, KV) == StoreResult(0, BLOCKS)


async def test_every_answer_says_what_loading_takes(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS, KV)
    prefill = Prefill(token_s=0.5, pass_s=1.0)
    assert (await cache.match(TOKENS)).estimate == LoadEstimate(load_s=0.0)
    estimate = (await cache.match(TOKENS, prefill=prefill)).estimate
    assert estimate == LoadEstimate(0.0, compute_s=1.0 + 0.5 * len(TOKENS), best_blocks=BLOCKS, best_s=1.5)
    with pytest.raises(InvalidArgumentError, match="token_s = -1"):
        await cache.match(TOKENS, prefill=Prefill(-1.0))


async def test_a_lease_says_what_was_expected_of_loading_it(daemon: DaemonProcess, spec: NamespaceSpec) -> None:
    async with AsyncClient(daemon.address, name="test", memory="shared") as client:
        cache = await client.register(spec)
        await cache.store(TOKENS, KV)
        async with await cache.acquire(TOKENS, first_block=1, prefill=Prefill(0.5)) as lease:
            assert lease.blocks == BLOCKS - 1
            assert lease.estimate == LoadEstimate(0.0, compute_s=0.5 * 9, best_blocks=BLOCKS, best_s=0.5)
        assert (await cache.acquire(np.full(9, 77, np.uint32))).estimate == LoadEstimate(load_s=0.0)


async def test_a_longer_prompt_stores_only_what_it_adds(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS[:4], KV[: 2 * 128])
    other = KV.copy()
    other[: 2 * 128] = 0
    assert await cache.store(TOKENS, other) == StoreResult(3, 2)
    target = np.zeros_like(KV)
    await cache.load(TOKENS, target)
    assert np.array_equal(target, KV)


async def test_first_block_and_max_blocks_cut_a_piece(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS[:4], KV[: 2 * 128])
    assert await cache.store(TOKENS, KV[128:], first_block=1) == StoreResult(3, 1)
    target = np.zeros(2 * 128, np.uint8)
    assert await cache.load(TOKENS, target, first_block=np.array(2), max_blocks=np.int32(2)) == 2
    assert np.array_equal(target, KV[2 * 128 : 4 * 128])


async def test_a_source_without_its_prefix_is_refused(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS[:2], KV[:128])
    with pytest.raises(PreconditionError, match=r"ends at block 1 .* starts at block 2"):
        await cache.store(TOKENS, KV[2 * 128 :], first_block=2)
    assert (await cache.match(TOKENS)).blocks == 1


async def test_what_does_not_fit_is_dropped_and_the_rest_is_good(client: AsyncClient) -> None:
    part = PartSpec("full", 0, 4 << 20)
    cache = await client.register(NamespaceSpec("too long", 2, (part,)))
    blocks = 20  # 80 MiB where there are 64
    kv = np.repeat(np.arange(blocks, dtype=np.uint8), part.nbytes)
    stored = await cache.store(range(2 * blocks), kv)
    assert stored.committed + stored.dropped == blocks
    assert 0 < stored.dropped < blocks
    kept = (await cache.match(range(2 * blocks))).blocks
    target = np.zeros(kept * part.nbytes, np.uint8)
    assert await cache.load(range(2 * blocks), target, max_blocks=kept) == kept == stored.committed
    assert np.array_equal(target, kv[: target.nbytes])
    await client.evict(namespace_id=cache.namespace_id)


async def test_parts_can_be_given_and_taken_apart(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    grid = KV.reshape(BLOCKS, 128)
    full, window = np.ascontiguousarray(grid[:, :96]), np.ascontiguousarray(grid[:, 96:])
    assert await cache.store(TOKENS, [full, window]) == StoreResult(BLOCKS, 0)
    target = np.zeros_like(KV)
    await cache.load(TOKENS, target)
    assert np.array_equal(target, KV)
    only_window = np.zeros_like(window)
    assert await cache.load(TOKENS, only_window, parts=[1]) == BLOCKS
    assert np.array_equal(only_window, window)


async def test_other_tokens_or_another_salt_find_nothing(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS, KV)
    changed = TOKENS.copy()
    changed[3] += 1
    assert (await cache.match(changed)).blocks == 1
    salted = await client.register(NamespaceSpec(spec.name, 2, spec.parts, salt=b"tenant"))
    assert (await salted.match(TOKENS)).blocks == 0


async def test_blocks_larger_than_a_message_travel_whole(client: AsyncClient) -> None:
    part = PartSpec("full", 0, (5 << 20) + 8)
    cache = await client.register(NamespaceSpec("large", 2, (part,)))
    kv = np.random.default_rng(2).integers(0, 256, 2 * part.nbytes, dtype=np.uint8)
    await cache.store([1, 2, 3, 4], kv)
    target = np.zeros_like(kv)
    assert await cache.load([1, 2, 3, 4], target) == 2
    assert np.array_equal(target, kv)


async def test_a_name_with_another_geometry_is_another_namespace(client: AsyncClient, spec: NamespaceSpec) -> None:
    first = await client.register(spec)
    assert (await client.register(spec)).namespace_id == first.namespace_id
    assert (await client.register(NamespaceSpec(spec.name, 4, spec.parts))).namespace_id != first.namespace_id


async def test_durable_needs_a_disk(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    with pytest.raises(PreconditionError):
        await cache.store(TOKENS, KV, durable=True)
    with pytest.raises(PreconditionError):
        await client.flush()


async def test_without_a_model_nothing_is_generated(client: AsyncClient) -> None:
    with pytest.raises(UnsupportedError):
        async for _ in client.generate([1, 2, 3], sampling=Sampling(max_tokens=2)):
            pass


async def test_an_operator_sees_pins_and_evicts(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS, KV)
    (prefix,) = (await client.prefixes(cache.namespace_id)).prefixes
    assert (prefix.blocks, prefix.nbytes) == (BLOCKS, KV.nbytes)
    inspected = await client.inspect(prefix.key[:8])
    assert [list(block.token_ids) for block in inspected.blocks] == TOKENS[:-1].reshape(-1, 2).tolist()
    answer = await client.pin(prefix.key)
    assert (answer.blocks, answer.durable, answer.reason) == (BLOCKS, False, "there is no disk tier; set disk.bytes")
    listed = await client.prefixes(cache.namespace_id)
    assert (listed.pinned_blocks, listed.pinned_bytes) == (BLOCKS, KV.nbytes)
    assert (await client.evict(namespace_id=cache.namespace_id)).evicted_blocks == 0
    assert (await client.unpin(prefix.key)).blocks == BLOCKS
    assert (await client.evict(key=prefix.key)).evicted_blocks >= 1
    with pytest.raises(NotFoundError):
        await client.inspect(prefix.key)
    for nothing_or_two in ({}, {"key": "ab", "all": True}):
        with pytest.raises(InvalidArgumentError):
            await client.evict(**nothing_or_two)


async def priorities(client: AsyncClient, cache: AsyncCache) -> list[int]:
    """Of the blocks of the only prompt that is cached."""
    (prefix,) = (await client.prefixes(cache.namespace_id)).prefixes
    return [block.priority for block in (await client.inspect(prefix.key)).blocks]


async def test_a_prompt_is_retained_when_it_is_stored_or_later(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS[:4], KV[: 2 * 128], retention=[Retention(7)])
    assert await priorities(client, cache) == [7, 7]
    await cache.store(TOKENS, KV, retention=[Retention(50, 2, 8, ttl_s=3600), Retention(-3, 8)])
    assert await priorities(client, cache) == [7, 50, 50, 50, -3], "those that were cached already too"
    await cache.store(TOKENS, KV, retention=[Retention(9)])  # all of which is cached
    assert await priorities(client, cache) == [9] * 5
    assert await cache.retain(TOKENS, [Retention(0, 0, 4)]) == 3
    assert await priorities(client, cache) == [0, 0, 9, 9, 9]
    assert await cache.retain(TOKENS, []) == 0
    assert await priorities(client, cache) == [0] * 5


async def test_how_long_a_priority_lasts_is_shown(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    await cache.store(TOKENS, KV, retention=[Retention(1, 0, 2, ttl_s=3600), Retention(1, 2, 4)])
    (prefix,) = (await client.prefixes(cache.namespace_id)).prefixes
    first, second, third, *_ = (await client.inspect(prefix.key)).blocks
    assert 3000 < first.priority_s <= 3600
    assert (second.priority, second.HasField("priority_s"), third.priority) == (1, False, 0)


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (Retention(101), "priority 101; it must be between -100 and 100"),
        (Retention(1, 5, 5), "retention.0., for tokens 5 to 5, is no range"),
        (Retention(1, -1), "start_token is -1"),
        (Retention(1, 0, 0), "end_token is 0 .* None for no end"),
        (Retention(1, ttl_s=0), "ttl_s is 0 .* None for no end"),
        (Retention(1, ttl_s=-1), "ttl_s -1.0; it must be a number of seconds"),
        ("keep", "retention has 'keep'; each must be a Retention"),
    ],
)
async def test_a_wish_that_cannot_be_is_refused_and_nothing_is_stored(
    client: AsyncClient, spec: NamespaceSpec, wish: Retention, said: str
) -> None:
    cache = await client.register(spec)
    with pytest.raises(InvalidArgumentError, match=said):
        await cache.store(TOKENS, KV, retention=[wish])
    assert (await cache.match(TOKENS)).blocks == 0
    with pytest.raises(InvalidArgumentError, match=said):
        await cache.retain(TOKENS, [wish])


async def test_too_many_wishes_are_refused(client: AsyncClient, spec: NamespaceSpec) -> None:
    cache = await client.register(spec)
    with pytest.raises(InvalidArgumentError, match="retention has 100 ranges; send at most 64"):
        await cache.retain(TOKENS, [Retention(1)] * 100)


async def test_a_wish_beyond_the_quota_is_refused_and_the_blocks_are_stored(
    client: AsyncClient, spec: NamespaceSpec
) -> None:
    """Without a quota of its own the tenant may retain half of the tiers."""
    (tier,) = [tier for tier in (await client.stats()).tiers if tier.tier == cache_pb2.TIER_CPU]
    part = PartSpec("full", 0, tier.capacity_bytes // 10 // 4096 * 4096)
    cache = await client.register(NamespaceSpec(f"large-{spec.name}", 2, (part,)))
    kv = np.zeros(3 * part.nbytes, np.uint8)
    assert (await cache.store(np.arange(6), kv, retention=[Retention(1)])).committed == 3
    another = np.arange(10, 16)
    stored = await cache.store(another, kv, retention=[Retention(1)])
    assert (stored.committed, stored.dropped) == (3, 0)
    assert "limit tenants.default.retained_bytes" in stored.retention_refused
    assert "limit tenants." in (await cache.store(another, kv, retention=[Retention(1)])).retention_refused
    with pytest.raises(ExhaustedError, match=r"limit tenants\.default\.retained_bytes"):
        await cache.retain(another, [Retention(1)])
    assert (await client.stats()).reservations == 0
    granted = await cache.store(another, kv, retention=[Retention(1, 0, 2)])
    assert (granted.duplicates, granted.retention_refused) == (3, "")
    await client.evict(namespace_id=cache.namespace_id)


def test_the_blocking_client_retains_too(daemon: DaemonProcess, spec: NamespaceSpec) -> None:
    with Client(daemon.address) as client:
        cache = client.register(spec)
        with cache.reserve(TOKENS) as reservation:
            reservation.copy_from(KV)
            reservation.commit(retention=[Retention(5, ttl_s=60)])
        with cache.reserve(TOKENS) as nothing:
            nothing.commit(retention=[Retention(6)])
        assert cache.retain(TOKENS, [Retention(0, 0, 2)]) == BLOCKS - 1
        cache.store(TOKENS, KV, retention=[Retention(7)])
        (prefix,) = client.prefixes(cache.namespace_id).prefixes
        assert {block.priority for block in client.inspect(prefix.key).blocks} == {7}


async def test_lease_and_reservation_are_the_arena_itself(daemon: DaemonProcess, spec: NamespaceSpec) -> None:
    async with AsyncClient(daemon.address) as client, AsyncClient(daemon.address) as reader:
        cache = await client.register(spec)
        async with await cache.reserve(TOKENS) as reservation:
            assert (reservation.first_block, reservation.blocks) == (0, BLOCKS)
            for block in range(BLOCKS):
                reservation.view(block, 0)[:] = bytes([block]) * 96
                reservation.view(block, 1)[:] = bytes([100 + block]) * 32
            assert (await (await reader.register(spec)).match(TOKENS)).blocks == 0
            assert await reservation.commit(3) == StoreResult(3, 0)
            with pytest.raises(LeaseLost, match="released"):
                reservation.view(0)
        async with await (await reader.register(spec)).acquire(TOKENS, first_block=1) as lease:
            assert (lease.first_block, lease.blocks) == (1, 2)
            view = lease.view(1, 1)
            assert view.readonly and view.tobytes() == bytes([102]) * 32
            assert reader.arena is not None and reader.arena.address
            assert lease.offset(1, 1) + 32 <= reader.arena.nbytes
            stats = await client.stats()
            assert {session.leases for session in stats.sessions} >= {1}
        async with await cache.reserve(TOKENS) as given_up:
            assert (given_up.first_block, given_up.blocks) == (3, 2)
        assert (await cache.match(TOKENS)).blocks == 3
        assert (await client.stats()).reservations == 0


@pytest.mark.slow
def test_another_process_reads_what_this_one_stored(daemon: DaemonProcess, spec: NamespaceSpec) -> None:
    reader = textwrap.dedent(
        """
        import sys
        import numpy as np
        from prefixd.client import Client, NamespaceSpec, PartSpec

        address, name = sys.argv[1:]
        spec = NamespaceSpec(name, 2, (PartSpec("full", 0, 96), PartSpec("window", 0, 32)))
        with Client(address, memory="shared") as client:
            cache = client.register(spec)
            with cache.acquire(range(10)) as lease:
                sys.stdout.buffer.write(b"".join(lease.view(b, p) for b in range(lease.blocks) for p in (0, 1)))
        """
    )
    with Client(daemon.address) as client:
        client.register(spec).store(TOKENS, KV)
    done = subprocess.run([sys.executable, "-c", reader, daemon.address, spec.name], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == KV.tobytes()


def test_one_blocking_client_serves_many_threads(daemon: DaemonProcess, spec: NamespaceSpec) -> None:
    problems: list[BaseException] = []

    with Client(daemon.address) as client, Client(daemon.address, memory="streamed") as streamed:

        def work(number: int) -> None:
            try:
                cache = (streamed if number % 3 == 2 else client).register(spec)
                for turn in range(10):
                    tokens = np.array([number, turn, number, turn, 1], np.uint32)
                    kv = np.full(256, number * 16 + turn, np.uint8)
                    assert cache.store(tokens, kv).committed == 2
                    target = np.zeros_like(kv)
                    assert cache.load(tokens, target) == 2
                    assert np.array_equal(target, kv)
            except BaseException as error:
                problems.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert problems == []


@pytest.fixture
def own_daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess({"cpu.bytes": "16MiB", "disk.bytes": "64MiB"}) as running:
        yield running


@pytest.mark.slow
async def test_a_killed_daemon_comes_back_with_what_was_durable(own_daemon: DaemonProcess, spec: NamespaceSpec) -> None:
    async with AsyncClient(own_daemon.address) as client:
        cache = await client.register(spec)
        await cache.store(TOKENS, KV, durable=True)
        lease = await cache.acquire(TOKENS)
        arena = client.arena
        await asyncio.to_thread(own_daemon.kill)
        with pytest.raises(ServerUnavailable):
            await cache.match(TOKENS)
        await until(lambda: client.arena is None)  # the session's end may be heard of later than that of the call
        with pytest.raises(LeaseLost):
            lease.view(0)
        await asyncio.to_thread(own_daemon.start)
        matched = await cache.match(TOKENS)
        assert (matched.blocks, matched.blocks_in(Tier.DISK)) == (BLOCKS, BLOCKS)
        target = np.zeros_like(KV)
        assert await cache.load(TOKENS, target) == BLOCKS
        assert np.array_equal(target, KV)
        assert client.arena is not arena


@pytest.mark.parametrize("memory", ["shared", "streamed"])
@pytest.mark.slow
async def test_durable_covers_what_was_cached_already(
    own_daemon: DaemonProcess, spec: NamespaceSpec, memory: Literal["shared", "streamed"]
) -> None:
    async with AsyncClient(own_daemon.address, memory=memory) as client:
        cache = await client.register(spec)
        await cache.store(TOKENS[:4], KV[:256])
        assert await cache.store(TOKENS[:4], KV[:256], durable=True) == StoreResult(0, 2)
        assert await cache.store(TOKENS[:6], KV[:384]) == StoreResult(1, 2)
        assert await cache.persist(TOKENS) == 3
        assert await cache.store(TOKENS, KV, durable=True) == StoreResult(2, 3)
        await asyncio.to_thread(own_daemon.kill)
        await asyncio.to_thread(own_daemon.start)
        target = np.zeros_like(KV)
        assert await cache.load(TOKENS, target) == BLOCKS
        assert np.array_equal(target, KV)


@pytest.mark.slow
def test_a_dead_client_leaves_nothing_behind(own_daemon: DaemonProcess, spec: NamespaceSpec, tmp_path: Path) -> None:
    holder = textwrap.dedent(
        """
        import os, signal, sys
        from prefixd.client import Client, NamespaceSpec, PartSpec

        address, name = sys.argv[1:]
        spec = NamespaceSpec(name, 2, (PartSpec("full", 0, 96), PartSpec("window", 0, 32)))
        cache = Client(address, name="doomed").register(spec)
        cache.store(range(4), bytes(256))
        lease, reservation = cache.acquire(range(4)), cache.reserve(range(8))
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    done = subprocess.run([sys.executable, "-c", holder, own_daemon.address, spec.name], timeout=60)
    assert done.returncode == -9
    with Client(own_daemon.address) as client:
        wait_until(lambda: not client.stats().sessions)
        stats = client.stats()
        assert (len(stats.sessions), stats.leases, stats.reservations) == (0, 0, 0)
        assert client.register(spec).match(range(8)).blocks == 2


@pytest.mark.slow
async def test_a_draining_daemon_tells_and_refuses(own_daemon: DaemonProcess, spec: NamespaceSpec) -> None:
    async with AsyncClient(own_daemon.address) as client:
        cache = await client.register(spec)
        await cache.store(TOKENS, KV)
        async with await cache.acquire(TOKENS) as lease:
            await client.drain()
            on_disk = {tier.tier: tier.blocks for tier in (await client.stats()).tiers}
            assert on_disk[cache_pb2.TIER_DISK] == BLOCKS
            await until(lambda: client.draining)
            assert lease.view(0).nbytes == 96
        with pytest.raises(ServerUnavailable):
            await cache.store(TOKENS + 100, KV)
        assert (await client.undrain()).was_draining
        await until(lambda: not client.draining)
        await cache.store(TOKENS + 100, KV)
        assert not (await client.undrain()).was_draining


async def test_after_a_commit_that_failed_nothing_here_writes_to_the_slots(
    daemon: DaemonProcess, spec: NamespaceSpec
) -> None:
    async with AsyncClient(daemon.address, memory="shared") as client:
        cache = await client.register(spec)
        reservation = await cache.reserve(TOKENS)
        view = reservation.view(0)
        await reservation.copy_from(KV)
        with pytest.raises(PreconditionError, match="without a disk tier"):
            await reservation.commit(durable=True)
        with pytest.raises(LeaseLost):
            await reservation.copy_from(KV)
        with pytest.raises(ValueError, match="released memoryview"):
            view[0] = 1
        assert (await cache.match(TOKENS)).blocks == 0
        assert (await client.stats()).reservations == 0
        assert await cache.store(TOKENS, KV) == StoreResult(BLOCKS, 0)
