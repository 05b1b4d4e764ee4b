"""The end of a daemon and the next one's beginning: drained, killed, refused."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd.v1 import admin_pb2, inference_pb2
from prefixd.v1 import cache_pb2 as pb
from tests.daemons import Remote, collect

pytestmark = pytest.mark.slow

SIDECAR: dict[str, str | int] = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}
TOKENS = list(range(50, 90))
BYTES = np.random.default_rng(8).bytes(10 * 3000)


@pytest.fixture
def start(launch: Callable[..., Remote], folder: Path) -> Iterator[Callable[..., Remote]]:
    """Starts a daemon on this test's folder; what still runs at the end is stopped."""
    started: list[Remote] = []

    def begin(settings: dict[str, str | int]) -> Remote:
        started.append(launch(settings, directory=folder))
        return started[-1]

    yield begin
    for remote in started:
        remote.daemon.stop()


def store(remote: Remote, name: str = "kept", **header: Any) -> None:
    with remote.session() as session:
        namespace = remote.register(session.session_id, name, 3000)
        remote.put(session.session_id, namespace, TOKENS, BYTES, **header)


def tiers(remote: Remote, name: str = "kept", tokens: list[int] = TOKENS) -> list[tuple[int, int]]:
    with remote.session() as session:
        match = remote.match(session.session_id, remote.register(session.session_id, name, 3000), tokens)
    return [(run.tier, run.blocks) for run in match.runs]


def load(remote: Remote, name: str = "kept") -> tuple[int, bytes]:
    with remote.session() as session:
        return remote.get(session.session_id, remote.register(session.session_id, name, 3000), TOKENS)


def test_what_was_cached_is_there_after_a_restart(start: Callable[..., Remote], folder: Path) -> None:
    remote = start({**SIDECAR, "cache.write_back": "false"})
    store(remote)
    assert tiers(remote) == [(pb.TIER_CPU, 10)]
    assert remote.daemon.stop() == 0
    assert not [path for path in folder.iterdir() if path.is_socket()]
    again = start(SIDECAR)
    assert tiers(again) == [(pb.TIER_DISK, 10)]
    assert load(again) == (10, BYTES)
    assert tiers(again) == [(pb.TIER_CPU, 10)]
    again.settled()


def test_the_wear_of_the_drive_adds_up_over_restarts(start: Callable[..., Remote]) -> None:
    settings = {**SIDECAR, "disk.endurance_bytes": "1MB", "disk.wear_start_bytes": "500KB"}
    remote = start(settings)
    store(remote)
    remote.daemon.stop()  # it writes what memory alone has
    used = (500_000 + len(BYTES)) / 1_000_000
    again = start(settings)
    assert again.stats().disk_wear.used_ratio == used
    store(again, "more", durable=True)
    assert again.stats().disk_wear.used_ratio == used + len(BYTES) / 1_000_000


def test_what_survives_a_crash(start: Callable[..., Remote]) -> None:
    """What was durable or flushed is there, and nothing that was evicted or never written."""
    remote = start({**SIDECAR, "cache.write_back": "false"})
    admin = remote.admin
    store(remote, "flushed")
    answer = admin.Flush(admin_pb2.FlushRequest())
    assert (answer.blocks, answer.nbytes) == (10, 10 * 3000)
    store(remote, "durable", durable=True)
    store(remote, "evicted", durable=True)
    assert admin.Flush(admin_pb2.FlushRequest()).blocks == 0
    ids = {known.namespace.name: known.namespace_id for known in remote.stats().namespaces}
    assert remote.evict(namespace_id=ids["evicted"]).evicted_blocks == 10
    store(remote, "never written")
    assert remote.daemon.kill() == -signal.SIGKILL
    assert remote.daemon.socket.exists()  # stale; it is in nobody's way
    again = start(SIDECAR)
    for name in ("flushed", "durable"):
        assert tiers(again, name) == [(pb.TIER_DISK, 10)]
        assert load(again, name) == (10, BYTES)
    assert tiers(again, "evicted") == []
    assert tiers(again, "never written") == []
    assert again.tier(pb.TIER_DISK).used_bytes == 20 * 4096
    again.settled()


def test_a_pin_outlasts_a_crash(start: Callable[..., Remote]) -> None:
    settings = {**SIDECAR, "cache.write_back": "false"}
    remote = start(settings)
    store(remote)
    (prefix,) = remote.admin.ListPrefixes(admin_pb2.ListPrefixesRequest()).prefixes
    answer = remote.admin.Pin(admin_pb2.PinRequest(key=prefix.key))
    assert (answer.blocks, answer.durable, answer.reason) == (10, True, "")
    remote.daemon.kill()
    again = start(settings)
    assert load(again) == (10, BYTES)
    listed = again.admin.ListPrefixes(admin_pb2.ListPrefixesRequest())
    assert ([prefix.pinned for prefix in listed.prefixes], listed.pinned_blocks) == ([True], 10)
    assert listed.pinned_bytes == len(BYTES)
    assert not again.admin.CheckIntegrity(admin_pb2.CheckIntegrityRequest()).violations
    assert again.admin.Unpin(admin_pb2.UnpinRequest(key=prefix.key)).durable
    again.daemon.kill()
    (prefix,) = start(settings).admin.ListPrefixes(admin_pb2.ListPrefixesRequest()).prefixes
    assert not prefix.pinned


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refused daemon prints (gRPC may log another before it)."""
    assert result.returncode == 2  # the configuration is wrong
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    *others, line = result.stderr.splitlines()
    assert line.startswith("prefixd: ")
    assert all(re.match(r"[EWI]\d{4} ", other) for other in others), result.stderr
    return line


def test_a_second_daemon_is_refused(
    start: Callable[..., Remote], serve_failing: Callable[..., subprocess.CompletedProcess[str]], folder: Path
) -> None:
    remote = start(SIDECAR)
    store(remote)
    same_data = {**SIDECAR, "data_dir": str(folder / "data"), "server.socket": str(folder / "other.sock")}
    line = refusal(serve_failing(same_data))
    assert str(folder / "data") in line
    assert f"pid {remote.daemon.pid}" in line
    same_socket = {**SIDECAR, "data_dir": str(folder / "elsewhere"), "server.socket": str(remote.daemon.socket)}
    line = refusal(serve_failing(same_socket))
    assert str(remote.daemon.socket) in line
    assert "in use" in line
    # The first one has not noticed.
    assert load(remote) == (10, BYTES)


def test_a_taken_port_is_refused(serve_failing: Callable[..., subprocess.CompletedProcess[str]], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = {**SIDECAR, "data_dir": str(folder / "data"), "server.socket": str(folder / "s")}
        assert str(port) in refusal(
            serve_failing({**settings, "server.tcp": f"127.0.0.1:{port}", "server.insecure_tcp": "true"})
        )
        assert str(port) in refusal(serve_failing({**settings, "server.metrics": f"127.0.0.1:{port}"}))
    assert not (folder / "s").exists()


def test_a_drain_takes_no_new_work_but_ends_what_was_begun(
    start: Callable[..., Remote], refused: Callable[..., Any]
) -> None:
    remote = start({**SIDECAR, "cache.write_back": "false"})
    health = health_pb2_grpc.HealthStub(remote.channel)
    check = health_pb2.HealthCheckRequest(service="prefixd.v1.PrefixCache")
    assert health.Check(check).status == health_pb2.HealthCheckResponse.SERVING
    store(remote)
    token_ids = np.asarray(range(300, 308), "<u4").tobytes()
    events = remote.cache.OpenSession(pb.OpenSessionRequest(client_name="drained"))
    session = next(events).opened.session_id
    namespace = remote.register(session, "kept", 3000)
    who = {"session_id": session, "namespace_id": namespace}
    remote.map_arena(session)
    reservation = remote.cache.Reserve(pb.ReserveRequest(**who, token_ids=token_ids))
    drained = remote.admin.Drain(admin_pb2.DrainRequest(), timeout=60)
    assert drained.written_blocks == 10
    assert next(events).WhichOneof("event") == "draining"
    assert remote.stats().draining
    assert health.Check(check).status == health_pb2.HealthCheckResponse.NOT_SERVING
    with refused("UNAVAILABLE", "drains", "again"):
        remote.cache.Reserve(pb.ReserveRequest(**who, token_ids=token_ids))
    with refused("UNAVAILABLE", "drains"):
        remote.put(who["session_id"], namespace, [1, 2, 3, 4], bytes(3000))
    with refused("UNAVAILABLE", "drains"), remote.session():
        pass
    # What was reserved before can be committed, and is on disk at the end.
    wanted = {"session_id": who["session_id"], "reservation_id": reservation.reservation_id}
    assert remote.cache.Commit(pb.CommitRequest(**wanted, blocks=2)).committed == 2
    assert remote.get(who["session_id"], namespace, TOKENS) == (10, BYTES)
    pid = remote.daemon.pid
    assert remote.admin.Drain(admin_pb2.DrainRequest(shutdown=True), timeout=60).written_blocks == 12
    left: list[pb.SessionEvent] = []
    with suppress(grpc.RpcError):  # the connection may be at its end before the client has read the stream's
        left.extend(events)
    assert left == []
    assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT).si_status == 0
    remote.daemon.stop()
    again = start(SIDECAR)
    assert tiers(again) == [(pb.TIER_DISK, 10)]
    assert tiers(again, tokens=list(range(300, 308))) == [(pb.TIER_DISK, 2)]


def test_a_commit_that_runs_at_sigterm_is_finished_and_kept(start: Callable[..., Remote]) -> None:
    blocks = 20_000
    tiers_of = {"cpu.bytes": "256MiB", "disk.bytes": "256MiB", "cache.write_back": "false"}
    remote = start(tiers_of)
    tokens = np.arange(blocks, dtype=np.uint32)
    spec = NamespaceSpec("long", 1, (PartSpec("full", 0, 64),))
    with ThreadPoolExecutor(1) as threads, Client(remote.daemon.address) as client:
        reservation = client.register(spec).reserve(tokens)
        committed = threads.submit(reservation.commit)
        remote.until(lambda stats: stats.reservations == 0)  # the commit has begun
        assert remote.daemon.stop() == 0
        assert committed.result().committed == blocks
    with Client(start(tiers_of).daemon.address) as client:
        assert client.register(spec).match(tokens).blocks == blocks


def test_a_request_that_runs_at_sigterm_ends_well_and_its_blocks_are_kept(
    start: Callable[..., Remote],
    with_model: dict[str, str | int],
    prompt: Callable[..., list[int]],
    refused: Callable[..., Any],
) -> None:
    remote = start({**with_model, "gpu.bytes": "4MiB", "cache.write_back": "false"})
    tokens = prompt(100)
    stream = remote.begin(tokens, max_tokens=500)
    remote.until(lambda stats: stats.worker.running_requests == 1)
    with ThreadPoolExecutor(2) as threads:
        answer = threads.submit(collect, stream)
        status = threads.submit(remote.daemon.stop)
        assert answer.result().finished.output_tokens == 500
        assert status.result() == 0
    again = start(with_model)
    after = again.generate(tokens, max_tokens=500)
    assert after.hits == (0, 0, 96)
    assert after.tokens == answer.result().tokens
    again.settled()


def test_a_request_that_outlasts_the_drain_is_told(
    start: Callable[..., Remote],
    with_model: dict[str, str | int],
    prompt: Callable[..., list[int]],
    refused: Callable[..., Any],
) -> None:
    remote = start({**with_model, "server.drain_timeout_s": 0.5, "disk.bytes": 0, "worker.max_running": 1})
    worker = remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_READY).worker.pid
    streams = [remote.begin(prompt(20, variant), max_tokens=1900) for variant in range(3)]
    for stream in streams:
        next(stream)
    os.kill(worker, signal.SIGSTOP)  # so slow that a half second is not enough
    try:
        with ThreadPoolExecutor(1) as threads:
            drain = threads.submit(remote.admin.Drain, admin_pb2.DrainRequest(), timeout=60)
            for stream in streams[1:]:
                with refused("UNAVAILABLE", "drained for 0.5 s", "again"):
                    list(stream)
            os.kill(worker, signal.SIGCONT)
            with refused("UNAVAILABLE", "drained for 0.5 s"):
                list(streams[0])
            drain.result()
    finally:
        os.kill(worker, signal.SIGCONT)
    with refused("UNAVAILABLE", "drains"):
        list(remote.inference.Generate(inference_pb2.GenerateRequest(text="late")))
    remote.settled()
    assert remote.daemon.stop() == 0
