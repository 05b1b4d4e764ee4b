"""Namespaces over a real socket: nobody is in another one's way, and no name, salt or part of one shuts others out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.checks.attacks.crafted_tokens import BLOCK_TOKENS, block_with_key
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd.v1 import admin_pb2, cache_pb2, inference_pb2
from tests.daemons import Remote

SIZE = 4096
SIDECAR = {"cpu.bytes": "8MiB", "disk.bytes": "8MiB"}


@pytest.fixture(scope="module")
def sidecar(launch: Callable[..., Remote]) -> Remote:
    return launch({**SIDECAR, "server.namespace_bytes": "128KiB"})


@pytest.fixture
def session(sidecar: Remote) -> Iterator[str]:
    with sidecar.session() as opened:
        yield opened.session_id


def test_who_stores_a_block_under_the_key_of_another_ones_takes_nothing_from_him(sidecar: Remote, session: str) -> None:
    tokens = list(range(3 * BLOCK_TOKENS))
    victim = sidecar.register(session, "victim", SIZE, block_tokens=BLOCK_TOKENS, salt=b"secret")
    seed = int.from_bytes(victim, "little")
    key = BlockChain(np.asarray(tokens, "<u4").tobytes(), BLOCK_TOKENS, seed).key(0)
    crafted = None
    for number in range(100):  # until the seeds agree in a few bits
        thief = sidecar.register(session, "thief", SIZE, block_tokens=BLOCK_TOKENS, salt=b"%d" % number)
        crafted = block_with_key(key, int.from_bytes(thief, "little"))
        if crafted is not None:
            break
    assert crafted is not None
    theirs = np.frombuffer(crafted, "<u4").tolist()
    assert sidecar.put(session, thief, theirs, bytes(SIZE)).committed == 1
    assert sidecar.put(session, victim, tokens, b"v" * 3 * SIZE).committed == 3
    assert sidecar.get(session, victim, tokens) == (3, b"v" * 3 * SIZE)
    assert sidecar.get(session, thief, theirs) == (1, bytes(SIZE))
    assert sidecar.stats().lost_blocks["key collision"] == 0
    shown = [
        sidecar.admin.Inspect(admin_pb2.InspectRequest(key=f"{home.hex()}/{key.hex()}")) for home in (victim, thief)
    ]
    assert [each.prefix.namespace_name for each in shown] == ["victim", "thief"]
    sidecar.settled()  # who reads has all bytes a moment before its lease ends
    assert sidecar.evict(key=f"{thief.hex()}/{key.hex()}").evicted_blocks == 1
    assert sidecar.match(session, victim, tokens).blocks == 3


def test_a_namespace_that_nobody_uses_makes_room(sidecar: Remote, refused: Callable[..., Any]) -> None:
    """A client that would not register again keeps what it has open; with its session it makes room."""
    for _ in range(2):
        with sidecar.session() as opened:
            registered = []
            with refused("RESOURCE_EXHAUSTED", "namespaces", "server.namespace_bytes"):
                for number in range(100):
                    registered.append(sidecar.register(opened.session_id, f"limit {number}", SIZE))
            assert len(registered) > 40
            (trouble,) = sidecar.stats().troubles
            assert trouble.part == "namespaces" and "server.namespace_bytes" in trouble.remedy
            assert sidecar.register(opened.session_id, "limit 1", SIZE) == registered[1], "it has this one"
        sidecar.until(lambda stats: not stats.sessions)
    with sidecar.session() as opened:
        sidecar.register(opened.session_id, "there is room again", SIZE)
    assert not sidecar.stats().troubles


@pytest.mark.slow
def test_figures_are_told_however_long_namespaces_are(launch: Callable[..., Remote]) -> None:
    """The longest names and as many parts as may be, in many namespaces."""
    sidecar = launch(SIDECAR)
    parts = [cache_pb2.Part(group="k", rank=rank, nbytes=1 << 30) for rank in range(1024)]
    with sidecar.session() as opened:
        for number in range(60):
            wanted = cache_pb2.Namespace(name=f"{number:02}" * 512, block_tokens=4, parts=parts)
            request = cache_pb2.RegisterNamespaceRequest(namespace=wanted, session_id=opened.session_id)
            sidecar.cache.RegisterNamespace(request)
        short = sidecar.register(opened.session_id, "short", SIZE)
        assert sidecar.put(opened.session_id, short, list(range(4)), bytes(SIZE)).committed == 1
        stats = sidecar.stats()
        assert stats.ByteSize() < 5 << 20
        assert stats.namespaces[0].blocks >= stats.namespaces[-1].blocks
        assert "short" in {each.namespace.name for each in stats.namespaces[:3]}
        assert len(stats.namespaces) + stats.other_namespaces >= 61
        assert {each.tenant for each in stats.namespaces} == {"default"}


@pytest.mark.slow
def test_no_client_fills_what_the_daemons_own_worker_reads(
    model_daemon: Remote, prompt: Callable[..., list[int]]
) -> None:
    """Whoever knows the model's name and geometry has a namespace of his own under it."""
    tokens = prompt(49)
    model_daemon.evict_all()
    before = model_daemon.generate(tokens)
    model_daemon.settled()
    (own,) = [each for each in model_daemon.stats().namespaces if each.blocks]
    model_daemon.evict_all()
    with model_daemon.session() as opened:
        wanted = own.namespace
        request = cache_pb2.RegisterNamespaceRequest(namespace=wanted, session_id=opened.session_id)
        poisoned = model_daemon.cache.RegisterNamespace(request).namespace_id
        nbytes = sum(part.nbytes for part in wanted.parts)
        wrong = np.full(3 * nbytes // 4, np.nan, "<f4").tobytes()
        assert model_daemon.put(opened.session_id, poisoned, tokens, wrong).committed == 3
        again = model_daemon.generate(tokens)
        assert (again.tokens, again.hits) == (before.tokens, (0, 0, 0))
        model_daemon.settled()
        assert model_daemon.match(opened.session_id, poisoned, tokens).blocks == 3
        assert model_daemon.generate(tokens).hits[0] == 48, "it has its own"
        assert own.worker and poisoned != own.namespace_id


@pytest.mark.slow
def test_a_request_with_one_salt_too_many_runs_without_the_cache(
    launch: Callable[..., Remote],
    with_model: dict[str, str | int],
    prompt: Callable[..., list[int]],
    refused: Callable[..., Any],
) -> None:
    remote, tokens = launch({**with_model, "server.namespace_bytes": "64KiB"}), prompt(49)
    remote.until(lambda stats: stats.worker.state == admin_pb2.WorkerStats.STATE_READY)
    with remote.session() as opened:  # of a client that keeps all that it has open
        with refused("RESOURCE_EXHAUSTED", "server.namespace_bytes"):
            for number in range(100):
                remote.register(opened.session_id, f"{number}", SIZE)
        answers = [remote.generate(tokens, salt=b"three") for _ in range(2)]
        assert [answer.hits[0] for answer in answers] == [0, 0]
        assert all(answer.finished.reason == inference_pb2.FINISH_REASON_LENGTH for answer in answers)
        several = remote.sequences(tokens, salt=b"four", n=3)
        assert len(several) == 3 and several[0].tokens == answers[0].tokens
        stats = remote.settled()
        assert stats.lost_blocks["too many namespaces"] == 3 * 3
        assert [trouble.part for trouble in stats.troubles] == ["namespaces"]
        assert stats.namespace_room.refused_namespaces == 4
    remote.until(lambda stats: not stats.sessions)
    again = [remote.generate(tokens, salt=salt) for salt in (b"three", b"three", b"four", b"three")]
    assert [answer.hits[0] for answer in again] == [0, 48, 0, 48], "there is room for them now"
    assert {tuple(answer.tokens) for answer in (*answers, *again)} == {tuple(several[0].tokens)}
    assert not remote.stats().troubles


@pytest.mark.slow
def test_a_restart_keeps_what_has_blocks_and_nothing_else(launch: Callable[..., Remote], tmp_path: Any) -> None:
    remote = launch({**SIDECAR, "data_dir": str(tmp_path)})
    with remote.session() as opened:
        kept = remote.register(opened.session_id, "kept", SIZE)
        remote.register(opened.session_id, "empty", SIZE)
        assert remote.put(opened.session_id, kept, list(range(8)), bytes(2 * SIZE), durable=True).committed == 2
    remote.daemon.stop()
    again = launch({**SIDECAR, "data_dir": str(tmp_path)})
    assert [(each.namespace.name, each.blocks) for each in again.stats().namespaces] == [("kept", 2)]
    with again.session() as opened:
        assert again.register(opened.session_id, "kept", SIZE) == kept
        assert again.get(opened.session_id, kept, list(range(8))) == (2, bytes(2 * SIZE))
        assert again.register(opened.session_id, "kept", 2 * SIZE) != kept, "another geometry, another namespace"


@pytest.mark.slow
def test_1300_salts_through_one_client_and_a_restart(launch: Callable[..., Remote], tmp_path: Any) -> None:
    """From the 1,025th on all were refused, for ever and after a restart too. There is room for some hundred."""
    room, blob = {**SIDECAR, "server.namespace_bytes": "256KiB", "data_dir": str(tmp_path)}, np.zeros(SIZE, np.uint8)

    def spec(number: int) -> NamespaceSpec:
        return NamespaceSpec("m", 4, (PartSpec("kv", 0, SIZE),), salt=b"%d" % number)

    remote = launch(room)
    with Client(remote.daemon.address) as client:
        kept = [client.register(spec(number)) for number in range(4)]
        for cache in kept:
            cache.store([1, 2, 3, 4], blob)
        for number in range(4, 1300):
            client.register(spec(number)).store([1, 2, 3, 4], blob)
            if number % 16 == 0:
                assert [cache.match([1, 2, 3, 4]).blocks for cache in kept] == [1] * 4
        stats = client.stats()
        assert stats.namespace_room.refused_namespaces == 0 and not stats.troubles
        assert stats.namespace_room.used_bytes <= stats.namespace_room.limit_bytes == 256 << 10
        assert stats.namespace_room.forgotten_namespaces > 1000
        old = client.register(spec(4))
        client.register(spec(5)).store([1, 2, 3, 4], blob)
        for number in range(4000, 4200):
            client.register(spec(number))
        assert old.match([1, 2, 3, 4]).blocks == 0, "its registration was given back, and it is made anew"
    remote.daemon.stop()
    again = launch(room)
    with Client(again.daemon.address) as client:
        assert client.stats().namespace_room.used_bytes <= 256 << 10
        for number in range(5000, 5200):
            client.register(spec(number)).store([1, 2, 3, 4], blob)
        assert client.stats().namespace_room.refused_namespaces == 0
