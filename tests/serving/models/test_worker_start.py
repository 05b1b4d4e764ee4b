"""A machine that has no process or descriptor to spare: the worker is started when it has."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from prefixd.cache import Troubles
from prefixd.serving.models import worker_process
from prefixd.serving.models.worker_process import WorkerProcess, WorkerState
from prefixd.settings import Settings
from prefixd.worker_protocol.protocol import Note, Ready
from prefixd.worker_protocol.worker_settings import WorkerSettings
from tests.waiting import until


@pytest.mark.parametrize(
    ("shortage", "words"),
    [
        (OSError(errno.EMFILE, os.strerror(errno.EMFILE)), os.strerror(errno.EMFILE)),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), os.strerror(errno.ENOMEM)),
        (OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)), os.strerror(errno.EAGAIN)),
        (RuntimeError("can't start new thread"), "ulimit -u"),
    ],
)
async def test_want_of_means_is_no_death(shortage: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "_SCARCE_PAUSE_S", 0.001)
    attempts = 0

    async def refuse(*_: Any, **__: Any) -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= 20:
            raise shortage
        raise FileNotFoundError(errno.ENOENT, "no such program")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    troubles = Troubles(time.monotonic)
    told: list[str] = []
    troubles.listeners.append(lambda: told.append(troubles.what(worker_process.PART)))
    deaths: list[tuple[str, bool]] = []
    worker = WorkerProcess(
        WorkerSettings(model="/nowhere"),
        0,
        on_hello=lambda *_: pytest.fail("there is no worker"),
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
    assert len(told) == 3 and words in told[0] and "; " in told[0]
    assert told[1] == "", "the shortage ended"
    assert "given up" in told[2] and "no such program" in told[2]
    assert len(deaths) == 1 and "no such program" in deaths[0][0], "only that one was a death"
    await worker.stop()
    await asyncio.sleep(0)  # transports close in the loop's next round
    assert not set(os.listdir("/proc/self/fd")) - descriptors


async def test_a_worker_is_started_once_there_is_a_thread_for_it(
    monkeypatch: pytest.MonkeyPatch, no_more_threads: Callable[[], AbstractContextManager[list[str]]]
) -> None:
    async def no_program(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such program")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_program)
    monkeypatch.setattr(worker_process, "_SCARCE_PAUSE_S", 0.001)
    troubles = Troubles(time.monotonic)
    deaths: list[str] = []
    worker = WorkerProcess(
        WorkerSettings(model="/nowhere"),
        0,
        on_hello=lambda *_: pytest.fail("there is no model"),
        on_ready=lambda: None,
        on_step=lambda _: None,
        on_done=lambda _: None,
        on_death=lambda why, gave_up: deaths.append(why),
        troubles=troubles,
    )
    with no_more_threads() as refused:
        worker.start()
        await until(lambda: len(refused) >= 3)
        assert "1 threads cannot be started" in troubles.what(worker_process.PART) and not deaths
    assert not await asyncio.wait_for(worker.settled(), 60)
    assert len(deaths) == 1 and "no such program" in deaths[0]
    await worker.stop()


async def test_a_worker_that_gives_up_its_graphs_says_so_once_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    ready: list[None] = []
    worker = WorkerProcess(
        WorkerSettings(model="/nowhere"),
        0,
        on_hello=lambda *_: pytest.fail("there is no worker"),
        on_ready=lambda: ready.append(None),
        on_step=lambda _: None,
        on_done=lambda _: None,
        on_death=lambda why, gave_up: pytest.fail(why),
        troubles=Troubles(time.monotonic),
    )
    caplog.set_level("INFO")
    await worker._handle(Note("captured 3 of 9 CUDA graphs in 5.0 s"))
    await worker._handle(Ready(True, operators="merged", operators_reason="compiled functions: no compiler"))
    await worker._handle(Ready(False, "a decode pass of 4 cannot be captured: no"))
    assert caplog.messages == [
        f"the {worker_process.PART}: captured 3 of 9 CUDA graphs in 5.0 s",
        "the model's operators are merged: compiled functions: no compiler",
        f"the {worker_process.PART} is ready",
        "decode steps are computed without CUDA graphs: a decode pass of 4 cannot be captured: no",
    ]
    assert len(ready) == 1 and worker.state is WorkerState.READY and not worker.ready.cuda_graphs


def test_a_gpu_has_defaults_of_its_own_where_nothing_is_set() -> None:
    def of(settings: Settings) -> tuple[object, ...]:
        return settings.gpu.bytes, settings.worker.max_running, settings.worker.max_step_tokens

    unset = Settings.load(None, {"worker.embedded": "true"}, {})
    assert of(unset.on_device("cuda:1")) == ("auto", 64, 4096)
    assert unset.on_device("cpu") is unset and of(unset) == (256 << 20, 8, 512)
    some = Settings.load(None, {"worker.embedded": "true", "worker.max_running": 8, "gpu.bytes": "256MiB"}, {})
    assert of(some.on_device("cuda:0")) == (256 << 20, 8, 4096), "what is set stays, also where it is a CPU's default"
