"""Daemons and controllers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from benchmarks.engines.sglang_controller import Controller, Shape, host_pool
from benchmarks.engines.sglang_without_gpu import sglang
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.sglang.served import DAEMON, options

sglang("srt.mem_cache.hybrid_cache.hybrid_cache_controller")  # takes seconds: no test measures it

MakeController = Callable[..., Controller]


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(DAEMON) as running:
        yield running


@pytest.fixture
def own_daemon() -> Iterator[DaemonProcess]:
    """For tests that kill it."""
    with DaemonProcess(DAEMON) as running:
        yield running


@pytest.fixture
def make_controller() -> Iterator[MakeController]:
    """`make_controller(daemon, shape=Shape(), pool=None, prefixd={}, **arguments)`: a Controller; closed at the end."""
    made: list[Controller] = []

    def make(
        daemon: DaemonProcess,
        shape: Shape = Shape(),  # noqa: B008
        *,
        pool: Any = None,
        v1: bool = True,
        prefixd: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Controller:
        extra = options(daemon.address, v1=v1, **(prefixd or {}))
        mla = arguments.pop("mla", shape.kind == "mla")
        controller = Controller(pool if pool is not None else host_pool(shape), extra=extra, mla=mla, **arguments)
        made.append(controller)
        return controller

    yield make
    for controller in made:
        controller.close()
