"""Who is not known asks for the daemon's health, and neither slows others nor hides it from them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixd.base.errors import ExhaustedError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.server.rpc import receiving
from prefixd.server.rpc.anonymous import AT_ONCE, AT_ONCE_OF_HOST, CALLS, CALLS_OF_HOST, AnonymousCalls
from prefixd.server.rpc.call_limits import HEALTH_CALLS
from prefixd.server.rpc.receiving import Call

TOKEN = "client-" + "c" * 32
UNREAD = [("grpc.http2.lookahead_bytes", 5), ("grpc.http2.bdp_probe", 0)]
"""Options of a channel on which an answer has no window until it is read."""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    directory = tmp_path_factory.mktemp("anonymous")
    tokens = directory / "tokens"
    tokens.write_text(f"engine client {TOKEN}\n")
    tokens.chmod(0o600)
    settings = {"cpu.bytes": "1MiB", "disk.bytes": 0, "server.insecure_tcp": True, "server.tokens": str(tokens)}
    with DaemonProcess({**settings, "server.tcp": "127.0.0.1:0"}, directory=directory / "d") as process:
        yield process


def channel(daemon: DaemonProcess, stack: ExitStack, door: str = "tcp") -> grpc.Channel:
    address = daemon.address if door == "unix" else daemon.tcp
    assert address is not None
    return stack.enter_context(grpc.insecure_channel(address))


@pytest.mark.slow
def test_who_is_known_does_not_wait_behind_those_who_are_not(daemon: DaemonProcess) -> None:
    ended = threading.Event()

    def silence() -> Iterator[bytes]:
        ended.wait()
        yield from ()

    with ExitStack() as stack:
        stack.callback(ended.set)
        anonymous = channel(daemon, stack).stream_unary("/grpc.health.v1.Health/Check")
        more = 3
        calls = [anonymous.future(silence(), timeout=60) for _ in range(AT_ONCE_OF_HOST + more)]
        asked = health_pb2.HealthCheckRequest()
        for door, metadata in (("unix", ()), ("tcp", [("authorization", f"Bearer {TOKEN}")])):
            check = health_pb2_grpc.HealthStub(channel(daemon, stack, door)).Check
            for _ in range(AT_ONCE):
                assert check(asked, metadata=metadata, timeout=60).status == health_pb2.HealthCheckResponse.SERVING
        codes = Counter(call.code() for call in calls)
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED: AT_ONCE_OF_HOST, grpc.StatusCode.RESOURCE_EXHAUSTED: more}
    assert {call.details() for call in calls if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED} == {
        "the call's message did not arrive within 5 s; send it at once, or less at a time"
    }


def test_an_unknown_token_is_a_anonymous(daemon: DaemonProcess) -> None:
    with ExitStack() as stack:
        health = health_pb2_grpc.HealthStub(channel(daemon, stack))
        metadata = [("authorization", "Bearer " + "x" * 40)]
        answer = health.Check(health_pb2.HealthCheckRequest(), metadata=metadata, timeout=60)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("method", "most"),
    [
        ("grpc.health.v1.Health/Check", 1 << 10),
        ("grpc.health.v1.Health/Watch", 1 << 10),
        ("grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", 1 << 16),
        ("prefixd.v1.PrefixCache/OpenSession", 1 << 16),
    ],
)
def test_messages_of_calls_that_last_or_are_open_to_all_are_small(
    daemon: DaemonProcess, method: str, most: int
) -> None:
    unknown_field = b"\xfa\x01"  # number 31, bytes
    with ExitStack() as stack, pytest.raises(grpc.RpcError) as refused:
        message = unknown_field + b"\xff\xff\x03" + bytes((1 << 16) - 1)
        next(channel(daemon, stack, "unix").stream_stream(f"/{method}")(iter([message]), timeout=60))
    assert isinstance(refused.value, grpc.Call) and refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"it has {(1 << 16) + 4} bytes, of {most} at most" in str(refused.value.details())


def test_watchers_of_anonymous_do_not_keep_others_from_watching(daemon: DaemonProcess, tmp_path: Path) -> None:
    with ExitStack() as stack:
        asked = health_pb2.HealthCheckRequest()
        anonymous = health_pb2_grpc.HealthStub(channel(daemon, stack))
        watching = []
        for _ in range(64):  # one after the other: a host has few calls at once whose messages have not come
            watching.append(anonymous.Watch(asked, timeout=60))
            assert next(watching[-1]).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="64 calls watch the health already"):
            next(anonymous.Watch(asked, timeout=60))
        own = health_pb2_grpc.HealthStub(channel(daemon, stack, "unix")).Watch(asked, timeout=60)
        assert next(own).status == health_pb2.HealthCheckResponse.SERVING
        for each in (*watching, own):
            each.cancel()


@pytest.mark.parametrize(
    ("metadata", "whose"),
    [
        ((), f"{CALLS_OF_HOST} of them from here; read the answers"),
        ([("authorization", f"Bearer {TOKEN}")], f"tenant default: {HEALTH_CALLS} calls to the health service"),
    ],
)
def test_a_call_whose_answer_is_not_read_is_under_way(
    daemon: DaemonProcess, metadata: list[tuple[str, str]], whose: str
) -> None:
    assert daemon.tcp is not None
    options = [*UNREAD, ("grpc.use_local_subchannel_pool", 1)]
    calls: list[Any] = []
    with ExitStack() as stack:
        while not (ended := [call for call in calls if call.done()]):
            if len(calls) % 200 == 0:
                channel = stack.enter_context(grpc.insecure_channel(daemon.tcp, options))
            calls.append(channel.unary_stream("/grpc.health.v1.Health/Check")(b"", metadata=metadata, timeout=120))
            calls[-1].initial_metadata()  # which comes with the answer
        assert ended[0].code() is grpc.StatusCode.RESOURCE_EXHAUSTED and whose in ended[0].details()
        for call in calls:
            call.cancel()


async def test_a_host_has_a_few_of_the_places() -> None:
    anonymous = AnonymousCalls()
    async with AsyncExitStack() as held:
        for number in range(AT_ONCE // AT_ONCE_OF_HOST):
            for _ in range(AT_ONCE_OF_HOST):
                await held.enter_async_context(anonymous.receiving(f"ipv4:10.0.0.{number}", Call(None)))
            if number == 0:
                with pytest.raises(ExhaustedError, match=r"4 calls to the health service .* 4 of them from here"):
                    await held.enter_async_context(anonymous.receiving("ipv4:10.0.0.0", Call(None)))
        with pytest.raises(ExhaustedError, match=r"16 calls .* 0 of them from here"):
            await held.enter_async_context(anonymous.receiving("ipv4:10.0.0.9", Call(None)))
    async with anonymous.receiving("ipv4:10.0.0.9", Call(None)):
        pass


async def test_calls_whose_answers_are_not_read_are_bounded() -> None:
    anonymous, read = AnonymousCalls(), asyncio.Event()

    def begin(host: str) -> asyncio.Task[bool]:
        call = asyncio.create_task(read.wait())
        anonymous.begin(host, call)
        return call

    calls = [begin(f"ipv4:10.0.0.{number % 4}") for number in range(CALLS - 1)]
    with pytest.raises(ExhaustedError, match=rf"{CALLS - 1} calls .* {CALLS_OF_HOST} of them from here; read the answ"):
        begin("ipv4:10.0.0.2")
    calls.append(begin("ipv4:10.0.0.3"))
    with pytest.raises(ExhaustedError, match=rf"{CALLS} calls .* 0 of them from here"):
        begin("ipv4:10.0.0.9")
    read.set()
    await asyncio.gather(*calls)
    await begin("ipv4:10.0.0.9")


async def test_large_messages_of_a_host_come_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", (16 << 20) // 600)
    anonymous = AnonymousCalls()
    for number in range(300):
        async with anonymous.receiving(f"h{number}", call := Call(None)):
            call.message_bytes = 16 << 20

    async def turn(host: str) -> None:
        async with anonymous.receiving(host, Call(None)) as line:
            await line.turn()

    tasks = {host: asyncio.create_task(turn(host)) for host in ("h299", "another")}
    for _ in range(8):
        await asyncio.sleep(0)
    assert [host for host, task in tasks.items() if not task.done()] == ["h299"], "it is not forgotten"
    tasks["h299"].cancel()
