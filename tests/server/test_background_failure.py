"""A background task that fails ends the daemon: half a daemon would take calls and never answer."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from prefixd.cache.background.write_back import WriteBack
from prefixd.cache.ghosts.prefix_hashes import PrefixHashes
from prefixd.client import AsyncClient, NamespaceSpec, PartSpec
from prefixd.server.daemon import Endpoints, serve
from prefixd.server.startup import set_aside_index
from prefixd.settings import Settings
from tests.waiting import until


@pytest.fixture
def signals() -> Iterator[None]:
    """As they are, once the test is over: a daemon that has ended leaves them ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def settings_in(path: Path, **more: Any) -> Settings:
    places = {"data_dir": path / "data", "server.socket": path / "prefixd.sock"}
    return Settings.load(None, {**places, "cpu.bytes": "1MiB", "disk.bytes": "1MiB", **more}, {})


@pytest.mark.usefixtures("signals")
async def test_the_daemon_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def defect(self: WriteBack) -> bool:
        raise RuntimeError("a defect in write-back")

    monkeypatch.setattr(WriteBack, "_batch", defect)
    settings = settings_in(tmp_path)
    ready: asyncio.Future[Endpoints] = asyncio.get_running_loop().create_future()
    daemon = asyncio.create_task(serve(settings, ready=ready.set_result))
    async with asyncio.timeout(100):
        endpoints = await ready
        async with AsyncClient(f"unix:{endpoints.socket}") as client:
            cache = await client.register(NamespaceSpec("model", block_tokens=4, parts=(PartSpec("all", 0, 4096),)))
            await cache.store([1, 2, 3, 4], bytes(4096))
            assert await daemon == 1
    assert "task write-back failed" in caplog.text


@pytest.mark.usefixtures("signals")
async def test_a_failure_of_figures_does_not_end_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def short(self: PrefixHashes, *_: object) -> None:
        raise MemoryError("a shortage")

    monkeypatch.setattr(PrefixHashes, "of_blocks", short)
    ready: asyncio.Future[Endpoints] = asyncio.get_running_loop().create_future()
    daemon = asyncio.create_task(serve(settings_in(tmp_path), ready=ready.set_result))
    async with asyncio.timeout(100):
        endpoints = await ready
        async with AsyncClient(f"unix:{endpoints.socket}") as client:
            cache = await client.register(NamespaceSpec("model", block_tokens=4, parts=(PartSpec("all", 0, 4096),)))
            await cache.store([1, 2, 3, 4], bytes(4096))
            await until(lambda: "task ghosts failed" in caplog.text)
            assert (await cache.match([1, 2, 3, 4])).blocks == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert await daemon == 0


@pytest.mark.usefixtures("signals")
async def test_a_shortage_of_threads_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once the daemon takes calls there is no thread for anything: not for the scrubber, and not for a read."""
    settings = settings_in(tmp_path, **{"server.metrics": "127.0.0.1:0", "disk.bytes": "4MiB"})
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Endpoints] = loop.create_future()
    really, refused = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if ready.done():
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        really(thread)

    monkeypatch.setattr(set_aside_index, "_WATCH_S", 3600.0)  # it looks in a thread
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        daemon = asyncio.create_task(serve(settings, ready=ready.set_result))
        async with asyncio.timeout(100):
            endpoints = await ready
            async with AsyncClient(f"unix:{endpoints.socket}", memory="streamed") as client:
                spec = NamespaceSpec("model", block_tokens=4, parts=(PartSpec("all", 0, 65536),))
                cache = await client.register(spec)
                for first in range(0, 160, 16):  # more than the CPU tier has room for
                    await cache.store(range(first, first + 16), bytes([first]) * (4 * 65536), durable=True)
                kept = bytearray(4 * 65536)
                assert await cache.load(range(16, 32), kept) == 4 and bytes(kept) == bytes([16]) * (4 * 65536)
            port = urlsplit(str(endpoints.metrics)).port
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert b"prefixd_scrub" in await reader.read()
            writer.close()
            assert not daemon.done()
            os.kill(os.getpid(), signal.SIGTERM)
            assert await daemon == 0
    assert set(refused) <= {"prefixd-slabs_0"}, "nothing else starts threads while it serves"
