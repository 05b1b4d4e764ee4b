"""An HTTP port: nobody who connects to it can take more than his share."""

from __future__ import annotations

import asyncio
import os
import resource
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from prefixd.server.http.http_connection import HttpLimits
from prefixd.server.http.http_listener import HttpListener
from tests.waiting import until

GET = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


class Served:
    """An app behind a port, and its client."""

    def __init__(self, **limits: float) -> None:
        self.page: str | Callable[[], Awaitable[object]] = "the page"
        self.cancelled = 0
        self.bodies: list[bytes] = []
        self.began = 0
        routes = [
            Route("/", self._get, methods=["GET"]),
            Route("/post", self._post, methods=["POST"]),
            Route("/hang", self._hang, methods=["GET", "POST"]),
            Route("/stream", self._stream),
            Route("/refuse", self._refuse, methods=["POST"]),
        ]
        self.listener = HttpListener(Starlette(routes=routes), HttpLimits(**limits))  # type: ignore[arg-type]
        self.port = 0

    async def _get(self, request: Request) -> Response:
        self.began += 1
        return PlainTextResponse(str(self.page))

    async def _post(self, request: Request) -> Response:
        self.began += 1
        self.bodies.append(await request.body())
        return PlainTextResponse("taken")

    async def _hang(self, request: Request) -> Response:
        self.began += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        raise AssertionError

    async def _refuse(self, request: Request) -> Response:
        request.state.note_refusal()
        return await self._hang(request)

    async def _stream(self, request: Request) -> Response:
        async def words() -> AsyncIterator[str]:
            for number in range(3):
                yield f"{number} "
                await asyncio.sleep(0)

        return StreamingResponse(words())

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> tuple[bytes, dict[str, str], bytes]:
        """Status line, header fields and body of the answer to `request`."""
        reader, writer = await self.connect()
        writer.write(request)
        head, _, body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        writer.close()
        status, *lines = head.split(b"\r\n")
        return status, dict(line.decode().lower().split(": ", 1) for line in lines), body

    async def answers(self) -> bool:
        return (await self.ask(GET))[0] == b"HTTP/1.1 200 OK"


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Awaitable[Served]]]:
    made: list[Served] = []

    async def start(**limits: float) -> Served:
        served = Served(**limits)
        made.append(served)
        served.port = await served.listener.start("127.0.0.1", 0)
        return served

    yield start
    for served in made:
        await served.listener.close()
        assert served.listener.connections == 0


Serve = Callable[..., Awaitable[Served]]


async def closed(reader: asyncio.StreamReader) -> None:
    """Waits until the other end has closed a connection without a word."""
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 60)


async def test_requests_one_after_the_other_on_one_connection(serve: Serve) -> None:
    served = await serve()
    reader, writer = await served.connect()
    for _ in range(3):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK") and await reader.readexactly(8) == b"the page"
    writer.write(GET + GET)
    assert (await reader.read()).count(b"the page") == 1
    writer.close()


async def test_a_request_in_pieces_and_one_that_ends_its_side(serve: Serve) -> None:
    served = await serve()
    reader, writer = await served.connect()
    for byte in b"GET / HTTP/1.0\r\n\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    writer.write_eof()
    assert b"the page" in await asyncio.wait_for(reader.read(), 60)
    writer.close()


async def test_a_stream_ends_with_its_last_word(serve: Serve) -> None:
    _, fields, body = await (await serve()).ask(b"GET /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert fields["transfer-encoding"] == "chunked" and body == b"2\r\n0 \r\n2\r\n1 \r\n2\r\n2 \r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"200 OK"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 3\r\n\r\nabc", b"405 Method Not Allowed"),
        (b"GET /favicon.ico HTTP/1.0\r\n\r\n", b"404 Not Found"),
        (b"\xff\0 \x16\x03\r\n\r\n", b"400 Bad Request"),
        (b"GET / HTTP/1.1\r\n\r\n", b"400 Bad Request"),  # no Host
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 20_000, b"431 Request Header Fields Too Large"),
    ],
)
async def test_other_requests(serve: Serve, request_: bytes, status: bytes, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve()
    line, _, body = await served.ask(request_)
    assert line == b"HTTP/1.1 " + status and (b"the page" not in body)
    assert not caplog.records, "anybody can send this"


async def test_a_handler_that_fails_ends_its_request_only(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def __str__(self) -> str:
            raise ZeroDivisionError

    served = await serve()
    served.page = Broken()  # type: ignore[assignment]
    status, _, _ = await served.ask(GET)
    assert status == b"HTTP/1.1 500 Internal Server Error" and "ZeroDivisionError" in caplog.text
    served.page = "well again"
    assert await served.answers()


async def test_a_thousand_idle_connections_take_few_descriptors_and_keep_nobody_out(serve: Serve) -> None:
    served = await serve(connections=32)
    idle = []
    for number in range(1000):
        reader, writer = await served.connect()
        if number % 2:
            writer.write(b"GET / HTTP/1.1\r\n")  # and never the rest
        idle.append((reader, writer))
        assert served.listener.connections <= 33
    assert await served.answers()
    await closed(idle[0][0])
    assert served.listener.connections <= 32
    for _, writer in idle:
        writer.close()


async def test_connections_that_wait_for_an_answer_stay_and_answered_ones_make_room(serve: Serve) -> None:
    served = await serve(connections=3)
    asking = [await served.connect() for _ in range(2)]
    for _, writer in asking:
        writer.write(b"POST /hang HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
    await until(lambda: served.began == 2)
    kept, keeping = await served.connect()
    keeping.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await kept.readuntil(b"the page")).startswith(b"HTTP/1.1 200")
    assert await served.answers()
    await closed(kept)
    assert served.cancelled == 0
    for _, writer in asking:
        writer.close()
    await until(lambda: served.cancelled == 2)
    keeping.close()


async def test_refusals_that_wait_keep_nobody_out(serve: Serve) -> None:
    served = await serve(connections=3)
    refused = []
    for number in range(3):
        refused.append(await served.connect())
        refused[-1][1].write(b"POST /refuse HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await until(lambda number=number: served.began == number + 1)
    assert await served.answers()
    await closed(refused[0][0])
    await until(lambda: served.cancelled == 1)
    for _, writer in refused:
        writer.close()


async def test_who_sends_no_request_and_who_reads_no_answer_is_cut_off(serve: Serve) -> None:
    served = await serve(head_s=0.05, send_s=60)
    reader, writer = await served.connect()
    writer.write(b"GET / HTTP/1.1\r\n")
    await closed(reader)
    writer.close()
    served = await serve(head_s=60, send_s=0.05)
    served.page = "x" * (16 << 20)  # more than the kernel takes for somebody who does not read
    deaf_reader, deaf = await served.connect()
    deaf.transport.pause_reading()  # type: ignore[attr-defined]
    deaf.write(GET)
    await until(lambda: served.began and not served.listener.connections)
    deaf.close()
    del deaf_reader


async def test_a_connection_is_kept_for_a_while_only_whatever_its_peer_sends(serve: Serve) -> None:
    served = await serve(keep_alive_s=0.02, head_s=0.05)
    silent, half = await served.connect(), await served.connect()
    for reader, writer in (silent, half):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"the page")
    half[1].write(b"GET / HT")
    for reader, writer in (silent, half):
        await closed(reader)
        writer.close()


async def test_bodies_are_bounded_in_size_and_time_and_all_together(serve: Serve) -> None:
    served = await serve(body_bytes=100_000, bodies_bytes=150_000, body_s=0.05)

    def post(body: bytes, length: int | None = None) -> bytes:
        length = len(body) if length is None else length
        return b"POST /post HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % length + body

    assert (await served.ask(post(b"x" * 100_000)))[0] == b"HTTP/1.1 200 OK"
    assert [len(body) for body in served.bodies] == [100_000]
    status, _, body = await served.ask(post(b"", 100_001))
    assert status.startswith(b"HTTP/1.1 413 ") and b"100000 bytes" in body
    chunked = b"POST /post HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"%x\r\n" % 60_000 + b"y" * 60_000 + b"\r\n"
    assert (await served.ask(chunked + piece * 2))[0].startswith(b"HTTP/1.1 413 ")
    assert (await served.ask(chunked + piece + b"0\r\n\r\n"))[0] == b"HTTP/1.1 200 OK"
    status, _, body = await served.ask(post(b"half", 8))
    assert status == b"HTTP/1.1 408 Request Timeout" and b"0.05 s" in body
    served = await serve(body_bytes=100_000, bodies_bytes=150_000)
    holding, holder = await served.connect()
    holder.write(post(b"x" * 90_000, 100_000))
    await until(lambda: served.began)
    await until(lambda: served.listener.held_bytes == 90_000)
    status, fields, _ = await served.ask(post(b"x" * 100_000))
    assert status == b"HTTP/1.1 503 Service Unavailable" and fields["retry-after"] == "1"
    holder.close()
    await until(lambda: served.listener.held_bytes == 0)
    assert (await served.ask(post(b"x" * 100_000)))[0] == b"HTTP/1.1 200 OK"
    del holding


async def test_work_ends_when_its_client_leaves(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    served = await serve()
    for leave in (asyncio.StreamWriter.close, asyncio.StreamWriter.write_eof):
        cancelled = served.cancelled
        _, writer = await served.connect()
        writer.write(b"POST /hang HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await until(lambda cancelled=cancelled: served.began > cancelled)
        leave(writer)
        await until(lambda cancelled=cancelled: served.cancelled > cancelled)
        writer.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_out_of_descriptors_it_waits_and_does_not_spin(serve: Serve) -> None:
    """The port stays readable: without a pause the loop would try to accept for ever, at full speed."""
    served = await serve()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.get_running_loop()
    accepts: list[float] = []
    accept = served.listener._accept
    served.listener._accept = lambda listener: (accepts.append(loop.time()), accept(listener))  # type: ignore
    reader, writer = await served.connect()  # its descriptor is there; the server's other end is not accepted yet
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 8, before[1]))
        with pytest.raises(OSError, match="Too many open files"):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        os.close(held.pop())  # for the client
        extra_reader, extra = await served.connect()
        began_s = time.thread_time()
        await asyncio.sleep(0.3)
        assert time.thread_time() - began_s < 0.1
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(accepts) <= 3, "it tries again twice a second"
    extra.write(GET)
    assert b"the page" in await asyncio.wait_for(extra_reader.read(), 60), "accepted when there are some again"
    for each in (writer, extra):
        each.close()
    del reader


async def test_closing_ends_what_is_open_and_waits_for_answers(serve: Serve) -> None:
    served = await serve()
    reader, writer = await served.connect()
    hanging, asker = await served.connect()
    asker.write(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: served.began and served.listener.connections == 2)
    await served.listener.close(0.05)
    assert served.cancelled == 1
    await closed(reader)
    await closed(hanging)
    with pytest.raises(ConnectionError):
        await served.connect()
    for each in (writer, asker):
        each.close()


async def test_an_address_that_cannot_be_used(serve: Serve) -> None:
    served = await serve()
    with pytest.raises(OSError, match="in use"):
        await HttpListener(Starlette()).start("127.0.0.1", served.port)


async def test_a_handshake_that_does_not_end_is_cut_off_and_makes_room(tmp_path: object) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listener = HttpListener(Starlette(), HttpLimits(connections=2, head_s=0.05), context)
    port = await listener.start("127.0.0.1", 0)
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    await until(lambda: listener.connections <= 2)
    connections[4][1].write(b"no TLS at all, but plain HTTP/1.1\r\n\r\n")
    for reader, writer in connections:
        await asyncio.wait_for(reader.read(), 60)
        writer.close()
    await until(lambda: not listener.connections)
    await listener.close()
