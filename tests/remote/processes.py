"""Processes that a test starts: ended by their id, whatever happens, together with the test process at the latest."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.common.tie import tied

START_S = 120.0


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now.

    The system gives it to no connection by itself: it is still free when a server comes late, or comes back.
    """
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(given // 2, given)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Process:
    """A server's process. Its output goes to a file, whose end is part of what a failed start says."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                tied(words),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=log.parent,
                env={**os.environ, **(env or {})},
            )

    def wait_until(self, ready: Callable[[], object]) -> None:
        """Waits until `ready()` is true and raises no OSError."""
        give_up = time.monotonic() + START_S
        while True:
            with suppress(OSError):
                if ready():
                    return
            if self._process.poll() is not None or time.monotonic() > give_up:
                self.end()
                raise RuntimeError(f"{self._process.args!r} has not started: {self._log.read_text()[-2000:]}")
            time.sleep(0.01)

    def freeze(self) -> None:
        """Stops it with SIGSTOP: its sockets stay open, and nobody answers. Returns when all threads stand."""
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        while any(_state(task) not in "TX" for task in tasks.iterdir()):
            time.sleep(0.001)

    def thaw(self) -> None:
        """Lets it go on."""
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kills it, frozen or not, and waits for it."""
        self._process.kill()
        self._process.wait()


def _state(task: Path) -> str:
    """A thread's state, for example "S" (waits), "T" (is stopped) or "X" (has ended)."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def listens(port: int) -> bool:
    """Whether somebody accepts connections there."""
    with socket.create_connection(("127.0.0.1", port), 1.0):
        return True
