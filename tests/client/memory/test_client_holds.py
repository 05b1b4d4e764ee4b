"""Leases and reservations from the client's side: renewed, durable, and given up for certain; against a stand-in."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest

from prefixd.client import AsyncClient, CallTimeout, LeaseLost, NamespaceSpec, PreconditionError, StoreResult
from prefixd.client.memory import leases
from tests.waiting import until

TOKENS = [1, 2, 3, 4, 5]


async def test_a_renewed_lease_is_counted_from_before_the_question(stand_in: Any, spec: NamespaceSpec) -> None:
    now = [100.0]
    stand_in.ttl_s = 5.0
    async with AsyncClient(stand_in.address, clock=lambda: now[0]) as client:
        cache = await client.register(spec)
        lease, reservation = await cache.acquire(TOKENS), await cache.reserve(TOKENS)
        now[0] = 104.0
        await client.renew([lease, reservation], 10.0)
        assert (lease.remaining_s, reservation.remaining_s) == (10.0, 10.0)
        stand_in.failures["Renew"] = (grpc.StatusCode.NOT_FOUND, "it was released")
        with pytest.raises(LeaseLost, match="it was released"):
            await lease.renew(2.0)
        assert lease.remaining_s == 10.0
        stand_in.failures.clear()
        stand_in.gates["Renew"] = asyncio.Event()
        shorter = asyncio.create_task(lease.renew(2.0))
        await until(lambda: stand_in.entered.count("Renew") >= 3)
        assert lease.remaining_s == 2.0, "the daemon may have heard of it already"
        stand_in.gates["Renew"].set()
        await shorter
        assert lease.remaining_s == 2.0
        now[0] = 106.0
        with pytest.raises(LeaseLost, match="expired"):
            await lease.renew()
        await reservation.release()
        with pytest.raises(LeaseLost, match="released"):
            await reservation.renew()


@pytest.mark.parametrize("method", ["Acquire", "Reserve"])
async def test_what_is_granted_to_a_caller_that_gave_up_is_given_back(
    stand_in: Any, spec: NamespaceSpec, method: str
) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        ask = cache.acquire if method == "Acquire" else cache.reserve
        stand_in.gates[method] = asyncio.Event()
        patient_s, client.connection.timeout_s = client.connection.timeout_s, 0.5
        with pytest.raises(CallTimeout):
            await ask(TOKENS)
        client.connection.timeout_s = patient_s
        cancelled = asyncio.create_task(ask(TOKENS))
        await until(lambda: stand_in.entered.count(method) >= 2)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert stand_in.released == []
        stand_in.gates[method].set()
        await until(lambda: len(stand_in.released) >= 2)


async def test_durable_is_said_only_of_what_is_on_disk(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        stand_in.nothing_to_reserve = True
        stand_in.persisted = 2
        assert await cache.store(TOKENS, bytes(256)) == StoreResult(0, 2)
        assert "Persist" not in stand_in.entered
        assert await cache.store(TOKENS, bytes(256), durable=True) == StoreResult(0, 2)
        assert await (await cache.reserve(TOKENS)).commit(durable=True) == StoreResult(0, 0)
        stand_in.persisted = 1  # the other one was evicted meanwhile
        assert await cache.store(TOKENS, bytes(256), durable=True) == StoreResult(0, 1, 1)
        with pytest.raises(PreconditionError, match="only 1 of the prompt's 2 blocks are on disk"):
            await (await cache.reserve(TOKENS)).commit(durable=True)


async def test_the_daemon_is_told_when_nothing_writes_into_a_lost_reservation(
    stand_in: Any, spec: NamespaceSpec
) -> None:
    now = [100.0]
    stand_in.ttl_s = 5.0
    async with AsyncClient(stand_in.address, clock=lambda: now[0]) as client:
        cache = await client.register(spec)
        expired, lost = await cache.reserve(TOKENS), await cache.reserve(TOKENS)
        lease = await cache.acquire(TOKENS)
        now[0] = 105.0
        with pytest.raises(LeaseLost, match="expired"):
            async with expired:
                await expired.copy_from(bytes(256))
        assert stand_in.released == ["reservation"]
        stand_in.end_sessions()
        await until(lambda: client.arena is None)
        stand_in.failures["Release"] = (grpc.StatusCode.NOT_FOUND, "its session ended")
        with pytest.raises(LeaseLost):
            await lease.release()
        before = stand_in.entered.count("Release")
        await lost.release()
        await lost.release()
        await expired.release()
        assert stand_in.entered.count("Release") == before + 1
        assert stand_in.opened == 2, "in a new session"
        failed = await cache.reserve(TOKENS)
        stand_in.failures["Commit"] = (grpc.StatusCode.NOT_FOUND, "its time was up")
        with pytest.raises(LeaseLost, match="its time was up"):
            await failed.commit()
        assert stand_in.entered.count("Release") == before + 2
        del stand_in.failures["Release"]
        open_at_the_end, committed = await cache.reserve(TOKENS), await cache.reserve(TOKENS)
        del stand_in.failures["Commit"]
        await committed.commit()
        await committed.release()
    assert stand_in.released == ["reservation"] * 2, "the one that was open when the client was closed"
    assert open_at_the_end.remaining_s == 0


@pytest.mark.parametrize("end", ["release", "commit", "close"])
async def test_nothing_is_given_up_while_a_copy_is_under_way(
    stand_in: Any, spec: NamespaceSpec, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    client = AsyncClient(stand_in.address)
    cache = await client.register(spec)
    reservation = await cache.reserve(TOKENS)
    copying, may_end = asyncio.Event(), asyncio.Event()

    async def copy(*_: object) -> None:
        copying.set()
        await may_end.wait()

    monkeypatch.setattr(client.copier, "copy", copy)
    copied = asyncio.create_task(reservation.copy_from(bytes(256)))
    await copying.wait()
    ways = {"release": reservation.release, "commit": reservation.commit, "close": client.close}
    ending = asyncio.create_task(ways[end]())
    await asyncio.sleep(0.05)  # time in which it would be told
    assert not {"Release", "Commit"} & set(stand_in.entered)
    may_end.set()
    await copied
    await ending
    await client.close()
    assert ("Commit" if end == "commit" else "Release") in stand_in.entered


async def test_slots_that_the_caller_fills_itself_are_not_given_up_by_closing_the_client(
    stand_in: Any, spec: NamespaceSpec
) -> None:
    client = AsyncClient(stand_in.address)
    reservation = await (await client.register(spec)).reserve(TOKENS)
    with reservation.copying():
        closing = asyncio.create_task(client.close())
        while not client._closed:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert stand_in.released == [] and not closing.done()
    await closing
    assert stand_in.released == ["reservation"]
    with pytest.raises(LeaseLost), reservation.copying():
        pass


@pytest.mark.parametrize("piece_s", [1.0, 20.0, 29.0])
async def test_a_store_of_many_blocks_takes_as_long_as_it_takes(
    stand_in: Any, spec: NamespaceSpec, monkeypatch: pytest.MonkeyPatch, piece_s: float
) -> None:
    """The reservation of 60 s is renewed between pieces of the copy: 25 of them, 29 s each."""
    monkeypatch.setattr(leases, "_PIECE_BLOCKS", 8)
    now = [100.0]
    blocks, source = 200, np.arange(200 * 128, dtype=np.uint32).astype(np.uint8)
    async with AsyncClient(stand_in.address, clock=lambda: now[0]) as client:
        cache = await client.register(spec)
        copy = client.copier.copy

        async def slow(pairs: Any, check: Any) -> None:
            await copy(pairs, check)
            now[0] += piece_s

        monkeypatch.setattr(client.copier, "copy", slow)
        assert await cache.store(range(2 * blocks), source) == StoreResult(blocks, 0)
        pieces = blocks // 8
        assert now[0] == 100.0 + pieces * piece_s
        assert stand_in.entered.count("Renew") == (0 if piece_s == 1.0 else pieces // 2)
        back = np.zeros_like(source)
        piece_s = 0.0
        assert await cache.load(range(2 * blocks), back) == blocks and (back == source).all()
        piece_s = 31.0  # a copy under a reservation of the caller's own is for him to keep in time
        reservation = await cache.reserve(range(2 * blocks))
        with pytest.raises(LeaseLost, match="expired: renew it in time"):
            await reservation.copy_from(source)
        await reservation.release()
