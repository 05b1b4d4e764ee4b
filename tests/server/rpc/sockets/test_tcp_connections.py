"""One host does not take all connections of the TCP door."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from prefixd.server.rpc.sockets.tcp_connections import TcpConnections, host_of


class Door:
    """A listening socket and what has connected to it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.accepted: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def connect(self, host: str, count: int) -> list[socket.socket]:
        """Connections from a host of this machine; both ends are in this process."""
        made = []
        for _ in range(count):
            address, source = ("127.0.0.1", self.port), (host, 0)
            made.append(self._stack.enter_context(socket.create_connection(address, source_address=source)))
            self.accepted.append(self._stack.enter_context(self._listener.accept()[0]))
        return made


@pytest.fixture
def door() -> Iterator[Door]:
    with ExitStack() as stack:
        yield Door(stack)


def open_ones(connections: list[socket.socket]) -> list[bool]:
    """Of each, whether the other end has it open."""
    found = []
    for connection in connections:
        connection.setblocking(False)
        try:
            found.append(connection.recv(1) != b"")
        except BlockingIOError:
            found.append(True)
    return found


def test_the_host_with_most_loses_its_newest(door: Door) -> None:
    watch = TcpConnections(door.port, limit=12, of_host=3)
    honest, first = door.connect("127.0.0.1", 4), door.connect("127.0.0.2", 8)
    watch.enforce_limit()
    assert open_ones(honest + first) == [True] * 12, "as many as may be"
    later = door.connect("127.0.0.2", 20) + door.connect("127.0.0.3", 2)
    watch.enforce_limit()
    assert watch.cut_off == 22
    assert open_ones(honest) == [True] * 4
    assert open_ones(first) == [True] * 6 + [False] * 2, "the newest went first"
    assert open_ones(later) == [False] * 20 + [True] * 2


def can_connect(port: int, host: str) -> bool:
    """Whether a host can open another connection at once."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=0.3, source_address=(host, 0)).close()
    except TimeoutError:
        return False
    return True


def test_who_lost_connections_opens_none_until_it_has_closed_some(door: Door) -> None:
    watch = TcpConnections(door.port, limit=8, of_host=2)
    many = door.connect("127.0.0.2", 12)
    watch.enforce_limit()
    assert watch.cut_off == 4
    assert not can_connect(door.port, "127.0.0.2")
    assert can_connect(door.port, "127.0.0.3")
    for accepted in door.accepted[-5:]:  # as gRPC does with those that were cut off
        accepted.close()
    watch.enforce_limit()
    assert not can_connect(door.port, "127.0.0.2"), "it has as many as before"
    for connection, accepted in zip(many[:4], door.accepted[:4], strict=True):
        connection.close()
        accepted.close()
    watch.enforce_limit()
    assert can_connect(door.port, "127.0.0.2")


def test_a_filter_for_many_hosts_is_taken_by_the_kernel(door: Door) -> None:
    hosts = [f"127.0.1.{number}" for number in range(32)] + [f"2001:db8:0:{number:x}::/64" for number in range(32)]
    watch = TcpConnections(door.port)
    watch._shut_out_hosts([door._listener], frozenset(hosts))
    assert not can_connect(door.port, "127.0.1.31")
    assert can_connect(door.port, "127.0.2.1")
    watch._shut_out_hosts([door._listener], frozenset())
    assert can_connect(door.port, "127.0.1.31")


def test_hosts_with_few_keep_them_however_many_hosts_there_are(door: Door) -> None:
    watch = TcpConnections(door.port, limit=5, of_host=2)
    connections = [each for host in range(2, 8) for each in door.connect(f"127.0.0.{host}", 2)]
    watch.enforce_limit()
    assert (open_ones(connections), watch.cut_off) == ([True] * 12, 0)


def test_connections_to_other_doors_do_not_count(door: Door) -> None:
    with ExitStack() as stack:
        others = Door(stack).connect("127.0.0.2", 20)
        watch = TcpConnections(door.port, limit=4, of_host=1)
        watch.enforce_limit()
        assert (open_ones(others), watch.cut_off) == ([True] * 20, 0)


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_what_one_host_is(address: str, host: str) -> None:
    assert host_of(address) == host


def test_a_descriptor_that_becomes_another_files_meanwhile_is_no_leak(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = TcpConnections(door.port, limit=1, of_host=1)
    many, really = door.connect("127.0.0.2", 3), os.dup
    no_socket = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setattr("prefixd.server.rpc.sockets.tcp_connections.os.dup", lambda descriptor: really(no_socket))
    before = len(os.listdir("/proc/self/fd"))
    watch.enforce_limit()
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(no_socket)
    assert open_ones(many) == [True] * 3


def test_a_host_without_a_filter_is_not_said_to_be_shut_out(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = TcpConnections(door.port, limit=8, of_host=2)
    door.connect("127.0.0.2", 12)

    def refuse(*args: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patched:
        patched.setattr("prefixd.server.rpc.sockets.tcp_connections.socket.socket.setsockopt", refuse, raising=False)
        watch.enforce_limit()
        watch.enforce_limit()
    assert watch._shut_out == frozenset() and caplog.text.count("can open others (Cannot allocate memory)") == 1
    assert can_connect(door.port, "127.0.0.2")
    watch.enforce_limit()  # as there are still too many
    assert watch._shut_out == {"127.0.0.2"} and not can_connect(door.port, "127.0.0.2")


def test_the_thread_goes_on_whatever_a_look_ends_with(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = threading.Semaphore(0)
    watch = TcpConnections(door.port)

    def look() -> None:
        looked.release()
        raise KeyError(7)

    monkeypatch.setattr(watch, "enforce_limit", look)
    monkeypatch.setattr("prefixd.server.rpc.sockets.tcp_connections._EVERY_S", 0.001)
    watch.start()
    assert all(looked.acquire(timeout=10) for _ in range(3))
    watch.stop()
    watch._thread.join(10)
    assert caplog.text.count("cannot be checked (KeyError(7))") == 1
