"""Engines as processes of their own: what one writes another reads, and what a dead one held is free again."""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from prefixd.v1 import cache_pb2 as pb
from tests.daemons import Remote

BLOCK_BYTES = (96, 5000)  # parts that do not fill their slots
TOKENS = list(range(42))  # 10 blocks of 4 tokens, and a bit
BYTES = np.random.default_rng(5).integers(0, 256, 10 * sum(BLOCK_BYTES), dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote]) -> Remote:
    return launch(
        {"cpu.bytes": "4MiB", "disk.bytes": "16MiB", "server.tcp": "127.0.0.1:0", "server.insecure_tcp": "true"}
    )


@pytest.fixture(autouse=True)
def adds_up(remote: Remote) -> Iterator[None]:
    yield
    remote.settled()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.slow
def test_what_one_process_writes_another_reads(
    remote: Remote, engine: Callable[..., subprocess.Popen[str]], request: pytest.FixtureRequest
) -> None:
    name = request.node.nodeid
    writer = engine(f"writer {name}", "print(client.arena is not None, cache.store(tokens, kv).committed)")
    assert said(writer) == "True 10"
    reader = engine(
        f"reader {name}",
        """
        into = np.zeros_like(kv)
        print(cache.load(tokens, into), np.array_equal(into, kv), client.arena is not None)
       
        """,
    )
    assert said(reader) == "10 True True"
    # And the same bytes for one that has them streamed, over TCP.
    with over_tcp(remote) as far, far.session() as session:
        assert session.memory_socket == ""
        assert far.get(session.session_id, far.register(session.session_id, name, *BLOCK_BYTES), TOKENS) == (10, BYTES)


def over_tcp(remote: Remote) -> Remote:
    return type(remote)(remote.daemon, remote.daemon.tcp)


def test_a_tcp_client_puts_and_gets(remote: Remote) -> None:
    with over_tcp(remote) as far, far.session() as session:
        namespace = far.register(session.session_id, "over tcp", *BLOCK_BYTES)
        sent = far.put(session.session_id, namespace, TOKENS, BYTES)
        assert (sent.committed, sent.duplicates) == (10, 0)
        again = far.put(session.session_id, namespace, TOKENS, BYTES)
        assert (again.committed, again.duplicates) == (0, 10)
        assert far.get(session.session_id, namespace, TOKENS) == (10, BYTES)
        size = sum(BLOCK_BYTES)
        assert far.get(session.session_id, namespace, TOKENS, first_block=3, max_blocks=4) == (
            4,
            BYTES[3 * size : 7 * size],
        )
        blocks, data = far.get(session.session_id, namespace, TOKENS, parts=[1], first_block=9)
        assert (blocks, data) == (1, BYTES[-BLOCK_BYTES[1] :])
        assert far.get(session.session_id, namespace, [9, 9, 9, 9, 9]) == (0, b"")


@pytest.mark.slow
def test_a_killed_engine_holds_nothing(remote: Remote, engine: Callable[..., subprocess.Popen[str]]) -> None:
    """Killed with a lease, with a reservation half filled, and with nothing at all: all is gone within seconds."""
    before = remote.settled()
    processes = [
        engine("reader killed", "cache.store(tokens, kv); lease = cache.acquire(tokens); print(lease.blocks)"),
        engine("writer killed", "r = cache.reserve(range(500, 542)); r.view(0)[:] = bytes(96); print(r.blocks)"),
        engine("idle killed", "print(10)"),
    ]
    for process in processes:
        assert said(process) == "10"
    holding = remote.stats()
    assert (holding.leases, holding.reservations) == (1, 1)
    assert {session.client_name for session in holding.sessions} >= {"reader killed", "writer killed", "idle killed"}
    cpu = next(tier for tier in holding.tiers if tier.tier == pb.TIER_CPU)
    assert cpu.in_flight_bytes > 0
    assert cpu.held_blocks == 10
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    after = remote.until(lambda stats: not stats.sessions)
    assert (after.leases, after.reservations) == (0, 0)
    after = remote.settled()  # the blocks may still be on their way to disk
    cpu = next(tier for tier in after.tiers if tier.tier == pb.TIER_CPU)
    was = next(tier for tier in before.tiers if tier.tier == pb.TIER_CPU)
    assert cpu.blocks == was.blocks + 10


def visit(remote: Remote, session_id: str) -> tuple[dict[str, Any], list[int]]:
    """What the memory door answers."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(60)
        door.connect(f"{remote.daemon.socket}-memory")
        door.sendall(session_id.encode() + b"\n")
        answer, fds, _, _ = socket.recv_fds(door, 4096, 1)
        return json.loads(answer), list(fds)


def test_the_arena_goes_to_live_sessions_only(remote: Remote) -> None:
    with remote.session() as session:
        answer, (fd,) = visit(remote, session.session_id)
        assert answer == {"arena_bytes": session.arena_bytes}
        assert os.fstat(fd).st_size == session.arena_bytes
        os.close(fd)
        for stranger in ("", "no-such-session", session.session_id[:8], session.session_id + "x", "a" * 200):
            answer, fds = visit(remote, stranger)
            assert "session" in answer["error"]
            assert not fds
    remote.until(lambda stats: not stats.sessions)
    answer, fds = visit(remote, session.session_id)
    assert "ended" in answer["error"]
    assert not fds


def test_offsets_name_the_bytes_in_the_arena(remote: Remote) -> None:
    """Reserve, fill through the mapping, commit; then acquire and find them where the offsets say."""
    token_ids = np.asarray(TOKENS, "<u4").tobytes()
    with remote.session() as session:
        namespace = remote.register(session.session_id, "offsets", *BLOCK_BYTES)
        _, (fd,) = visit(remote, session.session_id)
        with mmap.mmap(fd, session.arena_bytes) as arena:
            os.close(fd)
            who = {"session_id": session.session_id, "namespace_id": namespace, "token_ids": token_ids}
            reserved = remote.cache.Reserve(pb.ReserveRequest(**who))
            assert (reserved.first_block, reserved.blocks, len(reserved.offsets)) == (0, 10, 20)
            place = 0
            for offset, size in zip(reserved.offsets, BLOCK_BYTES * 10, strict=True):
                arena[offset : offset + size] = BYTES[place : place + size]
                place += size
            assert remote.match(session.session_id, namespace, TOKENS).blocks == 0
            # Only the first seven are ready; the slots of the others are given back.
            wanted = {"session_id": session.session_id, "reservation_id": reserved.reservation_id}
            assert remote.cache.Commit(pb.CommitRequest(**wanted, blocks=7)).committed == 7
            lease = remote.cache.Acquire(pb.AcquireRequest(**who))
            assert lease.blocks == 7
            found = b"".join(
                arena[offset : offset + size] for offset, size in zip(lease.offsets, BLOCK_BYTES * 7, strict=True)
            )
            assert found == BYTES[: len(found)]
            remote.cache.Release(pb.ReleaseRequest(session_id=session.session_id, lease_id=lease.lease_id))


def test_a_lease_ends_when_its_time_is_up(remote: Remote, refused: Callable[..., Any]) -> None:
    token_ids = np.asarray(TOKENS, "<u4").tobytes()
    with remote.session() as session:
        namespace = remote.register(session.session_id, "a short life", *BLOCK_BYTES)
        remote.map_arena(session.session_id)
        remote.put(session.session_id, namespace, TOKENS, BYTES)
        who = {"session_id": session.session_id, "namespace_id": namespace}
        lease = remote.cache.Acquire(pb.AcquireRequest(**who, token_ids=token_ids, ttl_s=0.3))
        other = np.asarray([7, *TOKENS], "<u4").tobytes()
        reserved = remote.cache.Reserve(pb.ReserveRequest(**who, token_ids=other, ttl_s=0.3))
        assert 0 < lease.ttl_s <= 0.3
        remote.until(lambda stats: not stats.leases and not stats.reservations)
        for grant in (lease.lease_id, reserved.reservation_id):
            with refused("NOT_FOUND", "time was up", "again"):
                remote.cache.Release(pb.ReleaseRequest(session_id=session.session_id, lease_id=grant))
        with refused("NOT_FOUND", "time was up"):
            remote.cache.Commit(
                pb.CommitRequest(session_id=session.session_id, reservation_id=reserved.reservation_id, blocks=1)
            )


def test_who_has_not_mapped_the_arena_reserves_nothing(remote: Remote, refused: Callable[..., Any]) -> None:
    """It could have it mapped in another session, and write into slots that are given to others when this one ends."""
    token_ids = np.asarray(TOKENS, "<u4").tobytes()
    with remote.session() as mapped, remote.session() as session:
        remote.map_arena(mapped.session_id)
        namespace = remote.register(session.session_id, "evasive", *BLOCK_BYTES)
        who = {"session_id": session.session_id, "namespace_id": namespace, "token_ids": token_ids}
        with refused("FAILED_PRECONDITION", "has not mapped the arena", "memory_socket", "with Put"):
            remote.cache.Reserve(pb.ReserveRequest(**who))
        remote.map_arena(session.session_id)
        granted = remote.cache.Reserve(pb.ReserveRequest(**who))
        assert granted.blocks == 10
        remote.cache.Release(pb.ReleaseRequest(session_id=session.session_id, lease_id=granted.reservation_id))


def test_a_reader_that_hangs_up_in_the_middle_leaves_no_lease(remote: Remote) -> None:
    tokens = list(range(40))
    with remote.session() as session:
        big = remote.register(session.session_id, "big blocks", 1 << 18)
        remote.put(session.session_id, big, tokens, bytes(10 << 18))
        for _ in range(5):
            stream = remote.cache.Get(
                pb.GetRequest(
                    session_id=session.session_id, namespace_id=big, token_ids=np.asarray(tokens, "<u4").tobytes()
                )
            )
            assert next(stream).header.blocks == 10
            stream.cancel()
        remote.until(lambda stats: not stats.leases)


def test_a_stream_ends_with_its_session(remote: Remote, refused: Callable[..., Any]) -> None:
    """Its slots may be another's by the next message: they are neither read nor written from then on."""
    tokens = list(range(40))
    token_ids = np.asarray(tokens, "<u4").tobytes()
    data = [pb.PutRequest(data=bytes(1 << 17))] * 20

    def interrupted(session: pb.SessionOpened, end: Callable[[], None]) -> Iterator[pb.PutRequest]:
        header = pb.PutHeader(session_id=session.session_id, namespace_id=big, token_ids=token_ids)
        yield pb.PutRequest(header=header)
        yield from data[:10]
        remote.until(lambda stats: stats.reservations == 1)
        end()
        remote.until(lambda stats: not stats.reservations)
        yield from data[10:]

    opened = remote.session()
    session = opened.__enter__()
    big = remote.register(session.session_id, "ends with its session", 1 << 18)
    with refused("NOT_FOUND", "session ended"):
        remote.cache.Put(interrupted(session, lambda: opened.__exit__(None, None, None)), timeout=30)
    with remote.session() as other:
        big = remote.register(other.session_id, "ends with its session", 1 << 18)
        assert remote.match(other.session_id, big, tokens).blocks == 0


@pytest.mark.slow
def test_too_many_sessions_are_refused(launch: Callable[..., Remote], refused: Callable[..., Any]) -> None:
    remote = launch({"cpu.bytes": "1MiB", "disk.bytes": 0, "server.max_sessions": 2})
    too_many = refused("RESOURCE_EXHAUSTED", "2 sessions", "server.max_sessions")
    with remote.session(), remote.session(), too_many, remote.session():
        pass
    remote.until(lambda stats: not stats.sessions)
    with remote.session() as session:
        assert session.session_id


def test_a_tenants_salt_opens_its_blocks_and_is_told_to_nobody(remote: Remote, refused: Callable[..., Any]) -> None:
    with remote.session() as ours, remote.session() as theirs:
        namespace = remote.register(ours.session_id, "salted", *BLOCK_BYTES, salt=b"secret")
        remote.put(ours.session_id, namespace, TOKENS, BYTES)
        (told,) = [known for known in remote.stats().namespaces if known.namespace.name == "salted"]
        assert (told.namespace_id, told.namespace.salt) == (namespace, b"")
        with refused("PERMISSION_DENIED", "register it in this session"):
            remote.get(theirs.session_id, namespace, TOKENS)
        guessed = remote.register(theirs.session_id, "salted", *BLOCK_BYTES)
        assert remote.get(theirs.session_id, guessed, TOKENS) == (0, b"")
        remote.register(theirs.session_id, "salted", *BLOCK_BYTES, salt=b"secret")
        assert remote.get(theirs.session_id, namespace, TOKENS) == (10, BYTES)


def test_renew_and_persist(remote: Remote, refused: Callable[..., Any]) -> None:
    token_ids = np.asarray(TOKENS, "<u4").tobytes()
    with remote.session() as session:
        namespace = remote.register(session.session_id, "renewed", *BLOCK_BYTES)
        remote.put(session.session_id, namespace, TOKENS, BYTES)
        who = {"session_id": session.session_id}
        named = {**who, "namespace_id": namespace, "token_ids": token_ids}
        assert remote.cache.Persist(pb.PersistRequest(**named)).blocks == 10
        assert [run.blocks for run in remote.match(session.session_id, namespace, TOKENS).runs] == [10]
        lease = remote.cache.Acquire(pb.AcquireRequest(**named, ttl_s=20.0)).lease_id
        renewed = remote.cache.Renew(pb.RenewRequest(**who, lease_ids=[lease], ttl_s=1e9))
        assert renewed.ttl_s == session.max_ttl_s
        assert remote.cache.Renew(pb.RenewRequest(**who, lease_ids=[lease])).ttl_s == session.default_ttl_s
        with refused("INVALID_ARGUMENT", "ttl_s is -1"):
            remote.cache.Renew(pb.RenewRequest(**who, lease_ids=[lease], ttl_s=-1))
        remote.cache.Release(pb.ReleaseRequest(**who, lease_id=lease))
        with refused("NOT_FOUND", "it was released"):
            remote.cache.Renew(pb.RenewRequest(**who, lease_ids=[lease]))


def test_put_durable_of_what_is_cached_is_durable(remote: Remote) -> None:
    with remote.session() as session:
        namespace = remote.register(session.session_id, "durable at last", *BLOCK_BYTES)
        remote.put(session.session_id, namespace, TOKENS, BYTES)
        again = remote.put(session.session_id, namespace, TOKENS, BYTES, durable=True)
        assert (again.committed, again.duplicates) == (0, 10)
        assert remote.evict(namespace_id=namespace).kept_blocks == 0
