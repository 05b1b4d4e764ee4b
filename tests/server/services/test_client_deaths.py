"""Engines that die or fall silent at any point: nothing of theirs stays taken, and nobody gets what they may write."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from prefixd.v1 import admin_pb2
from prefixd.v1 import cache_pb2 as pb
from tests.daemons import Remote

pytestmark = pytest.mark.slow

Engine = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def remote(launch: Callable[..., Remote]) -> Remote:
    return launch({"cpu.bytes": "1MiB", "disk.bytes": "64MiB"})


@pytest.fixture(autouse=True)
def nothing_left(remote: Remote) -> Iterator[None]:
    """Once everything may be evicted, all of it goes and nothing stays taken."""
    yield
    remote.settled()
    remote.evict_all()
    assert [(tier.used_bytes, tier.blocks) for tier in remote.stats().tiers] == [(0, 0), (0, 0)]


def lines(process: subprocess.Popen[str], count: int = 1) -> str:
    assert process.stdout is not None
    return "".join(process.stdout.readline() for _ in range(count)).strip()


def quarantined(stats: admin_pb2.StatsResponse) -> int:
    return next(tier.quarantined_bytes for tier in stats.tiers if tier.tier == pb.TIER_CPU)


class Relay:
    """Passes bytes between a socket of its own and the daemon's, until the connections are cut."""

    def __init__(self, path: Path, target: Path) -> None:
        self.address = f"unix:{path}"
        self._target = target
        self._ends: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return  # closed
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self._target))
            self._ends += [near, far]
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Breaks every connection; new ones are passed on."""
        ends, self._ends = self._ends, []
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


@pytest.fixture
def relay(remote: Remote, tmp_path: Path) -> Iterator[Relay]:
    made = Relay(tmp_path / "relay", remote.daemon.socket)
    yield made
    made.close()


@pytest.mark.parametrize(
    "scene",
    [
        "r = cache.reserve(tokens); print('now', flush=True)",
        "r = cache.reserve(tokens); r.copy_from(kv); print('now', flush=True)",
        """
        r = cache.reserve(tokens)
        slots = [np.frombuffer(r.view(block, 1), np.uint8) for block in range(r.blocks)]
        print('now', flush=True)
        while True:
            for slot in slots:
                slot[:] += 1
        """,
        "cache.store(tokens, kv, durable=True); leases = [cache.acquire(tokens) for _ in range(3)]; print('now')",
        """
        print('now', flush=True)
        while True:
            cache.reserve(np.random.randint(0, 1 << 30, 40)).commit(3)
        """,
        """
        from threading import Thread
        def put():
            other = Client(client.address, memory='streamed').register(cache.spec)
            while True:
                other.store(np.random.randint(0, 1 << 30, 40), kv, durable=True)
        for _ in range(2):
            Thread(target=put, daemon=True).start()
        print('now', flush=True)
        """,
    ],
    ids=["between reserve and commit", "filled", "copying", "reading", "committing", "streaming"],
)
def test_an_engine_killed_leaves_nothing(remote: Remote, engine: Engine, scene: str) -> None:
    processes = [engine("doomed x", scene) for _ in range(3)]
    for process in processes:
        assert lines(process) == "now"
    for process in processes:
        time.sleep(0.02)  # anywhere in what it goes on to do
        process.kill()
    remote.until(lambda stats: not stats.sessions)


def test_an_engine_killed_while_blocks_come_up_from_disk(remote: Remote, engine: Engine) -> None:
    """16 prompts of 10 blocks where 8 fit: most of what is loaded comes from disk."""
    scene = """
        for i in range(16):
            cache.store([i, *tokens], kv, durable=True)
        print('now', flush=True)
        while True:
            for i in range(16):
                with cache.acquire([i, *tokens]) as lease:
                    pass
        """
    processes = [engine("doomed x", scene) for _ in range(3)]
    for process in processes:
        assert lines(process) == "now"
    for process in processes:
        time.sleep(0.02)
        process.kill()
    remote.until(lambda stats: not stats.sessions)
    remote.settled()
    with remote.session() as session:
        namespace = remote.register(session.session_id, "x", 96, 5000)
        kv = np.random.default_rng(5).integers(0, 256, 50960, dtype=np.uint8).tobytes()
        for i in range(16):
            assert remote.get(session.session_id, namespace, [i, *range(42)]) == (10, kv)


def test_a_silent_engine_keeps_its_slots_until_it_dies(remote: Remote, engine: Engine) -> None:
    """Its reservation expires while it goes on writing: what others store meanwhile is right all the same."""
    process = engine(
        "silent x",
        """
        reservation = cache.reserve(range(1000))
        slots = [np.frombuffer(reservation.view(block, 1), np.uint8) for block in range(reservation.blocks)]
        reservation.renew(0.2)
        print(reservation.blocks, flush=True)
        while True:
            for slot in slots:
                slot[:] = 0xEE
        """,
    )
    blocks = int(lines(process))
    assert blocks > 20, "half of the tier: what a session may reserve"
    stats = remote.until(lambda stats: not stats.reservations)
    assert quarantined(stats) == blocks * 12288
    (cpu,) = (tier for tier in stats.tiers if tier.tier == pb.TIER_CPU)
    assert (cpu.used_bytes, cpu.in_flight_bytes) == (quarantined(stats), 0)
    with remote.session() as session:
        namespace = remote.register(session.session_id, "y", 96, 5000)
        beyond = np.random.default_rng(2).bytes(100 * 5096)
        remote.put(session.session_id, namespace, range(400), beyond)
        assert remote.get(session.session_id, namespace, range(400), max_blocks=20) == (20, beyond[: 20 * 5096])
        assert quarantined(remote.stats()) == blocks * 12288
        process.kill()
        remote.until(lambda stats: not quarantined(stats))
        data = np.random.default_rng(1).bytes(20 * 5096)
        assert remote.put(session.session_id, namespace, range(1000, 1080), data).committed == 20
        assert remote.get(session.session_id, namespace, range(1000, 1080)) == (20, data)
    process.wait()


def test_an_engine_whose_connection_broke_gives_its_slots_up_itself(
    remote: Remote, engine: Engine, relay: Relay
) -> None:
    process = engine(
        "cut off x",
        """
        reservation = cache.reserve(tokens)
        expired = cache.reserve(range(100, 142), ttl_s=0.1)
        print('reserved', flush=True)
        sys.stdin.readline()
        for lost in (reservation, expired):
            lost.release()
        print('released', flush=True)
        """,
        relay.address,
    )
    assert lines(process) == "reserved"
    relay.cut()
    stats = remote.until(lambda stats: not stats.sessions)
    assert (stats.reservations, quarantined(stats)) == (0, 20 * 12288)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert lines(process) == "released"
    stats = remote.stats()
    assert quarantined(stats) == 0
    assert [session.client_name for session in stats.sessions] == ["cut off x"], "the engine lives"
    assert process.poll() is None


def test_a_client_that_closes_gives_its_slots_up(remote: Remote, engine: Engine) -> None:
    process = engine("closing x", "reservation = cache.reserve(tokens); client.close(); print('closed', flush=True)")
    assert lines(process) == "closed"
    stats = remote.until(lambda stats: not stats.sessions)
    assert (stats.reservations, quarantined(stats)) == (0, 0)
    assert process.poll() is None
