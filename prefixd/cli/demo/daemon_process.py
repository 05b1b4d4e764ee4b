"""Starts and ends a daemon in its own process, for the demo, the benchmarks and the tests."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from prefixd.base.errors import PrefixdError
from prefixd.base.setting_sources import ENV_PREFIX
from prefixd.process import signals

_LAST_LINES = 20
_LAST_BYTES = 32 << 10


class DaemonFailed(PrefixdError):
    """The daemon did not start or did not end; the message has the last lines of its log."""


class DaemonProcess:
    """`prefixd serve` with its data, its socket and its log in `directory`; a later start restores its cache there.

    Use it as a context manager: at the end of the block the process gets SIGTERM, writes its cache back and ends. It
    also gets SIGTERM when the thread that started it ends in any way.

    The daemon reads neither the caller's `PREFIXD_*` variables nor any other configuration, so that a run can be
    repeated.

    Args:
        settings: by dotted name (`{"cpu.bytes": "2GiB"}`).
        directory: by default a temporary one, which is removed at the end of the block.
        start_timeout_s: longest time until the daemon answers.
        stop_timeout_s: longest time until the daemon ends.
        python: the interpreter.
        program: arguments of the interpreter, followed by this process's id and the command line of `prefixd`.
        config: a file with further settings.
        log_level: `--log-level`.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        directory: Path | None = None,
        start_timeout_s: float = 120.0,
        stop_timeout_s: float = 60.0,
        python: str | Path = sys.executable,
        program: Sequence[str] = ("-m", "prefixd.cli.tethered"),
        config: Path = Path(os.devnull),
        log_level: str = "warning",
    ) -> None:
        self._temporary = directory is None
        # A short path, since a unix socket's path has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="prefixd-")) if directory is None else directory
        self.tcp: str | None = None
        """host:port of the running daemon for other hosts; None without the setting `server.tcp`."""
        self.metrics: str | None = None
        """URL of the running daemon's operators' HTTP port; None without the setting `server.metrics`."""
        self.http: str | None = None
        """URL of the running daemon's users' HTTP port; None without the setting `server.http`."""
        self.opening_s = 0.0
        """Seconds of the last start, from opening the tiers (and restoring the blocks on disk) to the first call."""
        self._settings = dict(settings or {})
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._python = str(python)
        self._program = program
        self._config = config
        self._log_level = log_level
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """The daemon's unix socket."""
        return self.directory / "prefixd.sock"

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"unix:{self.socket}"

    @property
    def log(self) -> Path:
        """The daemon's stderr of all its runs: warnings and errors."""
        return self.directory / "daemon.log"

    @property
    def pid(self) -> int:
        """The daemon's process; raises DaemonFailed if it was not started."""
        if self._process is None:
            raise DaemonFailed("the daemon is not running; start it first")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove_directory()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            self.stop()
        finally:
            self._remove_directory()

    def start(self) -> None:
        """Starts the daemon and waits until it answers; raises DaemonFailed."""
        self.launch()
        self.wait_until_ready()

    def configure(self, settings: Mapping[str, object]) -> None:
        """Changes these settings from the next start on; all others stay."""
        self._settings.update(settings)

    def launch(self) -> None:
        """Starts the process, without waiting until it answers."""
        if self._process is not None:
            raise DaemonFailed(f"the daemon already runs as process {self._process.pid}; stop it first")
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # A process group of its own: Ctrl-C reaches only this process, which then ends the daemon in order.
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)},
            )

    def wait_until_ready(self) -> None:
        """Waits until the launched daemon answers; if it does not, ends it and raises DaemonFailed."""
        if self._process is None:
            raise DaemonFailed("the daemon is not running; launch it first")
        try:
            ready = self._read_announcement(self._process)
            self.tcp, self.metrics, self.http = ready.get("tcp"), ready.get("metrics"), ready.get("http")
            self.opening_s = float(ready["opening_s"])
        except BaseException:
            self._end(signal.SIGTERM)
            raise

    def stop(self) -> int | None:
        """Sends SIGTERM and waits for the end; returns the exit status, or None if the daemon did not run.

        If that takes longer than `stop_timeout_s`, sends SIGKILL and raises DaemonFailed.
        """
        return self._end(signal.SIGTERM)

    def terminate(self) -> None:
        """Sends SIGTERM without waiting for the end; `stop` and `kill` wait for it."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> int | None:
        """Sends SIGKILL, as in a crash; returns the exit status, or None if the daemon did not run."""
        return self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stops the daemon and starts it on the same directory."""
        self.stop()
        self.start()

    def replace(self) -> None:
        """Stops the daemon and starts one at the same address with an empty data directory."""
        self.stop()
        shutil.rmtree(self.directory / "data")
        self.start()

    def last_words(self) -> str:
        """Returns the end of the log, to append to an error's message."""
        lines = last_lines(self.log, _LAST_LINES)
        return "; its log ends with: " + " | ".join(lines) if lines else ""

    def _command(self) -> list[str]:
        settings = {"data_dir": self.directory / "data", "server.socket": self.socket, **self._settings}
        return [
            *(self._python, *self._program, str(os.getpid())),
            *("serve", "--json", f"--log-level={self._log_level}", f"--config={self._config}"),
            *(f"--set={name}={_to_text(value)}" for name, value in settings.items()),
        ]

    def _read_announcement(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Waits for the line of JSON that the daemon prints when it is ready."""
        if process.stdout is None:
            raise DaemonFailed("the daemon was started without a pipe for its line of JSON")
        deadline = time.monotonic() + self._start_timeout_s
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(process.stdout.fileno(), 4096) if readable else b""
            if not data:
                why = "ended before it was ready" if readable else f"was not ready within {self._start_timeout_s:g} s"
                raise DaemonFailed(f"the daemon {why}{self.last_words()}")
            line += data
        try:
            ready: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise DaemonFailed(f"the daemon printed {line[:200]!r}, which is not JSON") from error
        if "error" in ready:
            raise DaemonFailed(f"the daemon ended before it was ready{self.last_words()}")
        return ready

    def _end(self, how: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        with process:
            process.send_signal(how)
            try:
                return process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired as error:
                process.kill()
                raise DaemonFailed(
                    f"the daemon did not end within {self._stop_timeout_s:g} s of {how.name}{self.last_words()}"
                ) from error
            except BaseException:
                process.kill()
                raise

    def _remove_directory(self) -> None:
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the block as Ctrl-C does, so that its daemons end in order; the exit status is 143.

    For the main thread. It raises SIGINT, which asyncio turns into a cancellation; if SIGINT is ignored, as in a
    script's background jobs, it raises KeyboardInterrupt.
    """
    received: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        received.append(number)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with signals.interruptible():
            yield
    except KeyboardInterrupt as error:
        if received:
            raise SystemExit(128 + signal.SIGTERM) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _to_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def last_lines(log: Path, count: int) -> list[str]:
    """Returns at most `count` lines from the end of a log, without empty ones; none if there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line.strip() for line in lines if line.strip()][-count:]
