"""When `/readyz` says that the daemon takes work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from prefixd.server.health_status import HealthStatus
from prefixd.serving.models.worker_process import WorkerProcess, WorkerState


def worker(state: WorkerState, failure: str = "") -> Any:
    made = object.__new__(WorkerProcess)
    made.state, made.failure = state, failure
    return SimpleNamespace(worker=made)


def not_ready(hosts: dict[str, Any] | None, *, draining: bool = False) -> list[str]:
    drains = asyncio.Event()
    if draining:
        drains.set()
    unused: Any = None
    models: Any = None if hosts is None else SimpleNamespace(hosts=hosts)
    return HealthStatus(unused, unused, models, drains).not_ready()


@pytest.mark.parametrize(
    ("hosts", "reasons"),
    [
        (None, []),
        ({"a": worker(WorkerState.READY)}, []),
        ({"a": worker(WorkerState.STARTING)}, ["the model a loads"]),
        ({"a": worker(WorkerState.FAILED, "no room")}, ["the worker of a was given up (no room)"]),
        ({"a": worker(WorkerState.STARTING), "b": worker(WorkerState.READY)}, []),
        (
            {"a": worker(WorkerState.STARTING), "b": worker(WorkerState.FAILED, "no room")},
            ["the model a loads", "the worker of b was given up (no room)"],
        ),
    ],
)
def test_a_daemon_is_ready_when_one_of_its_workers_is(hosts: dict[str, Any] | None, reasons: list[str]) -> None:
    assert not_ready(hosts) == reasons
    assert not_ready(hosts, draining=True) == ["the daemon drains and takes no new work"]
