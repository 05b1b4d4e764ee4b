"""What every benchmark shares: its options, the daemon it measures, results with their circumstances, progress, and
failures in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from prefixd.base.errors import PrefixdError
from prefixd.base.sizes import parse_size
from prefixd.cli.demo.daemon_process import DaemonProcess, ended_by_sigterm
from prefixd.workloads.circumstances import circumstances


class BenchmarkError(Exception):
    """Ends a benchmark with exit status 2 and this one line."""


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; `description` is what the benchmark measures."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=writable, metavar="FILE", help="write the result here")
    made.add_argument("--plot", type=drawable, metavar="FILE", help="draw the result here (needs matplotlib)")
    return made


def add_address(made: argparse.ArgumentParser) -> None:
    """The option `--address`, for `daemon_address`."""
    made.add_argument("--address", help="a running daemon; by default one is started for this run")


@contextmanager
def daemon_address(given: str | None, settings: Mapping[str, object]) -> Iterator[str]:
    """`given`, or else the address of a daemon with `settings` that runs as long as the context."""
    if given:
        yield given
        return
    with DaemonProcess(settings) as daemon:
        yield daemon.address


def size(text: str) -> int:
    """Bytes written as 8GiB, 512MiB or 4096; an argparse type."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def positive(text: str) -> int:
    """A positive integer; an argparse type."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not positive")
    return value


def number(least: float, most: float) -> Callable[[str], float]:
    """An argparse type: a number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not from {least:g} to {most:g}")
        return value

    return parse


def json_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE, the value in JSON or else a string; an argparse type."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody used a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish(name: str, result: Mapping[str, Any], json_file: Path | None) -> None:
    """Prints a result, and writes it with its circumstances where asked to."""
    for key, value in result.items():
        if not isinstance(value, list):
            print(f"{key:>24}  {value:.6g}" if isinstance(value, float) else f"{key:>24}  {value}")
    if json_file is not None:
        write(name, result, json_file)


def write(name: str, result: Mapping[str, Any], json_file: Path) -> None:
    """Writes a result with its circumstances."""
    content = {"benchmark": name, **result, "circumstances": circumstances()}
    json_file.write_text(json.dumps(content, indent=2) + "\n")


def plot(file: Path | None, draw: Callable[[Any], None], columns: int = 1) -> None:
    """Has `draw` fill a matplotlib axes, or `columns` of them in a row, and saves the figure; says so if matplotlib is
    missing."""
    if file is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed, so there is no plot: pip install matplotlib", file=sys.stderr)
        return
    figure = Figure(figsize=(7 if columns == 1 else 4 * columns, 4), layout="constrained")
    draw(figure.add_subplot() if columns == 1 else figure.subplots(1, columns))
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
    """Runs a benchmark: status 0, 2 with one line for an error a user can act on, 130 for Ctrl-C, 143 for SIGTERM."""
    try:
        with ended_by_sigterm():
            main()
    except _foreseen() as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        print(f"error: {error.strerror or error}{where}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _foreseen() -> tuple[type[Exception], ...]:
    # Asked for only once something was raised: what measures a GPU has to run where grpc is not installed.
    with suppress(ImportError):
        from prefixd.client import ClientError

        return BenchmarkError, PrefixdError, ClientError
    return BenchmarkError, PrefixdError


def writable(text: str) -> Path:
    """A file to write a result to; refused now rather than after the minutes that the run takes."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make {path.parent}: {error.strerror}; choose another") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write to {path}; choose another file")
    return path


def drawable(text: str) -> Path:
    """As `writable`, a file that a plot can be saved as."""
    path = writable(text)
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:  # `plot` says what is missing
        return path
    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.removeprefix(".").lower() not in kinds:
        raise argparse.ArgumentTypeError(f"{path} names no kind of picture; end it with one of .{', .'.join(kinds)}")
    return path
