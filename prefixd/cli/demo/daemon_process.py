"""A daemon in its own process, for the demo, the benchmarks and the tests: started, waited for, ended by its pid."""

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
    """The daemon did not start, or did not end, as it should; the message has the last lines of its log."""


class DaemonProcess:
    """`prefixd serve` with its data, its socket and its log in `directory`. Started again, it finds there what it kept.

    `settings` are by dotted name (`{"cpu.bytes": "2GiB"}`), `config` is a file of more; other configuration and
    `PREFIXD_*` variables of the caller do not reach the daemon, so that a run can be repeated. Without `directory` it
    gets a temporary one, which goes when the context is left. Use it as a context manager: on leaving, the process
    gets SIGTERM (it writes its cache back and ends). It also gets it when the thread that started it ends, however
    that happens.

    `program` is what `python` runs; it gets this process's id and then the command line of `prefixd`.
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
        # Not below a long path: a unix socket's name has at most 107 bytes.
        self.directory = Path(tempfile.mkdtemp(prefix="prefixd-")) if directory is None else directory
        self.tcp: str | None = None
        """host:port where it listens for other hosts, when its settings say so and it runs."""
        self.metrics_port: int | None = None
        """Where it serves metrics, when its settings say so and it runs."""
        self.opening_s = 0.0
        """From opening its tiers, restoring what is on disk among it, until it took calls; of its last start."""
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
        """What a client connects to."""
        return f"unix:{self.socket}"

    @property
    def log(self) -> Path:
        """What it writes to stderr: warnings and errors, of all its runs."""
        return self.directory / "daemon.log"

    @property
    def pid(self) -> int:
        """The process; raises DaemonFailed when none runs."""
        if self._process is None:
            raise DaemonFailed("the daemon is not running; start it first")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs; False too when it ended by itself."""
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
        """Returns when the daemon answers; raises DaemonFailed."""
        self.launch()
        self.wait_until_ready()

    def configure(self, settings: Mapping[str, object]) -> None:
        """Gives it other settings from its next start on; those that are not named stay."""
        self._settings.update(settings)

    def launch(self) -> None:
        """Starts the process and does not wait until it answers."""
        if self._process is not None:
            raise DaemonFailed(f"the daemon runs already, as process {self._process.pid}; stop it first")
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # Its own group: Ctrl-C reaches us alone, and we end it in order.
                start_new_session=True,
                env={name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)},
            )

    def wait_until_ready(self) -> None:
        """Returns when the daemon that was launched answers; raises DaemonFailed, and ends it."""
        if self._process is None:
            raise DaemonFailed("the daemon is not running; launch it first")
        try:
            ready = self._announcement(self._process)
            self.tcp, self.metrics_port = ready.get("tcp"), ready.get("metrics_port")
            self.opening_s = float(ready["opening_s"])
        except BaseException:
            self._end(signal.SIGTERM)
            raise

    def stop(self) -> int | None:
        """SIGTERM and the wait for its end; its exit status, or None when it did not run.

        SIGKILL, and DaemonFailed, when it takes longer than `stop_timeout_s`.
        """
        return self._end(signal.SIGTERM)

    def terminate(self) -> None:
        """SIGTERM alone: what follows is the daemon's to do, and `stop` or `kill` to wait for."""
        os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> int | None:
        """SIGKILL, as in a crash; its exit status, or None when it did not run."""
        return self._end(signal.SIGKILL)

    def restart(self) -> None:
        """`stop`, then `start` on the same directory."""
        self.stop()
        self.start()

    def replace(self) -> None:
        """`stop`, then another daemon at the same address, with an empty data directory."""
        self.stop()
        shutil.rmtree(self.directory / "data")
        self.start()

    def last_words(self) -> str:
        """The end of its log, to be put behind an error's message."""
        said = last_lines(self.log, _LAST_LINES)
        return "; it said: " + " | ".join(said) if said else ""

    def _command(self) -> list[str]:
        settings = {"data_dir": self.directory / "data", "server.socket": self.socket, **self._settings}
        return [
            *(self._python, *self._program, str(os.getpid())),
            *("serve", "--json", f"--log-level={self._log_level}", f"--config={self._config}"),
            *(f"--set={name}={_text(value)}" for name, value in settings.items()),
        ]

    def _announcement(self, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """The line of JSON by which the daemon announces itself."""
        if process.stdout is None:
            raise DaemonFailed("the daemon was started without a pipe to announce itself on")
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
            raise DaemonFailed(f"the daemon announced itself with {line[:200]!r}, not JSON") from error
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
    """SIGTERM ends the block as Ctrl-C does, so that its daemons are ended in order; the exit status is 143.

    For the main thread. By way of SIGINT, which asyncio turns into a cancellation; a script's background jobs ignore
    that signal.
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


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def last_lines(log: Path, count: int) -> list[str]:
    """At most `count` lines from the end of a log, without the empty ones; none where there is no log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return [line.strip() for line in lines if line.strip()][-count:]
