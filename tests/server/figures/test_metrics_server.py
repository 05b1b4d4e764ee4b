"""The metrics' port: what it answers, and that nobody who connects to it can take more than his share."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager

import pytest

from prefixd.server.figures import metrics_server
from prefixd.server.figures.metrics_server import MetricsServer
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap import OutOfMemoryError
from tests.waiting import until


class Served:
    """A server of figures that a test changes, and its client."""

    def __init__(self, **limits: float) -> None:
        self.stats = pb.StatsResponse(asked_tokens=7, leases=2)
        self.scrapes = 0
        self.server = MetricsServer(self._take, **limits)
        self.port = 0

    async def _take(self) -> pb.StatsResponse:
        self.scrapes += 1
        return self.stats

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> tuple[bytes, dict[str, str], bytes]:
        """Status line, header fields and body of the answer to `request`."""
        reader, writer = await self.connect()
        writer.write(request)
        head, _, body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
        writer.close()
        status, *lines = head.split(b"\r\n")
        fields = dict(line.decode().lower().split(": ", 1) for line in lines)
        return status, fields, body

    async def scrape(self) -> bytes:
        status, _, body = await self.ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert status == b"HTTP/1.1 200 OK"
        return body


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Served]]:
    made: list[Served] = []

    async def start(**limits: float) -> Served:
        served = Served(**limits)
        made.append(served)
        served.port = await served.server.start(0)
        return served

    yield start
    for served in made:
        await served.server.close()
        await asyncio.sleep(0)
        assert served.server.connections == 0


async def test_a_page_has_the_figures_of_its_moment(serve: Callable[..., Served]) -> None:
    served = await serve()
    for asked in (7, 8):
        served.stats.asked_tokens = asked
        page = await served.scrape()
        assert f"prefixd_asked_tokens_total {asked}.0\n".encode() in page and b"prefixd_leases 2.0\n" in page
    status, fields, body = await served.ask(
        b"GET /metrics?x=1 HTTP/1.1\r\naccept: application/openmetrics-text;version=1.0.0\r\n\r\n"
    )
    assert (status, fields["connection"]) == (b"HTTP/1.1 200 OK", "close")
    assert fields["content-type"].startswith("application/openmetrics-text") and body.endswith(b"# EOF\n")
    assert int(fields["content-length"]) == len(body)


async def test_a_request_in_pieces_and_one_that_ends_its_side(serve: Callable[..., Served]) -> None:
    served = await serve()
    reader, writer = await served.connect()
    for byte in b"GET / HTTP/1.0\r\n\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    writer.write_eof()
    assert b"prefixd_leases" in await asyncio.wait_for(reader.read(), 60)
    writer.close()


@pytest.mark.parametrize(
    ("request_", "status", "scrapes"),
    [
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200 OK", 1),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405 Method Not Allowed", 0),
        (b"GET /favicon.ico HTTP/1.1\r\n\r\n", b"404 Not Found", 0),
        (b"\r\n\r\n", b"404 Not Found", 0),
        (b"\xff\0 \x16\x03\r\n\r\n", b"404 Not Found", 0),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000, b"431 Request Header Fields Too Large", 0),
    ],
)
async def test_other_requests(serve: Callable[..., Served], request_: bytes, status: bytes, scrapes: int) -> None:
    served = await serve()
    line, fields, body = await served.ask(request_)
    assert line == b"HTTP/1.1 " + status
    assert served.scrapes == scrapes
    assert (b"GET /metrics" in body) == (scrapes == 0)
    assert b"405" not in status or fields["allow"] == "get, head"


async def test_figures_that_cannot_be_had_are_an_error_of_that_scrape(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> pb.StatsResponse:
        raise ZeroDivisionError

    served = await serve()
    with monkeypatch.context() as patch:
        patch.setattr(served.server, "_take", fail)
        status, _, _ = await served.ask(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert status == b"HTTP/1.1 500 Internal Server Error" and "ZeroDivisionError" in caplog.text
    assert b"prefixd_leases" in await served.scrape()


async def test_a_thousand_idle_connections_take_few_descriptors_and_keep_nobody_out(
    serve: Callable[..., Served],
) -> None:
    served = await serve()
    idle = []
    for number in range(1000):
        reader, writer = await served.connect()
        if number % 2:
            writer.write(b"GET /metrics HTTP/1.1\r\n")  # and never the rest
        idle.append((reader, writer))
        assert served.server.connections <= metrics_server._CONNECTIONS + 1
    assert b"prefixd_leases" in await served.scrape()
    first, _ = idle[0]
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(first.readexactly(1), 60)
    assert served.server.connections <= metrics_server._CONNECTIONS
    for _, writer in idle:
        writer.close()


async def test_who_sends_no_request_and_who_reads_no_answer_is_cut_off(serve: Callable[..., Served]) -> None:
    served = await serve(head_s=0.05, send_s=60)
    reader, writer = await served.connect()
    writer.write(b"GET /metrics HTTP/1.1\r\n")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 60)
    writer.close()
    served = await serve(head_s=60, send_s=0.05)
    # An answer larger than what the kernel takes for somebody who does not read.
    served.stats.lost_blocks["x" * (16 << 20)] = 1
    deaf_reader, deaf = await served.connect()
    deaf.transport.pause_reading()  # type: ignore[attr-defined]
    deaf.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    await until(lambda: not (served.scrapes < 1 or served.server.connections))
    deaf.close()
    del deaf_reader


async def test_many_scrapes_at_once_are_all_answered_one_after_the_other(serve: Callable[..., Served]) -> None:
    served = await serve()
    pages = await asyncio.gather(*(served.scrape() for _ in range(20)))
    assert all(b"prefixd_leases 2.0" in page for page in pages)


async def test_out_of_descriptors_it_waits_and_does_not_spin(serve: Callable[..., Served]) -> None:
    """The port stays readable: without a pause the loop would try to accept for ever, at full speed."""
    served = await serve()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    loop = asyncio.get_running_loop()
    accepts: list[float] = []
    accept = served.server._accept
    served.server._accept = lambda listener: (accepts.append(loop.time()), accept(listener))  # type: ignore
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
    extra.write(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert b"prefixd_leases" in await asyncio.wait_for(extra_reader.read(), 60), "accepted when there are some again"
    for each in (writer, extra):
        each.close()
    del reader


async def test_closing_ends_what_is_open(serve: Callable[..., Served]) -> None:
    served = await serve()
    reader, writer = await served.connect()
    await until(lambda: served.server.connections)
    await served.server.close()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 60)
    with pytest.raises(ConnectionError):
        await served.connect()
    writer.close()


def test_no_thread_for_it_is_said(no_more_threads: Callable[[], AbstractContextManager[list[str]]]) -> None:
    async def take() -> pb.StatsResponse:
        return pb.StatsResponse()

    with no_more_threads(), pytest.raises(OutOfMemoryError, match="ulimit -u"):
        MetricsServer(take)
