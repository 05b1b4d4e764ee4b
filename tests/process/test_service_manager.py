"""What systemd hears of a daemon, by a socket that plays systemd's part."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.process.service_manager import ServiceManager
from tests.waiting import WAIT_S, wait_until

WEDGE = """if True:
    import runpy, signal, time
    signal.signal(signal.SIGUSR1, lambda *_: time.sleep(600))
    runpy.run_module("prefixd.cli.tethered", run_name="__main__")
"""
"""A daemon whose event loop is held by a callback after SIGUSR1."""


class Systemd:
    """The messages that have come, each as its lines."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(os.fspath(path))
        self.socket.settimeout(WAIT_S)

    def next(self) -> dict[str, str]:
        return dict(line.split("=", 1) for line in self.socket.recv(65536).decode().split("\n"))

    def until(self, name: str) -> dict[str, str]:
        while name not in (message := self.next()):
            pass
        return message

    def forget(self) -> None:
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65536):
                pass
        except BlockingIOError:
            self.socket.settimeout(WAIT_S)


@pytest.fixture
def systemd(folder: Path) -> Iterator[Systemd]:
    manager = Systemd(folder / "notify")
    with closing(manager.socket):
        yield manager


def environ(folder: Path, **more: str) -> dict[str, str]:
    return {"NOTIFY_SOCKET": str(folder / "notify"), **more}


def test_states_are_said_in_systemds_words(systemd: Systemd, folder: Path) -> None:
    manager = ServiceManager(environ(folder))
    manager.ready("takes calls\nat unix:/x")
    assert systemd.next() == {"READY": "1", "STATUS": "takes calls at unix:/x"}
    manager.status("degraded")
    assert systemd.next() == {"STATUS": "degraded"}
    manager.reloading()
    reload = systemd.next()
    assert reload["RELOADING"] == "1" and int(reload["MONOTONIC_USEC"]) > 0
    manager.stopping("drains")
    assert systemd.next() == {"STOPPING": "1", "STATUS": "drains"}


def test_an_abstract_socket_is_one_too() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # the kernel chooses an abstract name
        receiver.settimeout(WAIT_S)
        ServiceManager({"NOTIFY_SOCKET": "@" + receiver.getsockname()[1:].decode()}).status("here")
        assert receiver.recv(100) == b"STATUS=here"


def test_children_do_not_speak_for_the_daemon(folder: Path) -> None:
    environment = environ(folder, WATCHDOG_USEC="3000000", WATCHDOG_PID=str(os.getpid()), HOME="/")
    assert ServiceManager(environment).watchdog_s == 3.0
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"WATCHDOG_USEC": "1000"},
        {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"},
        {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
async def test_without_a_watchdog_for_this_process_nobody_is_told_anything(variables: dict[str, str]) -> None:
    manager = ServiceManager(variables)
    assert manager.watchdog_s is None
    await manager.watch()


async def test_signs_of_life_come_from_the_loop_while_it_runs(systemd: Systemd, folder: Path) -> None:
    manager = ServiceManager(environ(folder, WATCHDOG_USEC="3000"))
    watching = asyncio.create_task(manager.watch())
    loop = asyncio.get_running_loop()
    for _ in range(3):
        assert await loop.run_in_executor(None, systemd.next) == {"WATCHDOG": "1"}
    watching.cancel()
    await asyncio.wait({watching})


def test_a_service_manager_that_is_gone_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    manager = ServiceManager(environ(folder))
    with caplog.at_level(logging.WARNING):
        manager.ready("takes calls")
        manager.status("still does")
    assert [record.getMessage() for record in caplog.records] == [
        f"the service manager at NOTIFY_SOCKET={folder / 'notify'} takes no messages: "
        "[Errno 2] No such file or directory"
    ]


@pytest.mark.slow
def test_a_daemon_starts_reloads_and_ends_under_it(
    systemd: Systemd, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ(folder, WATCHDOG_USEC="300000").items():
        monkeypatch.setenv(name, value)
    daemon = DaemonProcess({"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}, directory=folder / "d")
    with daemon:
        assert systemd.until("READY")["STATUS"] == f"takes calls at unix:{daemon.socket}"
        assert systemd.until("WATCHDOG")
        os.kill(daemon.pid, signal.SIGHUP)
        systemd.until("RELOADING")
        systemd.until("READY")
        systemd.forget()
        os.kill(daemon.pid, signal.SIGTERM)
        assert "drains" in systemd.until("STOPPING")["STATUS"]
        wait_until(lambda: not daemon.alive)


@pytest.mark.slow
def test_a_daemon_whose_loop_is_held_gives_no_sign_of_life_and_says_where(
    systemd: Systemd, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ(folder, WATCHDOG_USEC="300000").items():
        monkeypatch.setenv(name, value)
    settings = {"cpu.bytes": "4MiB", "disk.bytes": "16MiB"}
    daemon = DaemonProcess(settings, directory=folder / "d", program=("-c", WEDGE))
    daemon.start()
    systemd.until("WATCHDOG")
    os.kill(daemon.pid, signal.SIGUSR1)
    wait_until(lambda: _is_silent(systemd, 1.0), "the daemon still gives signs of life")
    os.kill(daemon.pid, signal.SIGABRT)  # as systemd does
    wait_until(lambda: not daemon.alive)
    daemon.kill()
    assert 'File "<string>", line 3 in <lambda>' in daemon.log.read_text()


def _is_silent(systemd: Systemd, seconds: float) -> bool:
    systemd.forget()
    systemd.socket.settimeout(seconds)
    try:
        systemd.next()
    except TimeoutError:
        return True
    return False
