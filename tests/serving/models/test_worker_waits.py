"""A worker that ends while it waits for its memory: another model's worker has not said yet what it needs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prefixd.cache import TieredCache, Troubles
from prefixd.serving.models import worker_process
from prefixd.serving.models.models import Models
from prefixd.serving.models.worker_process import WorkerProcess, WorkerState
from prefixd.settings import Settings
from prefixd.worker_protocol.framing import encode
from prefixd.worker_protocol.protocol import Failed, Hello
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap import FramePool
from tests.hello import HELLO
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

SAYS_AND_WAITS = """
import os, sys
os.write(int(sys.argv[1]), bytes.fromhex(sys.argv[2]))
os.read(int(sys.argv[1]), 1)
"""
SAYS_MORE_AND_ENDS = """
import os, sys
os.write(int(sys.argv[1]), bytes.fromhex(sys.argv[2]) + bytes.fromhex(sys.argv[3]))
os._exit(1)
"""


class Supervised:
    """A supervisor whose workers run `program`, and are never given memory."""

    def __init__(self, restart_limit: int) -> None:
        self.program = SAYS_AND_WAITS
        self.deaths: list[tuple[str, bool]] = []
        self.asking = 0  # workers that wait
        self.worker = WorkerProcess(
            WorkerSettings(model="/nowhere"),
            restart_limit,
            on_hello=self._on_hello,
            on_ready=lambda: pytest.fail("it was given nothing"),
            on_step=lambda _: None,
            on_done=lambda _: None,
            on_death=lambda why, gave_up: self.deaths.append((why, gave_up)),
            troubles=Troubles(time.monotonic),
            part="worker of gemma",
        )

    async def _on_hello(self, hello: Hello) -> FramePool:
        assert hello == HELLO
        self.asking += 1
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.asking -= 1
        raise AssertionError

    async def waits(self) -> None:
        await until(lambda: self.asking)

    async def died(self, times: int) -> None:
        await until(lambda: len(self.deaths) >= times)
        assert not self.asking, "the one that is gone waits no more"


def start_instead(monkeypatch: pytest.MonkeyPatch, program: Callable[[], str]) -> None:
    """Has all workers run `program()`."""
    started = asyncio.create_subprocess_exec

    async def start(*arguments: Any, pass_fds: list[int], **_: Any) -> asyncio.subprocess.Process:
        said = [encode(message).hex() for message in (HELLO, Failed("it has no weights"))]
        command = [sys.executable, "-S", "-c", program(), str(pass_fds[0]), *said]
        return await started(*command, pass_fds=pass_fds, stdin=asyncio.subprocess.DEVNULL)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    monkeypatch.setattr(worker_process, "_RESTART_PAUSE_S", 0.0)


@pytest.fixture
async def supervised(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Supervised]:
    made = Supervised(restart_limit=1)
    start_instead(monkeypatch, lambda: made.program)
    made.worker.start()
    yield made
    await asyncio.wait_for(made.worker.stop(), WAIT_S)
    assert not made.worker.pid


async def test_it_is_missed_at_once_and_started_again(supervised: Supervised, caplog: pytest.LogCaptureFixture) -> None:
    await supervised.waits()
    os.kill(supervised.worker.pid, signal.SIGKILL)
    await supervised.died(1)
    assert supervised.deaths == [("signal 9", False)] and supervised.worker.state is WorkerState.STARTING
    assert "the worker of gemma died (signal 9); starting another" in caplog.text
    await supervised.waits()
    assert supervised.worker.restarts == 1
    os.kill(supervised.worker.pid, signal.SIGKILL)
    await supervised.died(2)
    assert supervised.deaths[1] == ("signal 9", True), "more often than the limit"
    assert not await asyncio.wait_for(supervised.worker.settled(), WAIT_S)


async def test_one_that_says_why_it_ends_would_end_again(supervised: Supervised) -> None:
    await supervised.waits()
    supervised.program = SAYS_MORE_AND_ENDS
    os.kill(supervised.worker.pid, signal.SIGKILL)
    await supervised.died(2)
    assert supervised.deaths[1] == ("it has no weights", True) and supervised.worker.restarts == 1


async def test_one_that_waits_ends_with_the_daemon(supervised: Supervised) -> None:
    await supervised.waits()
    await asyncio.wait_for(supervised.worker.stop(), WAIT_S)
    assert not supervised.asking and not supervised.deaths


async def test_the_other_model_gets_the_tier_when_one_dies_waiting_more_often_than_it_may(
    cache: TieredCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_instead(monkeypatch, lambda: SAYS_AND_WAITS)
    for name in ("llama", "gemma"):
        (tmp_path / name).mkdir()
    worker = {"model": tmp_path / "llama", "more_models": str(tmp_path / "gemma"), "restart_limit": 1}
    settings = Settings.model_validate(
        {"data_dir": tmp_path, "gpu": {"bytes": 1 << 20, "device": "cpu"}, "worker": worker}
    )
    models = Models(settings, "cpu", cache, time.monotonic)
    llama, gemma = models.hosts.values()
    llama.worker.start()
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            await until(lambda: "llama" in models.gpu._hellos)
            os.kill(llama.worker.pid, signal.SIGKILL)
            await until(lambda: "llama" not in models.gpu._hellos)
        assert not await llama.worker.settled() and llama.worker.failure == "signal 9"
        pool = await gemma._on_hello(msgspec.structs.replace(HELLO, frame_bytes=12288))
        assert pool.frame_bytes == 12288, "no part of llama's 4096"
        assert "worker of llama" in cache.tiers.troubles
        await models.stop()
