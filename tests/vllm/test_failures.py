"""The daemon or the engine dies, or the daemon stands still, at the worst moment: vLLM goes on, and nothing leaks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import (
    PATIENCE_S,
    Expected,
    NewRequests,
    StartEngine,
    Tokens,
    alter,
    always,
    cacheable,
    run,
    tokens_of,
    wait_until_back,
)
from tests.waiting import wait_until

LENGTHS = (700, 389, 512, 1000, 129)
RESUME_S = 30.0  # a question that comes too early, and its answer, take seconds on a busy machine


class Pauses:
    """Stops the copies of an engine half-way; see pausing_connector.py."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """While the context lasts, a "load" (a "save") stops in the middle of its copy."""
        pause, reached = self.folder / f"pause-{what}", self.folder / f"reached-{what}"
        reached.unlink(missing_ok=True)
        pause.touch()
        try:
            yield
        finally:
            pause.unlink(missing_ok=True)

    def wait(self, what: str) -> None:
        """Returns when one has stopped there."""
        wait_until((self.folder / f"reached-{what}").exists, f"no {what} came to its middle")


@pytest.fixture(scope="module")
def pauses(tmp_path_factory: pytest.TempPathFactory) -> Pauses:
    return Pauses(tmp_path_factory.mktemp("pauses"))


@pytest.fixture(autouse=True)
def daemon_runs(daemon: DaemonProcess) -> Iterator[None]:
    """A test that fails between the daemon's death and its return takes none of the others with it."""
    yield
    if not daemon.alive:
        daemon.kill()
        daemon.start()


@pytest.fixture(scope="module")
def make_pausing(daemon: DaemonProcess, make_engine: StartEngine, pauses: Pauses) -> StartEngine:
    """Engines whose copies can be stopped half-way, and which wait for as long as that takes."""

    def make(model: Path, *, ranks: int = 1, **options: Any) -> EngineProcess:
        transfer = {**always(daemon.address, **options), "kv_connector_module_path": "tests.vllm.pausing_connector"}
        environment = {"PAUSE_DIR": str(pauses.folder)}
        return make_engine(model, None, kv_transfer=transfer, env=environment, tensor_parallel_size=ranks)

    return make


@pytest.fixture(scope="module")
def pausing_engine(llama: Path, make_pausing: StartEngine) -> Iterator[EngineProcess]:
    with make_pausing(llama) as running:
        yield running


@pytest.fixture(scope="module")
def engine(llama: Path, daemon: DaemonProcess, make_engine: StartEngine) -> Iterator[EngineProcess]:
    """An engine with the connector's own idea of how long a daemon may take."""
    with make_engine(llama, daemon, {"timeout_s": 1.0}) as running:
        yield running


def hits_resume(engine: EngineProcess, requests: Sequence[EngineRequest]) -> float:
    """Asks for one of the requests again and again until it is hit; after how many seconds that one was asked for.

    How long the engine takes to answer is the machine's business.
    """
    began_s = time.monotonic()
    asked_s: list[float] = []

    def hit() -> int:
        asked_s.append(time.monotonic() - began_s)
        return run(engine, requests[-1:])[1]

    wait_until(hit, "no hits after the daemon's return")
    return asked_s[-1]


@pytest.mark.parametrize("where", ["load", "save"])
def test_daemon_killed_in_the_middle(
    where: str,
    pausing_engine: EngineProcess,
    daemon: DaemonProcess,
    pauses: Pauses,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    requests = new_requests(*LENGTHS)
    answers = expected(requests)
    if where == "load":
        run(pausing_engine, requests)
    _kill_the_daemon(pausing_engine, daemon, pauses, where, requests, answers)
    tokens, _ = run(pausing_engine, requests)
    again, hits = run(pausing_engine, requests)
    assert tokens == again == answers
    assert hits == cacheable(requests)


def test_daemon_killed_in_the_middle_of_a_load_that_a_step_waits_for(
    llama: Path,
    make_pausing: StartEngine,
    daemon: DaemonProcess,
    pauses: Pauses,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    requests = new_requests(*LENGTHS)
    with make_pausing(llama, load="layerwise") as engine:
        _kill_the_daemon_in_a_load(engine, daemon, pauses, requests, expected(requests))


def test_daemon_killed_in_the_middle_of_a_hybrid_models_load(
    gemma3: Path,
    make_pausing: StartEngine,
    daemon: DaemonProcess,
    pauses: Pauses,
    gemma3_expected: Expected,
    new_requests: NewRequests,
) -> None:
    requests = new_requests(*LENGTHS)
    with make_pausing(gemma3) as engine:
        _kill_the_daemon_in_a_load(engine, daemon, pauses, requests, gemma3_expected(requests))


def test_daemon_and_engine_killed_in_the_middle_of_a_tensor_parallel_load(
    llama: Path,
    make_pausing: StartEngine,
    daemon: DaemonProcess,
    pauses: Pauses,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    """Of two ranks, each with a lease and a connection of its own."""
    requests = new_requests(*LENGTHS)
    with make_pausing(llama, ranks=2) as engine:
        _kill_the_daemon_in_a_load(engine, daemon, pauses, requests, expected(requests))
        _kill_the_engine(engine, daemon, pauses, "load", requests, sessions=3)
        engine.start()
        assert run(engine, requests) == (expected(requests), cacheable(requests))


def _kill_the_daemon_in_a_load(
    engine: EngineProcess, daemon: DaemonProcess, pauses: Pauses, requests: list[EngineRequest], answers: Tokens
) -> None:
    run(engine, requests)
    _kill_the_daemon(engine, daemon, pauses, "load", requests, answers)
    assert run(engine, requests)[0] == answers


def _kill_the_daemon(
    engine: EngineProcess,
    daemon: DaemonProcess,
    pauses: Pauses,
    where: str,
    requests: list[EngineRequest],
    answers: Tokens,
) -> None:
    """And starts it again, once every request has its answer."""
    assert engine.reset_prefix_cache()
    with pauses.at(where):
        ids = engine.submit(requests)
        pauses.wait(where)
        with Client(daemon.address) as client:
            stats = client.stats()
            assert stats.leases if where == "load" else stats.reservations
            if where == "load":
                # What was not yet copied is no longer what was promised: to be right, it has to be computed.
                assert all(alter(client, request.prompt) for request in requests)
        daemon.kill()
    assert tokens_of(engine.collect(ids)) == answers
    engine.wait_until_idle()
    daemon.start()
    assert hits_resume(engine, requests) < RESUME_S
    wait_until_back(engine)


@pytest.mark.parametrize("where", ["load", "save"])
def test_engine_killed_in_the_middle(
    where: str,
    pausing_engine: EngineProcess,
    daemon: DaemonProcess,
    pauses: Pauses,
    expected: Expected,
    new_requests: NewRequests,
) -> None:
    requests = new_requests(*LENGTHS)
    if where == "load":
        run(pausing_engine, requests)
    _kill_the_engine(pausing_engine, daemon, pauses, where, requests, sessions=2)
    pausing_engine.start()
    tokens, found = run(pausing_engine, requests)
    again, hits = run(pausing_engine, requests)
    assert tokens == again == expected(requests)
    assert found == cacheable(requests) if where == "load" else found < cacheable(requests)
    assert hits == cacheable(requests)


def _kill_the_engine(
    engine: EngineProcess,
    daemon: DaemonProcess,
    pauses: Pauses,
    where: str,
    requests: list[EngineRequest],
    *,
    sessions: int,
) -> None:
    """`sessions` is how many the engine has at the daemon: its scheduler's and each rank's."""
    assert engine.reset_prefix_cache()
    with pauses.at(where), Client(daemon.address) as client:
        engine.submit(requests)
        pauses.wait(where)
        before = client.stats()
        assert before.leases if where == "load" else before.reservations
        pids = [session.pid for session in before.sessions if os.getpgid(session.pid) == engine.pid]
        assert len(pids) == sessions
        engine.kill()

        def nothing_left() -> bool:
            stats = client.stats()
            held = stats.leases or stats.reservations or any(tier.quarantined_bytes for tier in stats.tiers)
            return not held and not {session.pid for session in stats.sessions} & set(pids)

        wait_until(nothing_left, "the daemon keeps what the dead engine had")
        assert not client.check_integrity().violations


def test_daemon_left_down(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    known, new = new_requests(*LENGTHS), new_requests(*LENGTHS)
    run(engine, known)
    wait_until(lambda: run(engine, known)[1] == cacheable(known), "not all was saved")
    said = engine.log.stat().st_size
    daemon.kill()
    for _ in range(3):
        tokens, hits = run(engine, [*known, *new])
        assert tokens == expected([*known, *new])
        assert hits == 0
    lines = engine.log.read_bytes()[said:].decode().splitlines()
    daemon.start()
    assert hits_resume(engine, known) < RESUME_S
    links = 2  # vLLM's scheduler has one, its worker another
    assert 1 <= sum("prefixd is away" in line for line in lines) <= links
    wait_until_back(engine)


def test_a_replaced_daemon(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    """Another daemon with an empty data directory in its place: as an upgraded container without a volume."""
    known = new_requests(*LENGTHS)
    run(engine, known)
    wait_until(lambda: run(engine, known)[1] == cacheable(known), "not all was saved")
    said = engine.log.stat().st_size
    daemon.replace()
    with Client(daemon.address) as client:
        assert client.stats().tiers[1].used_bytes == 0
    tokens, hits = run(engine, known)
    assert tokens == expected(known) and hits == 0
    assert hits_resume(engine, known) < RESUME_S
    wait_until(lambda: run(engine, known)[1] == cacheable(known), "not all was saved again")
    lines = engine.log.read_bytes()[said:].decode().splitlines()
    changed = [line for line in lines if "replaced by a daemon with another data directory" in line]
    links = 2  # vLLM's scheduler has one, its worker another
    assert len(changed) == links
    assert not [line for line in lines if "prefixd refuses" in line or "Traceback" in line]
    wait_until_back(engine)


def test_daemon_killed_while_requests_run_and_wait(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    known, new = new_requests(*LENGTHS), new_requests(*LENGTHS, max_tokens=100)
    wait_until(lambda: run(engine, known)[1], "nothing was saved")
    answers = expected([*known, *new])
    assert engine.reset_prefix_cache()
    ids = engine.submit([*known, *new])
    daemon.kill()
    assert tokens_of(engine.collect(ids)) == answers
    engine.wait_until_idle()
    daemon.start()
    assert hits_resume(engine, known) < RESUME_S


def test_daemon_that_stands_still(
    engine: EngineProcess, daemon: DaemonProcess, expected: Expected, new_requests: NewRequests
) -> None:
    known, new = new_requests(*LENGTHS), new_requests(*LENGTHS)
    wait_until(lambda: run(engine, known)[1], "nothing was saved")
    answers = expected([*known, *new])
    assert engine.reset_prefix_cache()
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        results = engine.generate([*known, *new], PATIENCE_S)
        engine.wait_until_idle()
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    assert tokens_of(results) == answers
    assert hits_resume(engine, known) < RESUME_S
    with Client(daemon.address) as client:
        wait_until(lambda: not client.stats().leases and not client.stats().reservations, "something is still held")
        assert not client.check_integrity().violations
