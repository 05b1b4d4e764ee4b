"""A background task that fails ends the daemon: half a daemon would take calls and never answer."""

from __future__ import annotations

import asyncio
import functools
import signal
from pathlib import Path

import pytest

from prefixd.cache.write_back import WriteBack
from prefixd.client import AsyncClient, NamespaceSpec, PartSpec
from prefixd.server.daemon import Endpoints, serve
from prefixd.settings import Settings


async def test_the_daemon_ends_with_status_1(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    async def defect(self: WriteBack) -> bool:
        raise RuntimeError("a defect in write-back")

    monkeypatch.setattr(WriteBack, "_batch", defect)
    for number in (signal.SIGTERM, signal.SIGINT):  # a daemon that has ended leaves them ignored
        request.addfinalizer(functools.partial(signal.signal, number, signal.getsignal(number)))
    settings = Settings.load(
        None,
        {
            "data_dir": tmp_path / "data",
            "server.socket": tmp_path / "prefixd.sock",
            "cpu.bytes": "1MiB",
            "disk.bytes": "1MiB",
        },
        {},
    )
    ready: asyncio.Future[Endpoints] = asyncio.get_running_loop().create_future()
    daemon = asyncio.create_task(serve(settings, ready=ready.set_result))
    async with asyncio.timeout(100):
        endpoints = await ready
        async with AsyncClient(f"unix:{endpoints.socket}") as client:
            cache = await client.register(NamespaceSpec("model", block_tokens=4, parts=(PartSpec("all", 0, 4096),)))
            await cache.store([1, 2, 3, 4], bytes(4096))
            assert await daemon == 1
    assert "task write-back failed" in caplog.text
