"""A stream of Put holds one window, and ends when its client falls silent; time is simulated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, NotFoundError, TooSlowError
from prefixd.cache import (
    BlockChain,
    Namespace,
    NamespaceSpec,
    PartSpec,
    Reservation,
    Session,
    TieredCache,
)
from prefixd.cache.options import CacheOptions
from prefixd.cache.sessions.reservations import ToFill
from prefixd.observability.request_log import RequestLog
from prefixd.planner.simulation.event_loop import SimulatedTimeLoop
from prefixd.server.rpc.receiving import CURRENT_CALL, Call
from prefixd.server.rpc.status import abort
from prefixd.server.services import cache_service, put_stream
from prefixd.server.services.call_records import CallRecords
from prefixd.server.services.put_stream import Put
from prefixd.v1 import cache_pb2 as pb
from prefixd.v1 import cache_pb2_grpc
from tests.rig import OpenCache
from tests.tries import match_rows
from tests.waiting import until

T = TypeVar("T")
MIB = 1 << 20
BLOCK = 1 * MIB
WINDOW = put_stream.WINDOW_BYTES // BLOCK


class House(OpenCache):
    """A cache of 48 blocks of 1 MiB, and a client of it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(cpu_bytes=48 * BLOCK, clock=clock, options=CacheOptions(reserved_bytes=48 * BLOCK))
        assert self.arena is not None
        self.pages = self.arena.pages
        self.session: Session = self.cache.leases.open("client", 1, 0.0, self.cache.tenants.default)
        self.namespace: Namespace = self.cache.register(NamespaceSpec("n", 1, (PartSpec("g", 0, BLOCK),)))
        self.session.namespaces[self.namespace.id] = self.namespace

    def header(self, blocks: int, **more: Any) -> pb.PutRequest:
        tokens = np.arange(blocks, dtype="<u4").tobytes()
        named = {"session_id": self.session.id, "namespace_id": self.namespace.id, "token_ids": tokens}
        return pb.PutRequest(header=pb.PutHeader(**named, **more))

    async def put(self, messages: AsyncIterator[pb.PutRequest]) -> pb.PutResponse:
        """As the service does."""
        CURRENT_CALL.set(Call(None))
        log = RequestLog(self.cache.clock)
        put = Put(self.cache, self.cache.leases.session, messages, CallRecords(self.cache, log))
        try:
            await put.begin()
            return await put.store()
        finally:
            put.give_back()

    @property
    def reserved(self) -> int:
        """Blocks."""
        return self.cache.leases.count(Reservation) and self.pages.slots_used - self.cached

    @property
    def cached(self) -> int:
        chain = self.cache.chain(self.namespace, np.arange(64, dtype="<u4").tobytes())
        return len(match_rows(self.cache.trie(self.namespace), self.namespace.root, chain))

    def check(self) -> None:
        super().check()
        assert not self.cache.leases.count(Reservation)
        assert self.pages.slots_used == self.cached


def simulate(work: Callable[[House], Coroutine[Any, Any, T]]) -> T:
    async def housed() -> T:
        async with House(asyncio.get_running_loop().time) as house:
            return await work(house)

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(housed())


async def pieces(nbytes: int, piece: int = MIB, every_s: float = 0.0) -> AsyncIterator[pb.PutRequest]:
    for start in range(0, nbytes, piece):
        await asyncio.sleep(every_s)
        yield pb.PutRequest(data=bytes(min(piece, nbytes - start)))


def test_a_header_alone_reserves_a_window_and_loses_it() -> None:
    async def work(house: House) -> None:
        async def silent() -> AsyncIterator[pb.PutRequest]:
            yield house.header(40)
            await asyncio.sleep(put_stream.SILENCE_S - 1)
            assert house.reserved == WINDOW
            await asyncio.sleep(3600)

        with pytest.raises(TooSlowError, match=r"given up after 0 bytes \(silent for 30 s\).*send what is not cached"):
            await house.put(silent())
        assert asyncio.get_running_loop().time() < 60

    simulate(work)


def test_a_call_without_a_header_ends() -> None:
    async def work(house: House) -> None:
        async def silent() -> AsyncIterator[pb.PutRequest]:
            await asyncio.sleep(3600)
            yield house.header(1)

        with pytest.raises(TooSlowError, match="silent"):
            await house.put(silent())

    simulate(work)


def test_a_trickle_is_given_up_and_what_came_before_stays() -> None:
    async def work(house: House) -> None:
        async def trickle() -> AsyncIterator[pb.PutRequest]:
            yield house.header(40)
            async for piece in pieces(WINDOW * BLOCK + 5):
                yield piece
            async for piece in pieces(3600, 1, every_s=20.0):
                yield piece

        with pytest.raises(TooSlowError, match=r"less than 100000 bytes a second"):
            await house.put(trickle())
        assert house.cached == WINDOW
        nbytes = WINDOW * BLOCK
        assert asyncio.get_running_loop().time() <= put_stream.SILENCE_S + nbytes / put_stream.LEAST_BYTES_PER_S + 1

    simulate(work)


@pytest.mark.parametrize("piece", [MIB, 100_000, 3_333_333])
def test_a_megabit_a_second_is_fast_enough(piece: int) -> None:
    async def work(house: House) -> tuple[int, int]:
        async def slow() -> AsyncIterator[pb.PutRequest]:
            yield house.header(40)
            async for message in pieces(40 * BLOCK, piece, every_s=8 * piece / 1e6):
                yield message

        answer = await house.put(slow())
        return answer.committed, answer.duplicates

    assert simulate(work) == (40, 0)


def test_every_byte_lands_where_it_belongs_whatever_the_messages_are() -> None:
    async def work(house: House) -> None:
        content = np.random.default_rng(1).integers(0, 256, 40 * BLOCK, np.uint8)

        async def stream(first: int, blocks: int, piece: int) -> AsyncIterator[pb.PutRequest]:
            yield house.header(blocks, first_block=first)
            for start in range(first * BLOCK, blocks * BLOCK, piece):
                yield pb.PutRequest(data=b"")
                yield pb.PutRequest(data=content[start : min(start + piece, blocks * BLOCK)].tobytes())

        for first, blocks, piece, committed, duplicates in ((0, 5, 777_777, 5, 0), (2, 40, 5_000_001, 35, 3)):
            answer = await house.put(stream(first, blocks, piece))
            assert (answer.committed, answer.duplicates) == (committed, duplicates)
        chain = house.cache.chain(house.namespace, np.arange(40, dtype="<u4").tobytes())
        lease = await house.cache.acquire(house.session, house.namespace, chain)
        assert lease is not None and len(lease.rows) == 40
        for block, (slot,) in enumerate(house.cache.offsets(lease, [0]).tolist()):
            assert np.array_equal(house.arena.array(slot, BLOCK), content[block * BLOCK : (block + 1) * BLOCK])
        house.cache.release(house.session, lease.id)

    simulate(work)


@pytest.mark.parametrize(
    ("blocks", "more", "cached"),
    [(5, -1, 0), (5, 1, 0), (WINDOW, -BLOCK, 0), (40, -1, 2 * WINDOW), (40, 9, 2 * WINDOW)],
)
def test_of_a_stream_of_the_wrong_length_whole_windows_stay(blocks: int, more: int, cached: int) -> None:
    async def work(house: House) -> None:
        async def stream() -> AsyncIterator[pb.PutRequest]:
            yield house.header(blocks)
            async for piece in pieces(blocks * BLOCK + more):
                yield piece

        nbytes = blocks * BLOCK
        wrong = f"had {nbytes + more} bytes, but {blocks} blocks of {BLOCK} bytes are {nbytes}; send whole blocks"
        with pytest.raises(InvalidArgumentError, match=wrong):
            await house.put(stream())
        assert house.cached == cached

    simulate(work)


def test_what_there_is_no_room_for_is_read_and_dropped() -> None:
    async def work(house: House) -> None:
        async def stream(blocks: int) -> AsyncIterator[pb.PutRequest]:
            yield house.header(blocks)
            async for piece in pieces(blocks * BLOCK):
                yield piece

        answer = await house.put(stream(64))
        assert (answer.committed, answer.duplicates, house.cached) == (48, 0, 48)
        chain = house.cache.chain(house.namespace, np.arange(48, dtype="<u4").tobytes())
        lease = await house.cache.acquire(house.session, house.namespace, chain)
        assert lease is not None
        with pytest.raises(ExhaustedError, match="no room"):
            await house.put(stream(64))
        house.cache.release(house.session, lease.id)

    simulate(work)


def test_a_stream_ends_with_its_session_and_with_its_caller() -> None:
    async def work(house: House) -> None:
        filling = asyncio.Event()

        async def stream() -> AsyncIterator[pb.PutRequest]:
            yield house.header(20)
            yield pb.PutRequest(data=bytes(3))
            filling.set()
            await asyncio.sleep(1)
            async for piece in pieces(20 * BLOCK - 3):
                yield piece

        caller = asyncio.create_task(house.put(stream()))
        await filling.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert house.pages.slots_used == 0
        filling.clear()
        ended = asyncio.create_task(house.put(stream()))
        await filling.wait()
        (grant,) = house.session.grants.values()
        assert isinstance(grant, Reservation)
        lost = {slot for (slot,) in grant.slots.tolist()}
        house.cache.leases.close(house.session)
        other = house.cache.leases.open("other", 2, 0.0, house.session.tenant)
        chain = house.cache.chain(house.namespace, np.full(24, 9, "<u4").tobytes())
        reservation = await house.cache.reserve(other, house.namespace, chain)
        assert isinstance(reservation, Reservation)
        assert lost <= {slot for (slot,) in reservation.slots.tolist()}
        house.arena.array(0, 48 * BLOCK)[:] = 1
        with pytest.raises(NotFoundError, match="its session ended"):
            await ended
        assert house.arena.array(0, 48 * BLOCK).all(), "its slots are another's now"
        house.cache.release(other, reservation.id)

    simulate(work)


def test_a_prompt_whose_beginning_has_gone_is_stored_no_further() -> None:
    async def work(house: House) -> None:
        async def stream() -> AsyncIterator[pb.PutRequest]:
            yield house.header(40)
            async for piece in pieces(39 * BLOCK):
                yield piece
            assert not cache.leases.count(Reservation), "while the rest is read"
            yield pb.PutRequest(data=bytes(BLOCK))

        cache = house.cache
        reserve = cache.reserve

        async def evicted(session: Session, namespace: Namespace, chain: BlockChain, asked: ToFill) -> Any:
            if asked.first_block == 2 * WINDOW:  # as for a prompt of which nothing is cached any more
                chain = cache.chain(namespace, np.full(40, 7, "<u4").tobytes())
            return await reserve(session, namespace, chain, asked)

        cache.reserve = evicted  # type: ignore[method-assign]
        answer = await house.put(stream())
        assert (answer.committed, answer.duplicates) == (2 * WINDOW, 0)

    simulate(work)


async def test_a_reader_that_does_not_read_loses_its_lease(
    cache: TieredCache, cache_server: grpc.aio.Server, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_service, "_UNREAD_S", 2.0)
    monkeypatch.setattr(cache_service, "PIECE_BYTES", 1 << 16)
    told = asyncio.Event()

    async def tell(context: Any, error: Exception) -> None:
        try:
            await abort(context, error)
        finally:
            told.set()

    monkeypatch.setattr(cache_service, "abort", tell)
    cache_server.add_insecure_port(f"unix:{tmp_path}/s")
    await cache_server.start()
    options = [("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"unix:{tmp_path}/s", options=options) as channel:
        stub: Any = cache_pb2_grpc.PrefixCacheStub(channel)
        events = stub.OpenSession(pb.OpenSessionRequest())
        session = (await events.read()).opened.session_id
        wanted = pb.Namespace(name="n", block_tokens=1, parts=[pb.Part(group="g", nbytes=480 << 10)])
        register = pb.RegisterNamespaceRequest(session_id=session, namespace=wanted)
        named = {
            "session_id": session,
            "namespace_id": (await stub.RegisterNamespace(register)).namespace_id,
            "token_ids": bytes(4),
        }
        await stub.Put(iter([pb.PutRequest(header=pb.PutHeader(**named)), pb.PutRequest(data=bytes(480 << 10))]))
        stalled = stub.Get(pb.GetRequest(**named))
        assert (await stalled.read()).header.blocks == 1
        await until(lambda: not cache.leases.sessions[session].grants)
        with suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await told.wait()
        assert not told.is_set(), "what is not read stays in memory, so the call is not over"
        with pytest.raises(grpc.aio.AioRpcError, match=r"DEADLINE_EXCEEDED(.|\n)*not read for 2 s"):
            while await stalled.read() is not grpc.aio.EOF:
                pass
        data = [message.data async for message in stub.Get(pb.GetRequest(**named))]
        assert b"".join(data) == bytes(480 << 10), "who reads gets all"
        events.cancel()
