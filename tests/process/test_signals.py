"""What SIGINT, SIGTERM and SIGHUP do, by the clock and without a process of their own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from prefixd.process import signals
from prefixd.process.signals import ENDING, SAME_SIGNAL_S, DaemonSignals


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    numbers = (*ENDING, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses with which the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


@pytest.mark.parametrize("number", ENDING)
def test_until_there_is_something_to_undo_a_signal_ends_at_once(number: signal.Signals, exits: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.end_at_once()
    signal.raise_signal(number)
    assert exits == [128 + number]


def test_what_is_to_be_undone_is_interrupted(exits: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signals.end_at_once()
    with pytest.raises(KeyboardInterrupt), signals.interruptible():
        signal.raise_signal(signal.SIGINT)
    assert exits == []
    signal.raise_signal(signal.SIGINT)
    assert exits == [130]


def test_a_scripts_background_job_ignores_ctrl_c(exits: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals.end_at_once()
    with signals.interruptible():
        signal.raise_signal(signal.SIGINT)
    assert exits == []


def test_nothing_changes_where_the_program_is_another_ones() -> None:
    """The commands run within tests and notebooks, too."""

    def handler(_number: int, _frame: object) -> None: ...

    signal.signal(signal.SIGINT, handler)
    with signals.interruptible():
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("second", ENDING)
def test_the_second_signal_ends_the_daemon(
    second: signal.Signals, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    now_s = 100.0
    daemon = DaemonSignals(lambda: asked.append("end"), lambda: now_s)
    daemon.install()
    signal.raise_signal(signal.SIGTERM)
    assert (asked, exits) == (["end"], [])
    now_s += SAME_SIGNAL_S  # from `timeout`, to the process and to its group
    signal.raise_signal(signal.SIGTERM)
    assert (asked, exits) == (["end"], [])
    now_s += 0.01
    signal.raise_signal(second)
    assert (asked, exits) == (["end"], [128 + second])
    assert capfd.readouterr().err == "prefixd: a second signal: ending without finishing what runs\n"


def test_when_the_daemon_is_over_its_status_stands(exits: list[int]) -> None:
    asked: list[str] = []
    daemon = DaemonSignals(lambda: asked.append("end"), lambda: 0.0)
    daemon.install()
    daemon.ignore()
    for number in ENDING:
        signal.raise_signal(number)
    assert (asked, exits) == ([], [])


def test_a_daemon_that_never_took_calls_leaves_the_signals_alone() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    DaemonSignals(lambda: None).ignore()
    assert [signal.getsignal(number) for number in ENDING] == before


def test_a_hangup_waits_for_who_can_use_it() -> None:
    heard: list[str] = []
    signals.hold_hangups()
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)  # pytest-xdist's other thread blocks none
        assert signal.SIGHUP in signal.sigpending()
        daemon = DaemonSignals(lambda: None)
        daemon.take_hangups(lambda: heard.append("reload"))
        assert heard == ["reload"]
        signal.raise_signal(signal.SIGHUP)
        daemon.ignore_hangups()
        signal.raise_signal(signal.SIGHUP)
        assert heard == ["reload"] * 2
    finally:
        signals.release_hangups()
