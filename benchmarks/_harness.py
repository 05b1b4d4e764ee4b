"""What every benchmark shares: a daemon of its own, results with their circumstances, progress, failures in
one line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, Self

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("grpcio", "protobuf", "numpy", "torch", "xxhash", "lmdb", "transformers")
_SIZES = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


class BenchmarkError(Exception):
    """Ends a benchmark with exit status 2 and this one line."""


class Daemon:
    """A daemon as a real process, in a temporary directory of its own; a context manager.

    `settings` are environment names without the prefix, such as `{"CPU__BYTES": "2GiB"}`. `PREFIXD_*`
    variables and configuration of the caller do not reach it, so that a run can be repeated. Raises
    `BenchmarkError` with the end of the daemon's log when it does not become ready.
    """

    def __init__(
        self,
        settings: Mapping[str, str | int] | None = None,
        *,
        arguments: Sequence[str] = (),
        folder: Path | None = None,
        ready_s: float = 60.0,
    ) -> None:
        self._settings = dict(settings or {})
        self._arguments = list(arguments)
        self._own_folder = folder is None
        # Not below a long path: a unix socket's name has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="prefixd-")) if folder is None else folder
        self._ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None
        self.tcp: str | None = None

    @property
    def socket(self) -> Path:
        """The daemon's unix socket."""
        return self.folder / "prefixd.sock"

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix:{self.socket}"

    @property
    def log(self) -> Path:
        """What the daemon writes to stderr."""
        return self.folder / "daemon.log"

    @property
    def pid(self) -> int:
        """The process; raises `BenchmarkError` when none runs."""
        if self._process is None:
            raise BenchmarkError("the daemon is not running")
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove_folder()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._remove_folder()

    def start(self) -> None:
        """Starts it (again, on the same directory) and returns once it says that it is ready."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXD_")}
        paths = [str(_ROOT), str(_ROOT / "swap"), str(_ROOT / "scheduler"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        defaults = {"DATA_DIR": self.folder / "data", "SERVER__SOCKET": self.socket}
        for name, value in {**defaults, **self._settings}.items():
            environment[f"PREFIXD_{name}"] = str(value)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefixd", "serve", "--json", *self._arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        try:
            self.tcp = self._wait_until_ready().get("tcp")
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 30.0) -> int | None:
        """Ends it with SIGTERM, with SIGKILL when it does not go; returns its exit status."""
        return self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> int | None:
        """Ends it with SIGKILL, as a crash would."""
        return self._end(signal.SIGKILL, 30.0)

    def _end(self, how: signal.Signals, timeout_s: float) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(how)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        return process.returncode

    def _wait_until_ready(self) -> dict[str, Any]:
        output = self._process.stdout if self._process is not None else None
        if output is None:
            raise BenchmarkError("the daemon was not started")
        deadline = time.monotonic() + self._ready_s
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(output.fileno(), 4096) if readable else b""
            if not data:
                why = "ended before it was ready" if readable else f"was not ready within {self._ready_s:g} s"
                raise BenchmarkError(f"the daemon {why}: {self._last_log_line()}")
            line += data
        try:
            ready: dict[str, Any] = json.loads(line.splitlines()[0])
        except ValueError as error:
            raise BenchmarkError(f"the daemon announced itself with {line[:200]!r}, not JSON") from error
        return ready

    def _last_log_line(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it logged nothing"

    def _remove_folder(self) -> None:
        if self._own_folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; `description` is what the benchmark measures."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the result here")
    made.add_argument("--plot", type=Path, metavar="FILE", help="draw the result here (needs matplotlib)")
    return made


def size(text: str) -> int:
    """Bytes written as 8GiB, 512MiB or 4096; an argparse type."""
    number = text.rstrip("BKMGIbkmgi")
    unit = text[len(number) :].upper()
    try:
        value = int(float(number) * _SIZES[unit])
    except (ValueError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 8GiB, 512MiB or 4096") from error
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is negative")
    return value


def positive(text: str) -> int:
    """A positive integer; an argparse type."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return value


def circumstances() -> dict[str, Any]:
    """Where and of what a result was taken: machine, versions, commit, command line."""
    return {
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "commit": _commit(),
        "command": [Path(sys.argv[0]).stem, *sys.argv[1:]],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def finish(name: str, result: Mapping[str, Any], json_file: Path | None) -> None:
    """Prints a result, and writes it with its circumstances where asked to."""
    for key, value in result.items():
        if not isinstance(value, list):
            print(f"{key:>24}  {value:.6g}" if isinstance(value, float) else f"{key:>24}  {value}")
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": name, **result, "circumstances": circumstances()}
        json_file.write_text(json.dumps(content, indent=2) + "\n")


def plot(file: Path | None, draw: Callable[[Any], None]) -> None:
    """Has `draw` fill a matplotlib axes and saves the figure; says so when matplotlib is missing."""
    if file is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed, so there is no plot: pip install matplotlib", file=sys.stderr)
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw(figure.add_subplot())
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total` steps; shows a bar when stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=total)
        yield lambda: bars.advance(task)


def run(main: Callable[[], None]) -> NoReturn:
    """Runs a benchmark: status 0, 2 with one line for an error a user can act on, 130 for Ctrl-C."""
    from prefixd.client import ClientError

    try:
        main()
    except (BenchmarkError, ClientError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {error.strerror}: {error.filename}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, with "+changes" when the working tree differs from it; None outside a repository."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+changes" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True, timeout=10
    ).stdout.strip()
