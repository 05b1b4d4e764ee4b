"""A process is forked: a client works there, or says as it is made that it does not. Nothing hangs, nothing crashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from prefixd.base.errors import ConfigError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncClient, Client, ClientClosed, ForkedProcess
from prefixd.client.connecting import forks
from prefixd.integrations.engine.daemon_link import Link
from tests.integrations.engine.conftest import LOG


@pytest.mark.slow
def test_a_forked_child_works_or_is_told_why_not(daemon: DaemonProcess) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    command = [sys.executable, "-m", "tests.client.connecting.fork_child", daemon.address]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert {each["case"]: each["status"] for each in cases if each["status"]} == {}, "none was ended by a signal"
    said = {each["case"]: each["said"] for each in cases}
    works = ("nothing used before", "spawned", "the parent", "idle")
    assert {case: said.pop(case) for case in works} == dict.fromkeys(works, "0")
    for case in ("inherited, closed in the child", "inherited, async, closed in the child"):
        assert said.pop(case) == "None"
    assert len(said) == 5
    for case, told in said.items():
        assert told.startswith("ForkedProcess: ") and "'spawn'" in told and "\n" not in told, case


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that was forked while gRPC was in use."""
    fork = forks._Fork()
    poller = threading.Event()
    thread = threading.Thread(target=poller.wait, name="Thread-1 (_poll_wrapper)")
    thread.start()
    fork.before()
    poller.set()
    thread.join()
    fork.in_child()
    fork.before()
    fork.in_child()  # of its own children
    monkeypatch.setattr(forks, "_fork", fork)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_no_client_is_made_where_none_works(forked: None, kind: type) -> None:
    threads = threading.active_count()
    with pytest.raises(ForkedProcess, match="gRPC was in use when it was forked; start the process with"):
        kind("unix:/nowhere")
    assert threading.active_count() == threads and issubclass(ForkedProcess, ClientClosed)


def test_an_engine_says_so_at_its_start(forked: None) -> None:
    with pytest.raises(ConfigError, match="no client works in this process"):
        Link("unix:/nowhere", "test", 1.0, LOG)


def test_a_fork_without_grpc_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Clients of other tests may have left gRPC's poller in this process.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])
    fork = forks._Fork()
    fork.before()
    fork.in_child()
    assert not fork.broken
