"""Settings for every test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, settings

from prefixd.base import heap

pytest_plugins = ["tests.daemons"]

# A slow machine is no defect: no deadline, no complaint. Always the same examples: a failure comes back.
settings.register_profile("prefixd", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("prefixd")

# A script's background jobs ignore SIGINT, and so would every process that a test starts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder whose path leaves room for a unix socket's name, which has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="pfx-") as name:
        yield Path(name)


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector the imports take half the time, and it then skips all that they have made."""
    with heap.imports():
        return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`make test-slow` begins with what takes longest, a file and rooms: its workers end at about the same time."""
    if config.getoption("markexpr") == "slow":
        first = ("swap/test_cuda_stand_in.py", "benchmarks", "serving", "worker")
        longest = [config.rootpath / "tests" / name for name in first]
        items.sort(key=lambda item: not any(item.path.is_relative_to(path) for path in longest))


_popen = subprocess.Popen.__init__
_STARTS = 1
"""Python processes that the tests of a file may start together unless they are marked slow: one daemon for all."""
_started: Counter[Path] = Counter()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Keeps `make test` short: to start a daemon takes a core for a second, with a model for five. Other runs, as those
    with vLLM and SGLang, may start what they like."""
    if item.get_closest_marker("slow") is not None or item.config.getoption("markexpr") != "not slow":
        return (yield)

    def count(self: subprocess.Popen[bytes], args: object, *rest: object, **options: object) -> None:
        program = args if isinstance(args, str | os.PathLike) else next(iter(cast(Iterable[object], args)))
        if program == sys.executable:
            _started[item.path] += 1
            if _started[item.path] > _STARTS:
                pytest.fail(f"{item.nodeid} starts a Python process; mark it with @pytest.mark.slow", pytrace=False)
        _popen(self, args, *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", count)
        return (yield)
