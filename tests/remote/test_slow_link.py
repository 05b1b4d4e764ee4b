"""The proxy is as slow as it says, and forwards every byte."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.stand_ins.slow_link import SlowLink
from tests.remote.processes import free_port


@asynccontextmanager
async def echo() -> AsyncIterator[int]:
    """A server that sends back what it gets."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def round_trip(port: int, data: bytes) -> float:
    """Seconds until all of it has come back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began_s = time.monotonic()
    writer.write(data)
    writer.write_eof()
    assert await reader.read(-1) == data
    writer.close()
    return time.monotonic() - began_s


async def test_latency_and_shared_bandwidth() -> None:
    async with echo() as port:
        with SlowLink("127.0.0.1", port, latency_s=0.03, bytes_per_s=10e6) as link:
            trips_s = [await round_trip(link.port, b"x") for _ in range(5)]
            assert min(trips_s) >= 0.06
            data = os.urandom(1_000_000)
            took_s = await asyncio.gather(round_trip(link.port, data), round_trip(link.port, data))
            assert max(took_s) >= 0.25  # 2 MB at 10 MB/s, both directions at once
            assert link.forwarded_bytes == [2_000_005, 2_000_005]


async def test_nobody_listens_behind_it() -> None:
    with SlowLink("127.0.0.1", free_port()) as link:
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


async def test_leaving_cuts_connections() -> None:
    async with echo() as port:
        with SlowLink("127.0.0.1", port) as link:
            reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()


@pytest.mark.parametrize("wrong", [{"latency_s": -1.0}, {"bytes_per_s": 0.0}, {"latency_s": float("nan")}])
def test_what_no_link_can_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="set 0 or more"):
        SlowLink("127.0.0.1", 1, **wrong)
