"""Settings for every test."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from hypothesis import HealthCheck, settings

# A slow machine is no defect: no deadline, no complaint. Always the same examples: a failure comes back.
settings.register_profile("prefixd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prefixd")

# A script's background jobs ignore SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def no_more_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], AbstractContextManager[list[str]]]:
    """`with no_more_threads() as refused:` the system gives this process no thread; `refused` has their names."""

    @contextmanager
    def shortage() -> Iterator[list[str]]:
        refused: list[str] = []

        def refuse(thread: threading.Thread) -> None:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            yield refused

    return shortage
