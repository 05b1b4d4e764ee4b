"""A machine that has no process or descriptor to spare: the worker is started when it has."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from typing import Any

import pytest

from prefixd.cache import Troubles
from prefixd.server import worker_process
from prefixd.server.worker_process import WorkerProcess, WorkerState
from prefixd.worker.settings import WorkerSettings


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EAGAIN])
async def test_want_of_means_is_no_death(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_SCARCE_PAUSE_S", 0.001)
    attempts = 0

    async def refuse(*_: Any, **__: Any) -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= 20:
            raise OSError(code, os.strerror(code))
        raise FileNotFoundError(errno.ENOENT, "no such program")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    troubles = Troubles(time.monotonic)
    told: list[str] = []
    troubles.listeners.append(lambda: told.append(troubles.what(worker_process.PART)))
    deaths: list[tuple[str, bool]] = []
    worker = WorkerProcess(
        WorkerSettings(model="/nowhere"),
        0,
        on_hello=lambda _: pytest.fail("there is no worker"),
        on_ready=lambda: None,
        on_step=lambda _: None,
        on_done=lambda _: None,
        on_death=lambda why, gave_up: deaths.append((why, gave_up)),
        troubles=troubles,
    )
    descriptors = set(os.listdir("/proc/self/fd"))
    worker.start()
    assert not await asyncio.wait_for(worker.settled(), 60)
    assert attempts == 21 and worker.state is WorkerState.FAILED
    assert len(told) == 1 and os.strerror(code) in told[0] and "; " in told[0]
    assert len(deaths) == 1 and "no such program" in deaths[0][0], "only that one was a death"
    await worker.stop()
    await asyncio.sleep(0)  # transports close in the loop's next round
    assert not set(os.listdir("/proc/self/fd")) - descriptors
