"""Which processes have the arena, and that their ends are noticed."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prefixd.base.tenancy.tenants import Role
from prefixd.cache import NamespaceSpec, PartSpec, Process, Reservation, TieredCache
from prefixd.client import Client
from prefixd.server.access.identities import Caller
from prefixd.server.rpc.sockets import processes
from prefixd.server.rpc.sockets.processes import ProcessWatch
from tests.waiting import until, wait_until


@pytest.fixture
async def watch(cache: TieredCache) -> AsyncIterator[ProcessWatch]:
    made = ProcessWatch(cache)
    yield made
    made.close()


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{tmp_path}/s")
        made.listen()
        yield made


def visitor(listener: socket.socket) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that has connected and lives until its standard input ends."""
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code, listener.getsockname()], stdin=subprocess.PIPE)
    return process, listener.accept()[0]


@pytest.mark.parametrize("with_peer_pidfd", [True, False])
@pytest.mark.slow
async def test_the_end_of_a_process_is_noticed(
    cache: TieredCache,
    watch: ProcessWatch,
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
    with_peer_pidfd: bool,
) -> None:
    if not with_peer_pidfd:  # a kernel that has no such option
        monkeypatch.setattr(processes, "_SO_PEERPIDFD", 9999)
    session = cache.leases.open("one", 1, 0.0, cache.tenants.default)
    ended = asyncio.Event()
    tell = cache.process_ended

    def note(process: Process) -> None:
        tell(process)
        ended.set()

    cache.process_ended = note  # type: ignore[method-assign]
    process, connection = visitor(listener)
    with process, connection:
        try:
            for _ in range(2):
                assert watch.admit(session.id, 0, process.pid, connection) is None
            (known,) = session.processes
            assert (known.pid, known.alive) == (process.pid, True)
            namespace = cache.register(NamespaceSpec("n", 1, (PartSpec("g", 0, 8),)))
            chain = cache.chain(namespace, bytes(8))
            assert isinstance(await cache.reserve(session, namespace, chain), Reservation)
            cache.leases.close(session)
            assert cache.quarantine.nbytes == 2 * 4096
            another = cache.leases.open("two", 1, 0.0, cache.tenants.default)
            assert watch.admit(another.id, 0, process.pid, connection) is None
            assert another.processes == {known}, "the same process, that may speak for what it has lost"
        finally:
            process.kill()
        async with asyncio.timeout(60):
            await ended.wait()
    assert not known.alive
    assert (cache.quarantine.nbytes, another.processes) == (0, set())


@pytest.mark.slow
async def test_a_number_that_another_process_has_now_is_not_mistaken(
    cache: TieredCache, watch: ProcessWatch, listener: socket.socket
) -> None:
    session, fresh = (cache.leases.open("one", 1, 0.0, cache.tenants.default) for _ in range(2))
    first, connection = visitor(listener)
    with first, connection:
        assert watch.admit(session.id, 0, 4711, connection) is None
        (gone,) = session.processes
        first.kill()
        first.wait()
        # Its end is not noticed yet, as the event loop has not run; the next one has the same number.
        second, other = visitor(listener)
        with second, other:
            refusal = watch.admit(session.id, 0, 4711, other)
            assert refusal is not None and "ended with the process" in refusal
            assert watch.admit(fresh.id, 0, 4711, other) is None
            (new,) = fresh.processes
            assert new is not gone and new.alive and not gone.alive
            second.kill()


async def test_a_process_that_cannot_be_watched_gets_no_memory(
    cache: TieredCache, watch: ProcessWatch, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SO_PEERPIDFD", 9999)
    session = cache.leases.open("one", 1, 0.0, cache.tenants.default)
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(listener.getsockname())
        connection, _ = listener.accept()
        with connection:
            # In another pid namespace it has no number here.
            refusal = watch.admit(session.id, 0, 0, connection)
    assert refusal is not None and "cannot be watched" in refusal and "memory='streamed'" in refusal
    assert not session.processes
    before = set(os.listdir("/proc/self/fd"))
    watch.close()
    assert not set(os.listdir("/proc/self/fd")) - before


async def test_a_user_of_another_tenant_gets_no_memory(cache: TieredCache, listener: socket.socket) -> None:
    one, two = cache.tenants.known("one"), cache.tenants.known("two")
    roles = {0: (cache.tenants.default, Role.ADMIN), 1001: (one, Role.CLIENT), 1002: (two, Role.CLIENT)}
    watch = ProcessWatch(cache, lambda uid, pid: Caller(*roles[uid], "somebody", "unix", pid))
    session = cache.leases.open("one", 1, 0.0, one)
    with socket.socket(socket.AF_UNIX) as ours:
        ours.connect(listener.getsockname())
        connection, _ = listener.accept()
        before = set(os.listdir("/proc/self/fd"))
        with connection:
            refusal = watch.admit(session.id, 1002, os.getpid(), connection)
            assert refusal is not None and "1002 belongs to tenant two, and the session to tenant one" in refusal
            assert set(os.listdir("/proc/self/fd")) == before
            assert not session.processes
            for uid in (1001, 0):
                assert watch.admit(session.id, uid, os.getpid(), connection) is None
            assert len(session.processes) == 1
    watch.close()


@pytest.mark.slow
async def test_a_session_has_only_so_many_processes(
    cache: TieredCache, watch: ProcessWatch, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_PROCESSES", 1)
    session = cache.leases.open("one", 1, 0.0, cache.tenants.default)
    process, connection = visitor(listener)
    with process, connection, socket.socket(socket.AF_UNIX) as ours:
        ours.connect(listener.getsockname())
        own, _ = listener.accept()
        with own:
            for _ in range(2):
                assert watch.admit(session.id, 0, process.pid, connection) is None
            refusal = watch.admit(session.id, 0, os.getpid(), own)
            assert refusal is not None and "1 processes of the session have the arena" in refusal
        process.kill()


def no_peer_pidfd(visitor: socket.socket) -> int:
    raise OSError(errno.ENOPROTOOPT, "Protocol not available")


async def test_before_linux_6_5_a_process_without_a_number_here_is_watched_by_what_it_sends(
    cache: TieredCache, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = ProcessWatch(cache, peer_pidfd=no_peer_pidfd)
    session = cache.leases.open("one", 1, 0.0, cache.tenants.default)
    process, connection = visitor(listener)
    pidfd = os.pidfd_open(process.pid)
    try:
        with process, connection, open(os.devnull) as other:
            assert watch.admit(session.id, 0, process.pid, connection, pidfd) is None
            (known,) = session.processes
            for sent in (-1, pidfd, other.fileno()):  # none; one of a number that is not 0; no pidfd
                refusal = watch.admit(session.id, 0, 0, connection, sent)
                assert refusal is not None and "Linux 6.5" in refusal
            monkeypatch.setattr(processes, "_is_pidfd_of", lambda sent, pid: (sent, pid) == (pidfd, 0))
            assert watch.admit(session.id, 0, 0, connection, pidfd) is None
            process.kill()
        await until(lambda: not any(each.alive for each in {known, *session.processes}))
        assert watch.admit(session.id, 0, process.pid, connection, pidfd) is not None, "it has ended"
    finally:
        os.close(pidfd)
        watch.close()


@pytest.mark.slow
def test_a_descriptor_is_a_living_processs_of_that_number() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    pidfd = os.pidfd_open(process.pid)
    try:
        assert processes._is_pidfd_of(pidfd, process.pid)
        assert not processes._is_pidfd_of(pidfd, 0) and not processes._is_pidfd_of(pidfd, 1)
        assert not processes._is_pidfd_of(process.stdin.fileno() if process.stdin else 0, process.pid)
        process.kill()
        process.communicate()
        assert not processes._is_pidfd_of(pidfd, process.pid) and not processes._is_pidfd_of(pidfd, -1)
    finally:
        os.close(pidfd)


OLD_KERNEL = (
    "import prefixd.server.rpc.sockets.processes as p; p._SO_PEERPIDFD = 9999; import prefixd.cli; prefixd.cli.main()"
)
ENGINE = """
import sys
import numpy as np
from prefixd.client import Client, NamespaceSpec, PartSpec
client = Client(sys.argv[1], memory="shared")
cache = client.register(NamespaceSpec("m", 4, (PartSpec("kv", 0, 4096),)))
cache.store([1, 2, 3, 4], np.ones(4096, np.uint8))
hold = cache.reserve([5, 6, 7, 8])
print("reserved", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="PID namespaces need root")
def test_engine_and_daemon_in_pid_namespaces_of_their_own_on_an_old_kernel(folder: Path) -> None:
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c"]
    address = f"unix:{folder}/s"
    places = ["--data-dir", f"{folder}/d", "--socket", f"{folder}/s", "--config", os.devnull, "--json"]
    serve = [*apart, OLD_KERNEL, "serve", "--cpu-bytes", "1MiB", "--disk-bytes", "0", *places]
    daemon = subprocess.Popen(serve, stdout=subprocess.PIPE)
    try:
        assert daemon.stdout is not None and b'"pid": 1' in daemon.stdout.readline()
        engine = subprocess.Popen([*apart, ENGINE, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"reserved\n", "it shares the memory"
        with Client(address, memory="streamed") as client:
            assert client.stats().reservations == 1
            engine.kill()
            engine.wait()

            def noticed() -> bool:
                stats = client.stats()
                return not stats.reservations and not any(tier.quarantined_bytes for tier in stats.tiers)

            wait_until(noticed, "its end was not noticed")
    finally:
        daemon.kill()
        daemon.wait()
