"""What another user of this host can reach: nothing, unless the settings say so."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from prefixd.base.errors import ConfigError
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec
from prefixd.server.access.socket_access import SocketAccess, make_private
from prefixd.v1 import cache_pb2, cache_pb2_grpc
from tests.daemons import Remote

SIDECAR: dict[str, str | int] = {"cpu.bytes": "1MiB", "disk.bytes": "4MiB"}
NOBODY, SOMEBODY = 65534, 65533

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

# Says what a process of another user gets: at the socket, and at the door that hands out the memory.
VISIT = """
import os, socket, sys
uid = int(sys.argv[1])
os.setgroups([])
os.setresgid(uid, uid, uid)
os.setresuid(uid, uid, uid)
visitor = socket.socket(socket.AF_UNIX)
visitor.settimeout(30)
try:
    visitor.connect(sys.argv[2])
    if sys.argv[3:]:
        visitor.sendall(sys.argv[3].encode() + b"\\n")
        answer, descriptors, _, _ = socket.recv_fds(visitor, 4096, 1)
        print(len(descriptors), answer.decode())
    else:
        print("connected")
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    """Open to be passed through."""
    folder.chmod(0o755)
    return folder


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def visit(uid: int, path: Path, session_id: str = "") -> str:
    """The answer that a process of user `uid` gets."""
    script = [sys.executable, "-I", "-c", VISIT, str(uid), str(path), *([session_id] if session_id else [])]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@contextmanager
def session(path: Path) -> Iterator[cache_pb2.SessionOpened]:
    with grpc.insecure_channel(f"unix:{path}") as channel:
        events = cache_pb2_grpc.PrefixCacheStub(channel).OpenSession(cache_pb2.OpenSessionRequest(), timeout=60)
        yield next(events).opened
        events.cancel()


def test_everything_is_private_whatever_the_umask(folder: Path, open_umask: None) -> None:
    run = folder / "new" / "run"
    settings = SIDECAR | {"server.socket": str(run / "s"), "data_dir": str(folder / "new" / "data")}
    with DaemonProcess(settings, directory=folder / "d"), Client(f"unix:{run}/s") as client:
        cache = client.register(NamespaceSpec("private", 4, (PartSpec("full", 0, 128),)))
        assert cache.store(range(40), bytes(1280), durable=True).committed == 10
        found = {path: mode(path) for path in (folder / "new").rglob("*")}
        assert sum(stat.S_ISSOCK(path.lstat().st_mode) for path in found) == 2
        assert {"daemon.lock", "LOCK", "SUPERBLOCK", "data.mdb"} <= {path.name for path in found}
        assert any("slabs" in path.parts and path.is_file() for path in found)
        open_to_others = {str(path): f"{bits:04o}" for path, bits in found.items() if bits & 0o077}
        assert not open_to_others


@pytest.mark.slow
def test_a_readable_data_directory_is_closed(folder: Path, launch: Callable[..., Remote]) -> None:
    (folder / "data").mkdir(mode=0o755)
    (folder / "disk").mkdir(mode=0o755)
    remote = launch(SIDECAR | {"data_dir": str(folder / "data"), "disk.path": str(folder / "disk")})
    assert mode(folder / "data") == mode(folder / "disk") == 0o700
    assert f"{folder / 'data'} was open to other users (mode 0755)" in remote.daemon.log.read_text()


@pytest.mark.parametrize("bits", [0o777, 0o770, 0o1777])
def test_what_others_can_write_to_is_not_private(folder: Path, bits: int) -> None:
    folder.chmod(bits)
    with pytest.raises(ConfigError, match=rf"can be written to by other users \(mode {bits:04o}\); run `chmod 700"):
        make_private("data_dir", folder)
    assert mode(folder) == bits


@pytest.mark.parametrize(("name", "bits"), [("data_dir", 0o777), ("disk.path", 0o1777)])
@pytest.mark.slow
def test_a_directory_that_others_can_write_to_is_refused(
    folder: Path, serve_failing: Callable[..., subprocess.CompletedProcess[str]], name: str, bits: int
) -> None:
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(bits)
    settings = SIDECAR | {"data_dir": str(folder / "data"), "server.socket": str(folder / "s"), name: str(shared)}
    done = serve_failing(settings)
    line = done.stderr.splitlines()[-1]
    assert done.returncode == 2
    assert f"prefixd: {name} = {shared} can be written to by other users (mode {bits:04o}); run `chmod 700" in line
    assert not list(shared.iterdir()) and mode(shared) == bits


@as_root
def test_a_directory_of_another_user_is_refused(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, and the daemon runs as user 0; run `chown 0"):
        make_private("data_dir", folder)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}, who could put another socket in its place"):
        SocketAccess().make_directory(folder)


@as_root
def test_a_link_of_another_user_on_the_way_is_refused(folder: Path) -> None:
    (folder / "mine").mkdir()
    link = folder / "link"
    link.symlink_to(folder / "mine")
    for make in (SocketAccess().make_directory, lambda path: make_private("data_dir", path)):
        make(link)
        make(link / "run")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    for make in (SocketAccess().make_directory, lambda path: make_private("data_dir", path)):
        for path in (link, link / "run", link / "new" / "run"):
            with pytest.raises(ConfigError, match=f"{link}, on the way to {path}, is a symbolic link of user {NOBODY}"):
                make(path)
    assert not (folder / "mine" / "new").exists()


def test_the_directory_of_the_socket(folder: Path, open_umask: None) -> None:
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"\(mode 0777\); run `chmod go-w {folder}`"):
        SocketAccess().make_directory(folder)
    folder.chmod(0o1777)
    SocketAccess().make_directory(folder)  # as /tmp
    for bits, made in ((0o600, 0o700), (0o660, 0o710), (0o666, 0o711), (0o620, 0o710)):
        directory = folder / f"{bits:o}" / "run"
        SocketAccess(bits).make_directory(directory)
        assert mode(directory) == made
        SocketAccess(bits).make_directory(directory)
        assert mode(directory) == made
    with pytest.raises(ConfigError, match=rf"0660, but {folder}/600/run \(mode 0700\).*run `chmod 0710 {folder}"):
        SocketAccess(0o660).make_directory(folder / "600" / "run")
    (folder / "file").touch()
    with pytest.raises(ConfigError, match="a file of that name exists"):
        SocketAccess().make_directory(folder / "file")


@pytest.mark.slow
def test_sockets_get_the_mode_that_is_set(folder: Path, launch: Callable[..., Remote]) -> None:
    remote = launch(SIDECAR | {"server.socket_mode": "0660", "server.socket": str(folder / "run" / "s")})
    assert mode(folder / "run") == 0o710
    assert mode(folder / "run" / "s") == mode(folder / "run" / "s-memory") == 0o660
    assert mode(remote.daemon.directory / "data") == 0o700


@as_root
@pytest.mark.slow
def test_users_that_are_named_use_the_daemon_and_others_do_not(folder: Path, launch: Callable[..., Remote]) -> None:
    path = folder / "run" / "s"
    settings = SIDECAR | {"server.socket": str(path), "server.allow_uids": str(NOBODY)}
    first = launch(settings)
    for _ in range(2):
        with session(path) as opened:
            memory = Path(opened.memory_socket)
            assert visit(NOBODY, path) == "connected"
            assert visit(NOBODY, memory, opened.session_id).startswith("1 {")
            assert visit(SOMEBODY, path) == visit(SOMEBODY, memory, opened.session_id) == "PermissionError"
        first.daemon.restart()  # finds the directory as it left it


@as_root
@pytest.mark.slow
def test_the_memory_goes_to_nobody_who_merely_reaches_the_socket(folder: Path, launch: Callable[..., Remote]) -> None:
    path = folder / "run" / "s"
    first = launch(SIDECAR | {"server.socket": str(path), "server.socket_mode": "0666"})
    with session(path) as opened:
        assert visit(NOBODY, path) == "connected"
        answer = visit(NOBODY, Path(opened.memory_socket), opened.session_id)
        assert answer.startswith("0 ") and "server.allow_uids" in answer
    assert f"user {NOBODY} asked for the memory and is not in server.allow_uids" in first.daemon.log.read_text()


def test_without_access_control_lists_the_remedy_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / "s"))
        monkeypatch.setattr(os, "setxattr", unsupported)
        with pytest.raises(ConfigError, match=r"allow_uids = \[7\].*Operation not supported.*socket_mode = 0660"):
            SocketAccess(uids=(7,)).open(folder / "s")


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Of HTTP/2."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


@pytest.mark.slow
def test_a_call_that_waits_has_at_most_a_mebibyte_in_memory(folder: Path) -> None:
    with DaemonProcess(SIDECAR, directory=folder / "d") as daemon, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(daemon.socket))
        caller.sendall(PREFACE + frame(4, 0, 0))
        with caller.makefile("rb") as answer:
            settings = answer.read(int.from_bytes(answer.read(9)[:3], "big"))
    values = {settings[at + 1]: int.from_bytes(settings[at + 2 : at + 6], "big") for at in range(0, len(settings), 6)}
    assert values[4] == 1 << 20, "the window of a stream"


@pytest.mark.slow
def test_a_caller_that_reads_nothing_does_not_keep_the_daemon_from_ending(folder: Path) -> None:
    head = [(":method", "POST"), (":scheme", "http"), (":path", "/x"), (":authority", "x")]
    headers = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in (*head, ("content-type", "application/grpc"))
    )
    daemon = DaemonProcess({**SIDECAR, "disk.bytes": 0}, directory=folder / "d", stop_timeout_s=30)
    daemon.start()
    try:
        with socket.socket(socket.AF_UNIX) as idle:
            idle.settimeout(60)
            idle.connect(str(daemon.socket))
            idle.sendall(PREFACE + frame(4, 0, 0))
            for call in range(5000):
                idle.sendall(frame(1, 5, 2 * call + 1, headers))
            with Client(daemon.address, memory="streamed") as client:
                client.stats()
            assert daemon.stop() == 0
    finally:
        if daemon.alive:
            daemon.kill()
