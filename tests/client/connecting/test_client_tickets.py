"""A daemon that does not know its clients' tickets: replaced, or its clock was set. Against a stand-in behind the
daemon's own door."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.base.tenancy.tenants import Tenants
from prefixd.client import (
    AsyncCache,
    AsyncClient,
    Client,
    NamespaceSpec,
    PartSpec,
    PermissionDeniedError,
    Unauthenticated,
)
from prefixd.client.connecting.connection import Connection
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.identities import Identities
from prefixd.server.access.local_credentials import LocalCredentials, LocalProcess
from prefixd.server.rpc.call_limits import CallLimits
from prefixd.server.rpc.door import Door
from prefixd.server.rpc.sockets.memory_listener import MemoryListener
from prefixd.settings import Settings
from prefixd.v1 import cache_pb2 as pb
from tests.client.conftest import StandIn
from tests.waiting import until

TOKENS = [1, 2, 3, 4, 5]
SPEC = NamespaceSpec("tickets", 2, (PartSpec("full", 0, 128),))


class Guarded:
    """A stand-in that asks for tickets, as a daemon does where users of its host belong to tenants."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1e6
        self.boot = b"first boot"
        loaded = Settings.load(None, {"tenants.acme.uids": "64001"}, {})
        tenants = Tenants(loaded.quotas)
        self._identities = Identities(loaded.server, loaded.tenants, tenants, None, self._fresh())
        guard = Door(self._identities, CallLimits(tenants, 4), AuditLog(None), "unix")
        self.stand_in = StandIn(folder, guard)
        self.issued = 0
        self.door = MemoryListener(folder / "s-memory", -1, 0, lambda session: False, ticket=self._issue)

    def _fresh(self) -> LocalCredentials:
        self.tickets = LocalCredentials(lambda: self.now_s, self.boot)
        return self.tickets

    def _issue(self, uid: int, pid: int) -> str:
        self.issued += 1
        return self.tickets.issue(LocalProcess(uid, pid))

    def lose_key(self) -> None:
        """As a daemon that was started with another data directory."""
        self._identities._credentials = self._fresh()

    async def start(self) -> None:
        await self.stand_in.start()
        await self.door.start()

    async def stop(self) -> None:
        await self.door.close()
        await self.stand_in.stop()

    async def replace(self, connection: Connection) -> None:
        """Another daemon at the same address, which knows nothing of this one's sessions and tickets.

        It starts when the client of `connection` has heard of the first one's end: a call that is made before that is
        one to the first, and may fail.
        """
        await self.stop()
        await until(lambda: connection._channel.get_state() is not grpc.ChannelConnectivity.READY)
        self.lose_key()
        await self.start()


@pytest.fixture
async def guarded(folder: Path) -> AsyncIterator[Guarded]:
    guarded = Guarded(folder)
    await guarded.start()
    yield guarded
    await guarded.stop()
    os.close(guarded.stand_in.fd)


async def _load(cache: AsyncCache) -> None:
    assert await cache.load(TOKENS, bytearray(256)) == 2


async def _store(cache: AsyncCache) -> None:
    assert (await cache.store(TOKENS, bytes(256))).dropped == 0


async def _renew(cache: AsyncCache) -> None:
    async with await cache.acquire(TOKENS) as lease:
        await lease.renew()


CALLS: dict[str, tuple[Any, Callable[[AsyncCache], Awaitable[Any]]]] = {
    "Match": ("shared", lambda cache: cache.match(TOKENS)),
    "Prefetch": ("shared", lambda cache: cache.prefetch(TOKENS)),
    "Persist": ("shared", lambda cache: cache.persist(TOKENS)),
    "Retain": ("shared", lambda cache: cache.retain(TOKENS, ())),
    "Acquire": ("shared", _load),
    "Reserve": ("shared", _store),
    "Renew": ("shared", _renew),
    "Get": ("streamed", _load),
    "Put": ("streamed", _store),
}


@pytest.mark.parametrize("method", CALLS)
async def test_a_refused_ticket_is_fetched_anew_and_the_call_made_again(guarded: Guarded, method: str) -> None:
    """In the open session: its stream and its leases live on."""
    stand_in = guarded.stand_in
    memory, call = CALLS[method]
    stand_in.get_blocks, stand_in.get_data = 2, [bytes(256)]
    async with AsyncClient(stand_in.address, memory=memory) as client:
        cache = await client.register(SPEC)
        stand_in.entered.clear()
        guarded.lose_key()
        await call(cache)
        assert stand_in.entered.count(method) == 1 and stand_in.opened == 1
        assert guarded.issued == 2 and client.connection.tickets_refused == 1


async def test_an_upload_that_is_refused_is_sent_again_whole(guarded: Guarded) -> None:
    connection = Connection(guarded.stand_in.address, 30.0)
    await connection.call(connection.cache.Match, pb.MatchRequest())
    guarded.lose_key()
    rest = iter([pb.PutRequest(data=b"abc"), pb.PutRequest(data=b"def")])
    header = pb.PutHeader(token_ids=bytes(8))
    guarded.stand_in._spec = pb.Namespace(block_tokens=1)
    await connection.upload(connection.cache.Put, pb.PutRequest(header=header), rest)
    assert guarded.stand_in.put_data == b"abcdef"
    await connection.close()


async def test_what_a_stream_has_begun_is_not_begun_again(guarded: Guarded) -> None:
    """Refused at its first message it is; one that fails later is not."""
    stand_in = guarded.stand_in
    stand_in.get_blocks, stand_in.get_data = 1, [b"x"]
    connection = Connection(stand_in.address, 30.0)

    async def get() -> list[Any]:
        async with aclosing(connection.stream(connection.cache.Get, pb.GetRequest())) as messages:
            return [message async for message in messages]

    assert len(await get()) == 2
    guarded.lose_key()
    assert len(await get()) == 2 and stand_in.entered.count("Get") == 2
    stand_in.refuse_after_data = True
    with pytest.raises(Unauthenticated):
        await get()
    assert stand_in.entered.count("Get") == 3
    await connection.close()


@pytest.mark.parametrize("made", ["async", "sync"])
async def test_a_replaced_daemon_is_used_at_once(guarded: Guarded, made: str) -> None:
    stand_in = guarded.stand_in
    if made == "sync":
        client = Client(stand_in.address)
        cache = await asyncio.to_thread(client.register, SPEC)
        await guarded.replace(client._inner.connection)
        assert (await asyncio.to_thread(cache.match, TOKENS)).blocks == 1
        await asyncio.to_thread(client.close)
    else:
        async with AsyncClient(stand_in.address) as other:
            registered = await other.register(SPEC)
            await guarded.replace(other.connection)
            assert (await registered.match(TOKENS)).blocks == 1
    assert stand_in.registered == [SPEC.name] * 2 and guarded.issued == 2


async def test_calls_that_are_refused_together_fetch_one_ticket(guarded: Guarded) -> None:
    async with AsyncClient(guarded.stand_in.address) as client:
        cache = await client.register(SPEC)
        guarded.lose_key()
        await asyncio.gather(*(cache.match(TOKENS) for _ in range(50)))
        assert guarded.issued == 2


async def test_a_caller_who_is_refused_whatever_it_shows_is_told_so(guarded: Guarded) -> None:
    """The door gives tickets that the socket does not take: two attempts, not more."""
    async with AsyncClient(guarded.stand_in.address) as client:
        cache = await client.register(SPEC)
        guarded.lose_key()
        others = LocalCredentials(lambda: guarded.now_s, b"another daemon's")
        guarded.door._ticket = lambda uid, pid: others.issue(LocalProcess(uid, pid))
        with pytest.raises(Unauthenticated, match="none of this daemon's tickets"):
            await cache.match(TOKENS)
        await guarded.door.close()  # no door at all: what was refused is not shown once more
        with pytest.raises(Unauthenticated, match="none of this daemon's tickets"):
            await cache.match(TOKENS)
        assert "Match" not in guarded.stand_in.entered


STEPS = st.one_of(
    st.tuples(st.just("clock"), st.floats(-30 * 86400, 30 * 86400)),
    st.tuples(st.just("client clock"), st.floats(0, 2 * 86400)),
    st.tuples(st.sampled_from(["lose key", "boot", "replace", "call", "renew"]), st.just(0.0)),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_no_step_of_a_clock_and_no_other_daemon_is_seen_by_a_caller(steps: list[tuple[str, float]]) -> None:
    """Whatever becomes of the daemon's clock and key: every call has its answer, and a lease that the daemon still has
    is renewed."""

    async def play(folder: Path) -> None:
        guarded, client_s = Guarded(folder), 0.0
        await guarded.start()
        client = AsyncClient(guarded.stand_in.address, clock=lambda: client_s)
        cache = await client.register(SPEC)
        try:
            for what, seconds in [*steps, ("call", 0.0)]:
                match what:
                    case "clock":
                        guarded.now_s = max(0.0, guarded.now_s + seconds)
                    case "client clock":
                        client_s += seconds
                    case "lose key":
                        guarded.lose_key()
                    case "boot":
                        guarded.boot, guarded.now_s = os.urandom(8), 10.0
                        guarded.lose_key()
                    case "replace":
                        await guarded.replace(client.connection)
                    case "renew":
                        async with await cache.acquire(TOKENS) as lease:
                            guarded.now_s = max(0.0, guarded.now_s - 2 * 86400)
                            guarded.lose_key()
                            await lease.renew()
                    case _:
                        assert (await cache.match(TOKENS)).blocks == 1
        finally:
            await client.close()
            await guarded.stop()
            os.close(guarded.stand_in.fd)

    with tempfile.TemporaryDirectory(prefix="prefixd-") as name:
        asyncio.run(play(Path(name)))


async def test_no_other_refusal_is_asked_again(guarded: Guarded) -> None:
    async with AsyncClient(guarded.stand_in.address) as client:
        cache = await client.register(SPEC)
        guarded.stand_in.failures["Match"] = (grpc.StatusCode.PERMISSION_DENIED, "not yours")
        with pytest.raises(PermissionDeniedError, match="not yours") as caught:
            await cache.match(TOKENS)
        assert not isinstance(caught.value, Unauthenticated)
        assert guarded.stand_in.entered.count("Match") == 1 and guarded.issued == 1
