"""Pools whose threads run before there is work."""

from __future__ import annotations

import threading

import pytest

from prefixd_swap import OutOfMemoryError, started_threads


def test_all_threads_run_before_the_first_job() -> None:
    with started_threads(3, "prefixd-test") as pool:
        running = [thread for thread in threading.enumerate() if thread.name.startswith("prefixd-test")]
        assert len(running) == 3
        assert list(pool.map(abs, [-1, 2])) == [1, 2]


def test_threads_that_cannot_be_had_are_said_and_none_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before, start, started = threading.active_count(), threading.Thread.start, []

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
    assert threading.active_count() == before
