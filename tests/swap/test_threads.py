"""Pools whose threads run before there is work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from prefixd_swap import CpuArena, OutOfMemoryError, started_threads


def test_all_threads_run_before_the_first_job() -> None:
    with started_threads(3, "prefixd-test") as pool:
        running = [thread for thread in threading.enumerate() if thread.name.startswith("prefixd-test")]
        assert len(running) == 3
        assert list(pool.map(abs, [-1, 2])) == [1, 2]


def test_threads_that_cannot_be_had_are_said_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start, started = set(threading.enumerate()), threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OutOfMemoryError, match="4 threads cannot be started"):
        started_threads(4, "prefixd-test")
    for thread in started:
        thread.join(30)
    assert set(threading.enumerate()) <= before


def test_what_the_initializer_raises_is_raised_and_no_thread_stays() -> None:
    before = set(threading.enumerate())

    def fail() -> None:
        raise ValueError("no context")

    with pytest.raises(ValueError, match="no context"):
        started_threads(3, "prefixd-test", fail)
    assert set(threading.enumerate()) <= before


def test_every_thread_is_initialized() -> None:
    seen: list[int] = []
    with started_threads(3, "prefixd-test", lambda: seen.append(threading.get_ident())):
        assert len(set(seen)) == 3


def test_an_arena_without_a_thread_is_touched_on_use(
    no_more_threads: Callable[[], AbstractContextManager[list[str]]], caplog: pytest.LogCaptureFixture
) -> None:
    with no_more_threads() as refused:
        arena = CpuArena(1 << 20, populate=True)
    assert refused == ["prefixd-populate"] and "ulimit -u" in caplog.text
    assert not arena.wait_populated(1)
    arena.close()
