"""A worker that hangs is told from one that computes long, one that waits, and a daemon that stood still."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, Sampling
from prefixd.client.inference import Tokens
from prefixd.serving.models.step_watchdog import StepWatchdog
from prefixd.v1.admin_pb2 import StatsResponse
from tests.waiting import wait_until

LIMIT_S = 8.0


def looks(watchdog: StepWatchdog, begin_s: int, end_s: int) -> list[tuple[int, str]]:
    """What it says each second, but for what says nothing."""
    said = [(now_s, watchdog.check(float(now_s))) for now_s in range(begin_s, end_s)]
    return [each for each in said if each[1] != "wait"]


def test_a_worker_that_says_nothing_is_asked_once_and_hangs_when_it_does_not_answer() -> None:
    watchdog = StepWatchdog(LIMIT_S)
    watchdog.heard(0.0)
    assert looks(watchdog, 1, 14) == [(4, "ask"), (12, "hangs"), (13, "hangs")]


def test_whoever_answers_or_reports_steps_goes_on() -> None:
    watchdog = StepWatchdog(LIMIT_S)
    watchdog.heard(0.0)
    assert looks(watchdog, 1, 10) == [(4, "ask")]
    watchdog.heard(10.0)
    assert looks(watchdog, 11, 22) == [(14, "ask")]


def test_a_daemon_that_stood_still_blames_nobody() -> None:
    watchdog = StepWatchdog(LIMIT_S)
    watchdog.heard(0.0)
    assert looks(watchdog, 1, 6) == [(4, "ask")]
    assert watchdog.check(5000.0) == "wait"
    assert looks(watchdog, 5001, 5008) == [(5003, "hangs"), *[(at, "hangs") for at in range(5004, 5008)]]


@given(st.lists(st.tuples(st.floats(0.01, 30.0), st.booleans()), max_size=60))
def test_nobody_hangs_before_the_limit_since_the_last_word(events: list[tuple[float, bool]]) -> None:
    watchdog, now_s, heard_s = StepWatchdog(LIMIT_S), 0.0, 0.0
    watchdog.heard(0.0)
    for seconds, speaks in events:
        now_s += seconds
        if speaks:
            watchdog.heard(now_s)
            heard_s = now_s
        elif watchdog.check(now_s) == "hangs":
            assert now_s - heard_s >= LIMIT_S


@pytest.mark.slow
def test_a_worker_that_hangs_is_killed_and_its_request_runs_on_another() -> None:
    settings = {"worker.embedded": True, "worker.threads": 1, "worker.step_seconds": 2, "gpu.device": "cpu"}
    sizes = {"gpu.bytes": "4MiB", "cpu.bytes": "4MiB", "disk.bytes": 0}
    with DaemonProcess({**settings, **sizes}) as daemon, Client(daemon.address) as client:

        def asked(prompt: list[int]) -> list[int]:
            events = client.generate(prompt, sampling=Sampling(max_tokens=4, ignore_eos=True), timeout_s=60.0)
            return [token for event in events if isinstance(event, Tokens) for token in event.token_ids]

        def until_stopped(before: StatsResponse) -> StatsResponse:
            wait_until(lambda: client.stats().worker.restarts != before.worker.restarts, "it still hangs")
            return client.stats()

        expected = asked([1, 2, 3])
        before = client.stats()
        os.kill(before.worker.pid, signal.SIGSTOP)
        troubles = until_stopped(before).troubles
        assert [trouble.part for trouble in troubles] == ["worker's step"]
        assert "it answered nothing for 2 s: a step hangs, and it was killed" in troubles[0].what
        assert "worker.step_seconds" in troubles[0].remedy
        assert asked([1, 2, 3]) == expected
        assert not client.stats().troubles, "another one has done its work"
