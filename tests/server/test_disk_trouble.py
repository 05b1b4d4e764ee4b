"""A daemon whose disk fails: it serves throughout, says so everywhere, and is whole again when the disk is."""

from __future__ import annotations

from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.checks.fault_injection.faulty_daemon import FaultyDaemon
from prefixd.v1 import admin_pb2
from tests.daemons import Remote

pytestmark = pytest.mark.slow

SIZE = 64 << 10
SETTINGS = {"cpu.bytes": "512KiB", "disk.bytes": "64MiB", "disk.scrub_bytes_per_s": 0}
PROMPT = list(range(8))
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def bytes_of(number: int) -> bytes:
    return bytes([number]) * (2 * SIZE)


def prompt(number: int) -> list[int]:
    return [number, *PROMPT[1:]]


def health(remote: Remote, service: str) -> int:
    return health_pb2_grpc.HealthStub(remote.channel).Check(health_pb2.HealthCheckRequest(service=service)).status


def healthy(stats: admin_pb2.StatsResponse) -> bool:
    return not stats.troubles


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote]) -> Remote:
    return launch(SETTINGS, kind=FaultyDaemon)


def disk_of(remote: Remote) -> FaultyDaemon:
    assert isinstance(remote.daemon, FaultyDaemon)
    return remote.daemon


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("read-only file system", "Read-only file system"),
        ("disk full", "left"),
        ("index error half-way", "index"),
        ("sync error", "Input/output error"),
    ],
)
def test_a_disk_that_refuses_writes(remote: Remote, fault: str, says: str) -> None:
    daemon = disk_of(remote)
    with remote.session() as session:
        space = remote.register(session.session_id, fault, SIZE)
        remote.put(session.session_id, space, prompt(1), bytes_of(1), durable=True)
        daemon.break_disk(fault)
        with pytest.raises(grpc.RpcError) as caught:
            remote.put(session.session_id, space, prompt(2), bytes_of(2), durable=True)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stats = remote.stats()
        (trouble,) = stats.troubles
        assert trouble.part == "disk tier" and says in trouble.what and trouble.remedy
        assert [bool(tier.trouble) for tier in stats.tiers] == [False, True]
        assert (health(remote, ""), health(remote, "prefixd.tier.disk")) == (SERVING, NOT_SERVING)
        assert health(remote, "prefixd.tier.cpu") == SERVING
        for number in range(10, 20):  # more than memory holds
            remote.put(session.session_id, space, prompt(number), bytes_of(number))
            assert remote.get(session.session_id, space, prompt(number)) == (2, bytes_of(number))
        assert remote.get(session.session_id, space, prompt(1)) == (2, bytes_of(1)), "from disk"
        assert any("disk out of service" in reason for reason in remote.stats().lost_blocks)

        daemon.heal_disk()
        remote.until(healthy)
        assert health(remote, "prefixd.tier.disk") == SERVING
        remote.put(session.session_id, space, prompt(3), bytes_of(3), durable=True)
    remote.settled()
    daemon.restart()
    grpc.channel_ready_future(remote.channel).result(60)
    with remote.session() as session:
        space = remote.register(session.session_id, fault, SIZE)
        for number in (1, 3):
            assert remote.get(session.session_id, space, prompt(number)) == (2, bytes_of(number))


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_a_disk_that_cannot_be_read(launch: Callable[..., Remote], io: str) -> None:
    remote = launch(SETTINGS | {"disk.io": io}, kind=FaultyDaemon)
    daemon = disk_of(remote)
    with remote.session() as session:
        space = remote.register(session.session_id, "read", SIZE)
        for number in range(8):
            remote.put(session.session_id, space, prompt(number), bytes_of(number), durable=True)
        daemon.break_disk("read error")
        assert remote.get(session.session_id, space, prompt(0))[0] == 0
        stats = remote.until(lambda stats: bool(stats.troubles))
        assert "Input/output error" in stats.troubles[0].what
        assert remote.match(session.session_id, space, prompt(1)).blocks == 0, "what cannot be read is no hit"
        remote.put(session.session_id, space, prompt(1), bytes_of(1))
        assert remote.get(session.session_id, space, prompt(1)) == (2, bytes_of(1))
        daemon.heal_disk()
        remote.until(healthy)
        for number in range(8):
            assert remote.get(session.session_id, space, prompt(number)) == (2, bytes_of(number))
    remote.settled()


def test_a_tier_that_is_only_shrunk_is_flushed_to(launch: Callable[..., Remote]) -> None:
    remote = launch(SETTINGS | {"cache.write_back": "false"}, kind=FaultyDaemon)
    daemon = disk_of(remote)
    with remote.session() as session:
        space = remote.register(session.session_id, "shrunk", SIZE)
        for number in range(32):  # a whole slab
            remote.put(session.session_id, space, prompt(number), bytes_of(number), durable=True)
        daemon.break_disk("no room for a slab")
        remote.put(session.session_id, space, prompt(100), bytes_of(100), durable=True)
        remote.put(session.session_id, space, prompt(101), bytes_of(101))
        (trouble,) = remote.stats().troubles
        assert "too few for another slab" in trouble.what
        assert remote.admin.Flush(admin_pb2.FlushRequest()).blocks == 2, "at the cost of others"
        assert remote.stats().troubles, "it still cannot grow"
        remote.put(session.session_id, space, prompt(102), bytes_of(102))
        daemon.break_disk("write error")
        with pytest.raises(grpc.RpcError, match="out of service: Input/output error") as caught:
            remote.admin.Flush(admin_pb2.FlushRequest())
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        daemon.heal_disk()
        remote.until(healthy)
        assert remote.admin.Flush(admin_pb2.FlushRequest()).blocks == 2
    remote.settled()
    daemon.restart()
    grpc.channel_ready_future(remote.channel).result(60)
    with remote.session() as session:
        space = remote.register(session.session_id, "shrunk", SIZE)
        for number in (100, 101, 102):
            assert remote.get(session.session_id, space, prompt(number)) == (2, bytes_of(number))
