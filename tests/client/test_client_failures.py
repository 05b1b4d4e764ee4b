"""What a caller sees when the daemon refuses, breaks off, or goes away; against a stand-in that does so on command."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from prefixd.base.errors import TooSlowError
from prefixd.client import (
    AlreadyExistsError,
    AsyncClient,
    CallTimeout,
    Client,
    ClientClosed,
    ClientError,
    ExhaustedError,
    InvalidArgumentError,
    LeaseLost,
    MemoryUnavailable,
    NamespaceSpec,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    ServerError,
    ServerUnavailable,
    UnsupportedError,
)
from prefixd.client.connecting.connection import Connection
from prefixd.client.inference import event_from_proto
from prefixd.client.memory.copying import Copier
from prefixd.v1 import cache_pb2, cache_pb2_grpc, inference_pb2
from tests.waiting import until

TOKENS = [1, 2, 3, 4, 5]


async def test_a_daemon_that_is_not_there_is_named_once_with_the_reason(tmp_path: Path) -> None:
    async with AsyncClient(f"unix:{tmp_path}/p.sock") as client:
        with pytest.raises(ServerUnavailable) as caught:
            await client.stats()
    assert str(caught.value) == f"no answer from the daemon at unix:{tmp_path}/p.sock: No such file or directory"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidArgumentError),
        (grpc.StatusCode.NOT_FOUND, NotFoundError),
        (grpc.StatusCode.ALREADY_EXISTS, AlreadyExistsError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ExhaustedError),
        (grpc.StatusCode.FAILED_PRECONDITION, PreconditionError),
        (grpc.StatusCode.UNIMPLEMENTED, UnsupportedError),
        (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
        (grpc.StatusCode.UNAVAILABLE, ServerUnavailable),
        (grpc.StatusCode.CANCELLED, ServerUnavailable),
        (grpc.StatusCode.INTERNAL, ServerError),
    ],
    ids=lambda value: getattr(value, "name", None),
)
async def test_a_status_becomes_an_error_with_the_daemons_words(
    stand_in: Any, spec: NamespaceSpec, code: grpc.StatusCode, kind: type[ClientError]
) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        stand_in.failures["Match"] = (code, "because of the weather")
        with pytest.raises(kind, match="because of the weather") as caught:
            await cache.match(TOKENS)
        assert type(caught.value) is kind
        del stand_in.failures["Match"]
        assert (await cache.match(TOKENS)).blocks == 1


async def test_a_stream_that_the_daemon_gave_up_keeps_its_words(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        stand_in.aborts["Match"] = TooSlowError("silent for 30 s")
        with pytest.raises(CallTimeout, match=r"^silent for 30 s$"):
            await cache.match(TOKENS)


async def test_no_daemon_is_said_at_once_and_names_the_address(folder: Any) -> None:
    async with AsyncClient(f"unix:{folder}/nobody", timeout_s=3600.0) as client, asyncio.timeout(60):
        with pytest.raises(ServerUnavailable, match="nobody"):
            await client.stats()


async def test_a_daemon_that_is_slow_to_greet_is_waited_for(stand_in: Any, spec: NamespaceSpec, folder: Path) -> None:
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)  # as long as an event loop may be busy
        there = await asyncio.open_unix_connection(stand_in.address.removeprefix("unix:"))
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    late = folder / "late"
    async with (
        await asyncio.start_unix_server(relay, late),
        AsyncClient(f"unix:{late}", memory="streamed") as client,
    ):
        cache = await client.register(spec)
        assert (await cache.match(TOKENS)).blocks == 1


async def test_a_call_that_hangs_times_out(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        stand_in.hang.add("Match")
        client.connection.timeout_s = 0.2
        with pytest.raises(CallTimeout):
            await cache.match(TOKENS)
    stand_in.hang.add("OpenSession")
    async with AsyncClient(stand_in.address, timeout_s=0.2) as client:
        with pytest.raises(ServerUnavailable, match=r"within 0\.2 s"):
            await client.register(spec)


@pytest.mark.parametrize("address", ["", "nonsense", "unix:", "host:", ":1", "host:0", "host:99999"])
def test_a_bad_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgumentError):
        AsyncClient(address)


async def test_when_the_session_ends_its_leases_are_lost_and_the_next_call_opens_another(
    stand_in: Any, spec: NamespaceSpec
) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        lease = await cache.acquire(TOKENS)
        reservation = await cache.reserve(TOKENS)
        view = lease.view(0)
        kept = np.frombuffer(lease.view(1), np.uint8)
        arena = client.arena
        stand_in.end_sessions()
        await until(lambda: client.arena is None)
        for touch in (lambda: lease.view(0), lambda: reservation.view(0), lease.check):
            with pytest.raises(LeaseLost, match="ended the session"):
                touch()
        with pytest.raises(ValueError, match="released"):
            view[0]
        assert kept.nbytes == 96  # an array made from a view must not crash its holder
        for call in (lease.copy_into(bytearray(256)), lease.release(), reservation.commit()):
            with pytest.raises(LeaseLost):
                await call
        await reservation.release()
        assert (await cache.match(TOKENS)).blocks == 1
        assert (stand_in.opened, stand_in.registered) == (2, [spec.name] * 2)
        assert client.arena is not None and client.arena is not arena
        async with await cache.acquire(TOKENS) as again:
            assert again.blocks == 2


async def test_a_call_in_flight_fails_with_the_daemon(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        stand_in.hang.add("Acquire")
        call = asyncio.create_task(cache.acquire(TOKENS))
        await until(lambda: "Acquire" in stand_in.entered)
        await stand_in.stop()
        with pytest.raises(ServerUnavailable):
            await call


async def test_an_expired_lease_is_not_read(stand_in: Any, spec: NamespaceSpec) -> None:
    now = [100.0]
    stand_in.ttl_s = 5.0
    async with AsyncClient(stand_in.address, clock=lambda: now[0]) as client:
        cache = await client.register(spec)
        lease = await cache.acquire(TOKENS)
        reservation = await cache.reserve(TOKENS)
        assert lease.remaining_s == 5.0
        now[0] = 105.0
        assert lease.remaining_s == 0.0
        with pytest.raises(LeaseLost, match="expired"):
            lease.view(0)
        with pytest.raises(LeaseLost, match="expired"):
            await reservation.copy_from(bytes(256))
        with pytest.raises(LeaseLost, match="expired"):
            await reservation.commit()


async def test_bytes_loaded_under_a_lease_that_ended_are_not_given_as_good(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        stand_in.failures["Release"] = (grpc.StatusCode.NOT_FOUND, "expired")
        with pytest.raises(LeaseLost, match="expired"):
            await cache.load(TOKENS, bytearray(256))
        stand_in.failures["Commit"] = (grpc.StatusCode.NOT_FOUND, "expired")
        with pytest.raises(LeaseLost, match="expired"):
            await cache.store(TOKENS, bytes(256))


async def test_an_error_inside_releases_and_stays_the_error(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        with pytest.raises(ZeroDivisionError):
            async with await cache.acquire(TOKENS):
                raise ZeroDivisionError
        with pytest.raises(ZeroDivisionError):
            async with await cache.reserve(TOKENS):
                raise ZeroDivisionError
        assert stand_in.released == ["lease", "reservation"]


async def test_wrong_buffers_and_indexes_are_refused_before_anything_is_asked(
    stand_in: Any, spec: NamespaceSpec
) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        stand_in.hang |= {"Acquire", "Reserve"}
        for call in (
            cache.load(TOKENS, bytearray(255)),
            cache.store(TOKENS, bytes(257)),
            cache.load(TOKENS, bytearray(256), parts=[2]),
            cache.load(TOKENS, bytearray(256), first_block=-1),
        ):
            with pytest.raises(InvalidArgumentError):
                await call
        stand_in.hang.clear()
        async with await cache.acquire(TOKENS) as lease:
            with pytest.raises(InvalidArgumentError, match="2 blocks of 2 parts"):
                lease.view(2)
        with pytest.raises(InvalidArgumentError, match="commit 3 blocks"):
            async with await cache.reserve(TOKENS) as reservation:
                await reservation.commit(3)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda cache: cache.acquire(TOKENS, ttl_s="x"), "ttl_s is 'x'; it must be a number"),
        (lambda cache: cache.reserve(TOKENS, ttl_s="x"), "ttl_s is 'x'; it must be a number"),
        (lambda cache: cache.acquire(TOKENS, max_blocks="x"), "max_blocks is 'x'; it must be an integer from 0 to"),
        (lambda cache: cache.reserve(TOKENS, first_block=-1), "first_block is -1; it must be an integer from 0 to"),
        (lambda cache: cache.load(TOKENS, bytearray(256), max_blocks=0.5), "max_blocks is 0.5; it must be an integer"),
        (lambda cache: cache.store(TOKENS, bytes(256), first_block="x"), "first_block is 'x'; it must be an integer"),
        (lambda cache: cache.acquire(TOKENS, first_block=None), "first_block is None; it must be an integer from 0 to"),
        (
            lambda cache: cache.acquire(TOKENS, prefix_blocks=1 << 32),
            "prefix_blocks is 4294967296; it must be an integer",
        ),
        (lambda cache: cache.acquire(TOKENS, parts=["x"]), "there is no part 'x': the namespace has"),
    ],
)
async def test_a_value_of_the_wrong_type_is_refused_by_name(
    stand_in: Any, spec: NamespaceSpec, call: Any, says: str
) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        with pytest.raises(InvalidArgumentError, match=re.escape(says)):
            await call(cache)


async def test_a_lifetime_or_count_of_the_wrong_type_leaves_a_hold_as_it_is(stand_in: Any, spec: NamespaceSpec) -> None:
    async with AsyncClient(stand_in.address) as client:
        cache = await client.register(spec)
        async with await cache.reserve(TOKENS) as reservation:
            before_s = reservation.remaining_s
            with pytest.raises(InvalidArgumentError, match="ttl_s is 'x'; it must be a number"):
                await reservation.renew("x")  # type: ignore[arg-type]
            with pytest.raises(InvalidArgumentError, match="blocks is 'x'; it must be an integer"):
                await reservation.commit("x")  # type: ignore[arg-type]
            assert before_s - 1 < reservation.remaining_s <= before_s


@pytest.mark.parametrize(
    ("blocks", "data", "what"),
    [(2, [bytes(200)], "56 bytes before"), (2, [bytes(300)], "44 bytes more"), (3, [], "3 blocks, of 2 asked for")],
)
async def test_a_stream_that_breaks_the_contract_is_an_error(
    stand_in: Any, spec: NamespaceSpec, blocks: int, data: list[bytes], what: str
) -> None:
    stand_in.get_blocks, stand_in.get_data = blocks, data
    async with AsyncClient(stand_in.address, memory="streamed") as client:
        cache = await client.register(spec)
        with pytest.raises(ClientError, match=what):
            await cache.load(TOKENS, bytearray(256))
        with pytest.raises(MemoryUnavailable):
            await cache.acquire(TOKENS)


async def test_a_client_that_gets_no_memory_says_why(
    stand_in: Any, spec: NamespaceSpec, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in._door._may_map = lambda uid: False
    async with AsyncClient(stand_in.address, memory="streamed") as client:
        await client.register(spec)
    assert not caplog.records
    async with AsyncClient(stand_in.address) as client:
        await client.register(spec)
        assert client.arena is None
    said = [record.getMessage() for record in caplog.records if record.name.startswith("prefixd.client")]
    assert len(said) == 1 and "streamed" in said[0] and "may not map the memory" in said[0]
    async with AsyncClient(stand_in.address, memory="shared") as client:
        with pytest.raises(MemoryUnavailable, match="may not map the memory"):
            await client.register(spec)


async def test_values_of_a_newer_daemon_are_named(stand_in: Any, spec: NamespaceSpec) -> None:
    stand_in.tier = 9
    async with AsyncClient(stand_in.address) as client:
        with pytest.raises(ServerError, match="tier that this client does not know"):
            await (await client.register(spec)).match(TOKENS)
    finished = inference_pb2.Finished(reason=9)
    with pytest.raises(ServerError, match="reason to finish that this client does not know: 9"):
        event_from_proto(inference_pb2.GenerateResponse(finished=finished))
    with pytest.raises(ServerError, match="event this client does not know"):
        event_from_proto(inference_pb2.GenerateResponse())


async def test_a_closed_client_says_so_and_its_views_do_no_harm(stand_in: Any, spec: NamespaceSpec) -> None:
    client = AsyncClient(stand_in.address)
    cache = await client.register(spec)
    lease = await cache.acquire(TOKENS)
    kept = np.frombuffer(lease.view(0), np.uint8)
    await client.close()
    await client.close()
    assert kept.sum() == 0
    with pytest.raises(ClientClosed):
        await cache.match(TOKENS)
    with pytest.raises(LeaseLost, match="closed"):
        lease.view(0)
    await until(lambda: not stand_in.sessions)


async def test_a_cancelled_copy_is_finished_before_its_caller_goes_on() -> None:
    started, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        started.set()
        go_on.wait(60)

    copier = Copier(1)
    source, target = np.ones(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
    task = asyncio.create_task(copier.copy([(target, source)], hold))
    await asyncio.to_thread(started.wait, 60)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert target.all()
    copier.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
async def test_threads_share_a_copy(threads: int) -> None:
    rng = np.random.default_rng(threads)
    sizes = rng.integers(1, 200_000, 9)
    pairs = [(np.zeros(n, np.uint8), rng.integers(0, 256, n, dtype=np.uint8)) for n in sizes]
    copier = Copier(threads)
    await copier.copy(pairs, lambda: None)
    copier.close()
    assert all(np.array_equal(target, source) for target, source in pairs)


async def test_closing_a_blocking_client_ends_calls_in_other_threads(stand_in: Any, spec: NamespaceSpec) -> None:
    def use() -> list[BaseException]:
        caught: list[BaseException] = []
        client = Client(stand_in.address)
        cache = client.register(spec)
        stand_in.hang.add("Match")

        def match() -> None:
            try:
                cache.match(TOKENS)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=match)
        thread.start()
        while not _in_call(thread):
            time.sleep(0.001)
        client.close()
        client.close()
        thread.join(60)
        with pytest.raises(ClientClosed):
            cache.match(TOKENS)
        return caught

    (error,) = await asyncio.to_thread(use)
    assert isinstance(error, ClientError)


def _in_call(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "result":
            return True
        frame = frame.f_back
    return False


async def test_calls_that_wait_for_a_session_share_the_attempt_and_its_failure(
    stand_in: Any, spec: NamespaceSpec
) -> None:
    stand_in.failures["OpenSession"] = (grpc.StatusCode.RESOURCE_EXHAUSTED, "too many sessions")
    async with AsyncClient(stand_in.address) as client:
        results = await asyncio.gather(*(client.register(spec) for _ in range(5)), return_exceptions=True)
        assert [type(result) for result in results] == [ExhaustedError] * 5
        assert stand_in.entered == ["OpenSession"]
        stand_in.failures.clear()
        await asyncio.gather(*(client.register(spec) for _ in range(5)))
        assert stand_in.entered.count("OpenSession") == 2 and stand_in.opened == 1


async def test_a_caller_that_gives_up_leaves_the_attempt_to_the_others(stand_in: Any, spec: NamespaceSpec) -> None:
    stand_in.gates["OpenSession"] = asyncio.Event()
    async with AsyncClient(stand_in.address) as client:
        first, second = (asyncio.create_task(client.register(spec)) for _ in range(2))
        await until(lambda: stand_in.entered)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        stand_in.gates["OpenSession"].set()
        assert (await second).namespace_id
        assert stand_in.entered == ["OpenSession", "RegisterNamespace"]


async def test_closing_ends_the_wait_for_a_session(stand_in: Any, spec: NamespaceSpec) -> None:
    stand_in.hang.add("OpenSession")
    client = AsyncClient(stand_in.address)
    waiting = asyncio.create_task(client.register(spec))
    await until(lambda: stand_in.entered)
    await client.close()
    with pytest.raises(ClientClosed, match="while its session was opened"):
        await waiting


async def test_closing_ends_a_call_that_waits_for_the_next_attempt_to_connect(folder: Path) -> None:
    client = AsyncClient(f"unix:{folder}/nobody")
    with pytest.raises(ServerUnavailable):
        await client.stats()
    waiting = asyncio.create_task(client.stats())
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(ClientError):  # where it did not wait any more, that nobody answers
        await waiting


class Taker(cache_pb2_grpc.PrefixCacheServicer):
    """Agrees to a Put or refuses it."""

    def __init__(self, agrees: bool) -> None:
        self.agrees = agrees
        self.received = 0

    async def Put(self, requests: Any, context: Any) -> cache_pb2.PutResponse:
        await anext(aiter(requests))
        if not self.agrees:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room for that")
        await context.send_initial_metadata((("prefixd-agreed", "1"),))
        async for _ in requests:
            self.received += 1
        return cache_pb2.PutResponse(committed=self.received)


@pytest.mark.parametrize("agrees", [True, False])
async def test_bytes_are_sent_when_the_daemon_has_agreed_to_take_them(folder: Path, agrees: bool) -> None:
    taker = Taker(agrees)
    server = grpc.aio.server()
    cache_pb2_grpc.add_PrefixCacheServicer_to_server(taker, server)
    server.add_insecure_port(f"unix:{folder}/s")
    await server.start()
    connection = Connection(f"unix:{folder}/s", 60.0)
    pieces = iter([cache_pb2.PutRequest(data=b"x")] * 5)
    try:
        if agrees:
            answer = await connection.upload(connection.cache.Put, cache_pb2.PutRequest(), pieces)
            assert answer.committed == taker.received == 5
        else:
            with pytest.raises(ExhaustedError, match="no room for that"):
                await connection.upload(connection.cache.Put, cache_pb2.PutRequest(), pieces)
            assert len(list(pieces)) == 5
    finally:
        await connection.close()
        await server.stop(None)


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ("Internal error from Core", ServerUnavailable),
        ("Locally cancelled by application!", ServerUnavailable),
        ("what the daemon said", ServerError),
    ],
)
async def test_a_status_that_grpc_lost_is_not_the_daemons(details: str, expected: type[Exception]) -> None:
    async def broken(messages: object) -> None:
        nothing = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details=details)

    connection = Connection("unix:/nowhere", 60.0)
    try:
        with pytest.raises(expected) as caught:
            await connection.upload(lambda messages, timeout: broken(messages), cache_pb2.PutRequest(), ())
        assert caught.type is expected
    finally:
        await connection.close()
