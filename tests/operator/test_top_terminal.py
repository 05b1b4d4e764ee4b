"""`prefixd top` in a real terminal of 80 x 24 (tmux): it shows, takes keys, survives a restart and leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client, NamespaceSpec, PartSpec
from tests.operator.programs import find_program
from tests.waiting import wait_until


class Terminal:
    """A terminal of its own tmux server."""

    def __init__(self, program: str, folder: Path) -> None:
        self._program = program
        self._socket = folder / "tmux"
        self("new-session", "-d", "-x", "80", "-y", "24", "sh")

    def __call__(self, *arguments: str) -> str:
        command = [self._program, "-S", os.fspath(self._socket), "-f", os.devnull, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    def type(self, *keys: str) -> None:
        self("send-keys", *keys)

    @property
    def text(self) -> str:
        return self("capture-pane", "-p")

    def shows(self, *words: str) -> None:
        wait_until(lambda: all(word in self.text for word in words), lambda: self.text)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(find_program("tmux"), tmp_path)
    yield terminal
    terminal("kill-server")


def test_top_over_a_restart(terminal: Terminal) -> None:
    with DaemonProcess({"cpu.bytes": "1MiB", "disk.bytes": "4MiB"}) as daemon:
        with Client(daemon.address, name="an engine") as client:
            cache = client.register(NamespaceSpec("a-model", 4, (PartSpec("full", 0, 4096),)))
            cache.store(range(32), bytes(8 * 4096), durable=True)
            command = f"{sys.executable} -m prefixd top --interval 0.2 --address {daemon.address}"
            terminal.type(command, "Enter")
            terminal.shows("32.0 KiB of 1.0 MiB", "sessions 1", "q Quit")
            assert len(terminal.text.splitlines()) <= 24
            terminal.type("n")
            terminal.shows("a-model")
            terminal.type("s")
            terminal.shows("an engine")
        daemon.stop()
        terminal.shows("no daemon", "the last figures")
        daemon.start()
        terminal.shows("sessions 0", "prefixd 0.")
        assert "no daemon" not in terminal.text
        terminal.type("q")
        wait_until(lambda: "Quit" not in terminal.text, lambda: terminal.text)
        terminal.type("echo status=$?", "Enter")
        terminal.shows("status=0")
        assert "Traceback" not in terminal.text
