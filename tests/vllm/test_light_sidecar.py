"""A daemon in an environment without torch (`pip install 'prefixd[daemon]'`) serves a real vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.harness import BenchmarkError
from benchmarks.wheels import build_wheel, make_environment
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.vllm.served import DAEMON, Expected, NewRequests, StartEngine, cacheable, run, wait_until_back
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    folder = tmp_path_factory.mktemp("sidecar")
    try:
        python = make_environment(folder / "environment", build_wheel(folder), "daemon")
    except BenchmarkError as error:
        pytest.skip(f"no wheel can be built and installed here: {error}")
    assert not list(folder.glob("environment/lib/python*/site-packages/torch"))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        # -P: not the version of the folder that the tests run in.
        with DaemonProcess(DAEMON, python=python, program=("-P", "-m", "prefixd.cli.tethered")) as running:
            yield running


def test_hits_after_a_restart_of_the_daemon(
    daemon: DaemonProcess, llama: Path, make_engine: StartEngine, expected: Expected, new_requests: NewRequests
) -> None:
    requests, (other,) = new_requests(300, 129), new_requests(200)
    with make_engine(llama, daemon) as engine:
        cold, no_hits = run(engine, requests)
        run(engine, [other])
        daemon.restart()
        # The engine finds out with its next request.
        wait_until(lambda: run(engine, [other])[1], "no hits after the daemon's return")
        wait_until_back(engine)
        warm, hits = run(engine, requests)
    assert cold == warm == expected(requests)
    assert (no_hits, hits) == (0, cacheable(requests))
