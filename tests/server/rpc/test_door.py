"""What is received of calls, and that it goes when they end: a message may have 16 MiB."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import pytest

from prefixd.base.errors import ExhaustedError, NotFoundError
from prefixd.server.rpc.door import Door, ServiceTable, streaming, unary
from prefixd.server.rpc.receiving import CURRENT_CALL, Call, Line
from prefixd.server.rpc.status import abort
from tests.waiting import until


class Message:
    """A request; `alive` counts those that anything refers to."""

    _all: ClassVar[weakref.WeakSet[Message]] = weakref.WeakSet()

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._all.add(self)

    @classmethod
    def alive(cls) -> int:
        return len(cls._all)


class Service:
    """Answers in all the ways that a handler can."""

    @unary
    async def Answer(self, request: Message) -> bytes:
        return request.raw

    @unary
    async def Refuse(self, request: Message) -> bytes:
        try:
            raise KeyError(request.raw)
        except KeyError as error:
            raise NotFoundError("nothing has this name") from error

    @unary
    async def Exhaust(self, request: Message) -> bytes:
        raise ExhaustedError(f"{len(request.raw)} is too much")

    @streaming
    async def Last(self, request: Message) -> AsyncIterator[bytes]:
        yield request.raw
        await asyncio.Event().wait()

    @streaming
    async def ExhaustLast(self, request: Message) -> AsyncIterator[bytes]:
        if request.raw:
            raise ExhaustedError(f"{len(request.raw)} is too much")
        yield b""

    async def Take(self, requests: AsyncIterator[Message], context: Any) -> bytes:
        try:
            taken = [len(request.raw) async for request in requests]
            if taken[-1] == 3:
                raise NotFoundError("three")
            return str(taken).encode()
        except Exception as error:
            await abort(context, error)


class _Line(Line):
    """Messages wait until a test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = asyncio.Event()
        self.let = asyncio.Event()

    async def turn(self) -> None:
        self.waiting.set()
        await self.let.wait()


class _Door(Door):
    """Lets everything in; messages that have arrived wait in line."""

    def __init__(self, line: Line | None) -> None:
        self.line = line
        self.begun = 0
        self.refused = asyncio.Event()
        self.told = asyncio.Event()
        self.ended_with: list[int] = []
        """Bytes of the message, for each call that has received its first one or was ended before that."""

    async def admit(self, method: str, context: Any) -> Call:
        call = _Call(self)
        CURRENT_CALL.set(call)
        return call


class _Call(Call):
    receive_s = 30.0

    def __init__(self, door: _Door) -> None:
        super().__init__(None)
        self._door = door

    @asynccontextmanager
    async def first(self) -> AsyncIterator[Line | None]:
        self._door.begun += 1
        try:
            yield self._door.line
        finally:
            self._door.ended_with.append(self.message_bytes)

    @asynccontextmanager
    async def later(self) -> AsyncIterator[Line | None]:
        yield self._door.line

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[None]:
        yield

    async def refusal_turn(self) -> None:
        self._door.refused.set()
        await self._door.told.wait()


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=[False, True], ids=["at once", "in line"])
async def door(request: pytest.FixtureRequest) -> _Door:
    """What the daemon has where there is one tenant, and where there are several."""
    return _Door(Line() if request.param else None)


@asynccontextmanager
async def served(door: _Door) -> AsyncIterator[grpc.aio.Channel]:
    service, server = Service(), grpc.aio.server()
    last = grpc.unary_stream_rpc_method_handler
    kinds = {"Last": last, "ExhaustLast": last, "Take": grpc.stream_unary_rpc_method_handler}
    handlers = {
        name: kinds.get(name, grpc.unary_unary_rpc_method_handler)(getattr(service, name), Message, bytes)
        for name in ("Answer", "Refuse", "Exhaust", "Last", "ExhaustLast", "Take")
    }
    ServiceTable([(server, door)]).add_registered_method_handlers("test.Test", handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def gone() -> bool:
    """Whether no message is left, soon."""
    for _ in range(200):
        if not Message.alive():
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("method", "code"),
    [
        ("Answer", grpc.StatusCode.OK),
        ("Refuse", grpc.StatusCode.NOT_FOUND),
        ("Exhaust", grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_a_message_goes_with_its_call(method: str, code: grpc.StatusCode, door: _Door) -> None:
    door.told.set()
    async with served(door) as channel:
        call = channel.unary_unary(f"/test.Test/{method}")(b"x" * 10)
        assert await call.code() is code
        assert await gone()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("method", ["Exhaust", "ExhaustLast"])
async def test_a_refusal_that_waits_keeps_no_message(method: str, door: _Door) -> None:
    async with served(door) as channel:
        call = channel.unary_stream(f"/test.Test/{method}")(b"x" * 10)
        await door.refused.wait()
        assert await gone()
        door.told.set()
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.usefixtures("no_collection")
async def test_a_message_goes_with_a_call_that_is_cancelled(door: _Door) -> None:
    async with served(door) as channel:
        call = channel.unary_stream("/test.Test/Last")(b"x" * 10)
        assert await call.read() == b"x" * 10 and Message.alive() == 1
        call.cancel()
        assert await gone()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("last", [2, 3])
async def test_messages_of_a_stream_go_one_by_one_and_with_it(last: int, door: _Door) -> None:
    async with served(door) as channel:
        call = channel.stream_unary("/test.Test/Take")()
        for nbytes in range(8, 1, -1):
            await call.write(b"x" * nbytes)
            if nbytes == last:
                break
        await call.done_writing()
        assert await call.code() is (grpc.StatusCode.OK if last == 2 else grpc.StatusCode.NOT_FOUND)
        assert await gone()


@pytest.mark.usefixtures("no_collection")
async def test_a_message_of_a_call_that_is_cancelled_in_line_is_put_together_in_its_turn() -> None:
    """gRPC would keep its memory else. And it counts: who cancels has not sent it for nothing."""
    line = _Line()
    door = _Door(line)
    async with served(door) as channel:
        call = channel.unary_unary("/test.Test/Answer")(b"x" * (1 << 20))
        async with asyncio.timeout(30):
            await line.waiting.wait()
            line.waiting.clear()
            call.cancel()
            await line.waiting.wait()  # again
            assert not door.ended_with
            line.let.set()
            await until(lambda: door.ended_with)
            assert door.ended_with == [1 << 20]
        assert await gone()


async def test_a_call_that_ends_before_its_message_is_here_pays_nothing(door: _Door) -> None:
    async with served(door) as channel:
        call = channel.stream_unary("/test.Test/Answer")()
        async with asyncio.timeout(30):
            await until(lambda: door.begun)
            call.cancel()
            await until(lambda: door.ended_with)
        assert door.ended_with == [0]
