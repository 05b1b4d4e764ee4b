"""Copies that several threads make together: every item once, all over at the return, and never later."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.engine.pages_by_key import shared_copies
from prefixd.integrations.engine.pages_by_key.shared_copies import SharedCopies
from prefixd_swap import OutOfMemoryError

LARGE = 1 << 30
_S = 60.0


@pytest.fixture
def copies() -> Iterator[SharedCopies]:
    copies = SharedCopies()
    yield copies
    copies.close()


@given(st.integers(0, 50), st.integers(0, 1 << 30), st.integers(1, 4))
def test_each_item_is_copied_once_in_runs_of_neighbours(items: int, nbytes: int, beside: int) -> None:
    runs: list[Sequence[int]] = []
    copies = SharedCopies(beside)
    copies.copy(runs.append, range(items), nbytes)
    copies.close()
    assert sorted(item for run in runs for item in run) == list(range(items))
    assert all(list(run) == list(range(run[0], run[0] + len(run))) for run in runs if run)


def test_the_caller_and_another_thread_copy_at_once(copies: SharedCopies) -> None:
    both = threading.Barrier(2)
    threads: set[int] = set()

    def copy(_: Sequence[int]) -> None:
        threads.add(threading.get_ident())
        both.wait(_S)

    copies.copy(copy, range(2), LARGE)
    assert len(threads) == 2 and threading.get_ident() in threads


def test_what_is_small_starts_no_thread(copies: SharedCopies) -> None:
    before = set(threading.enumerate())
    copies.copy(lambda run: None, range(64), 1 << 20)
    assert set(threading.enumerate()) <= before, "those of other tests may end meanwhile"


class UnderWay:
    """A copy that another thread has under way when the caller's ends, until `go_on` is set."""

    def __init__(self, caller: Callable[[], None]) -> None:
        self.begun: list[Sequence[int]] = []
        self.ended: list[Sequence[int]] = []
        self.go_on = threading.Event()
        self._caller = caller
        self._mine = threading.get_ident()
        self._under_way = threading.Event()

    def __call__(self, run: Sequence[int]) -> None:
        if threading.get_ident() == self._mine:
            assert self._under_way.wait(_S)
            self._caller()
            return
        self.begun.append(run)
        self._under_way.set()
        assert self.go_on.wait(_S)
        time.sleep(0.01)
        self.ended.append(run)


def test_a_copy_that_fails_is_over_when_it_is_raised(copies: SharedCopies) -> None:
    def fail() -> None:
        copy.go_on.set()
        raise ValueError("the lease is over")

    copy = UnderWay(fail)
    with pytest.raises(ValueError, match="the lease is over"):
        copies.copy(copy, range(100), LARGE)
    assert copy.begun == copy.ended, "what was under way was finished"
    assert 1 <= len(copy.begun) < 99, "the rest never began"


def test_what_another_thread_raises_reaches_the_caller(copies: SharedCopies) -> None:
    failed = threading.Event()
    mine = threading.get_ident()

    def copy(_: Sequence[int]) -> None:
        if threading.get_ident() == mine:
            assert failed.wait(_S)
            return
        failed.set()
        raise ValueError("the lease is over")

    with pytest.raises(ValueError, match="the lease is over"):
        copies.copy(copy, range(2), LARGE)


def test_a_caller_that_is_interrupted_leaves_no_copy_behind(copies: SharedCopies) -> None:
    mine = threading.get_ident()
    copy = UnderWay(threading.Timer(0.1, signal.pthread_kill, (mine, signal.SIGUSR1)).start)

    def interrupt(*_: object) -> None:
        threading.Timer(0.1, copy.go_on.set).start()
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            copies.copy(copy, range(2), LARGE)
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert copy.begun == copy.ended and len(copy.ended) == 1


def test_an_interpreter_that_ends_lets_the_caller_copy_alone() -> None:
    script = """
import threading, time
from prefixd.integrations.engine.pages_by_key.shared_copies import SharedCopies
copies, copied = SharedCopies(), []
copies.copy(lambda run: None, range(4), 1 << 30)
def late():
    threading.main_thread().join()
    copies.copy(copied.extend, range(4), 1 << 30)
    print(copied)
threading.Thread(target=late).start()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=_S, check=False)
    assert (ended.stdout, ended.stderr) == ("[0, 1, 2, 3]\n", "")


def test_nobody_waits_for_the_copies_of_others(copies: SharedCopies) -> None:
    taken, go_on = threading.Event(), threading.Event()
    mine = threading.get_ident()

    def hold(_: Sequence[int]) -> None:
        taken.set()
        assert go_on.wait(_S)

    other = threading.Thread(target=lambda: copies.copy(hold, range(2), LARGE))
    other.start()
    try:
        assert taken.wait(_S)
        threads: list[int] = []
        while_held: list[Sequence[int]] = []

        def copy(run: Sequence[int]) -> None:
            threads.append(threading.get_ident())
            while_held.append(run)

        copies.copy(copy, range(10), LARGE)
        assert sorted(item for run in while_held for item in run) == list(range(10))
        assert other.is_alive()
        assert mine in threads
    finally:
        go_on.set()
        other.join()


def test_copies_go_on_alone_without_threads_and_after_the_end(
    copies: SharedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(count: int, name: str) -> None:
        raise OutOfMemoryError("no more threads")

    threads: set[int] = set()

    def copy(_: Sequence[int]) -> None:
        threads.add(threading.get_ident())

    monkeypatch.setattr(shared_copies, "started_threads", refused)
    copies.copy(copy, range(10), LARGE)
    monkeypatch.undo()
    copies.close()
    copies.copy(copy, range(10), LARGE)
    assert threads == {threading.get_ident()}
