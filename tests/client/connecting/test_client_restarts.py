"""A daemon that was restarted: the next call finds it, whenever its client hears of that; against a stand-in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import pytest

from prefixd.client import AsyncCache, AsyncClient, LeaseLost, NamespaceSpec, ServerUnavailable
from tests.waiting import until

TOKENS = [1, 2, 3, 4, 5]


async def test_a_restarted_daemon_is_found_again(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        lease = await cache.acquire(TOKENS)
        await stand_in.stop()
        with pytest.raises(ServerUnavailable):
            await cache.match(TOKENS)
        with pytest.raises(LeaseLost):
            await lease.release()
        await until(lambda: client.arena is None)  # the session's end may be heard of later than that of the call
        await stand_in.start()
        assert (await cache.match(TOKENS)).blocks == 1
        assert stand_in.registered == [spec.name] * 2


async def _load(cache: AsyncCache) -> None:
    assert await cache.load(TOKENS, bytearray(256)) == 2


async def _store(cache: AsyncCache) -> None:
    assert (await cache.store(TOKENS, bytes(256))).dropped == 0


CALLS: dict[str, tuple[Literal["shared", "streamed"], Callable[[AsyncCache], Awaitable[Any]]]] = {
    "Match": ("shared", lambda cache: cache.match(TOKENS)),
    "Prefetch": ("shared", lambda cache: cache.prefetch(TOKENS)),
    "Persist": ("shared", lambda cache: cache.persist(TOKENS)),
    "Acquire": ("shared", _load),
    "Reserve": ("shared", _store),
    "Get": ("streamed", _load),
    "Put": ("streamed", _store),
}


@pytest.mark.parametrize("method", CALLS)
async def test_a_daemon_that_does_not_know_the_session_is_asked_again_in_a_new_one(
    stand_in: Any, spec: NamespaceSpec, method: str
) -> None:
    """The answer of a daemon restarted meanwhile can be here before the end of the session's stream."""
    memory, call = CALLS[method]
    stand_in.get_blocks, stand_in.get_data = 2, [bytes(256)]
    async with AsyncClient(stand_in.address, memory=memory) as client:
        cache = await client.register(spec)
        stand_in.restarts[method] = 1
        await call(cache)
        assert (stand_in.opened, stand_in.registered) == (2, [spec.name] * 2)
        assert stand_in.entered.count(method) == 2
        stand_in.restarts["RegisterNamespace"] = 1  # as early as in the new session's first call
        stand_in.restarts[method] = 1
        with pytest.raises(ServerUnavailable, match="restarted twice during one call: session stand-in is not open"):
            await call(cache)
        await call(cache)
    assert method != "Put" or stand_in.put_data == bytes(128)  # one block was cached


async def test_a_daemon_restarted_before_a_namespace_is_registered_is_asked_again(
    stand_in: Any, spec: NamespaceSpec
) -> None:
    stand_in.restarts["RegisterNamespace"] = 1
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        assert (await cache.match(TOKENS)).blocks == 1
        assert (stand_in.opened, stand_in.registered) == (2, [spec.name])


async def test_a_hold_of_a_session_that_the_daemon_does_not_know_is_lost(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        lease = await cache.acquire(TOKENS)
        stand_in.restarts["Match"] = 1
        await cache.match(TOKENS)
        with pytest.raises(LeaseLost, match="session stand-in is not open"):
            lease.view(0)
        reservation = await cache.reserve(TOKENS)
        stand_in.restarts |= {"Commit": 1, "Release": 1}
        with pytest.raises(LeaseLost, match="session stand-in is not open"):
            await reservation.commit()
        assert stand_in.released == ["reservation"]  # told in a new session
