"""The frame of every benchmark: options, a result with its circumstances, tables, plot, progress, exit status; and the
daemon that it measures.

    @harness.benchmark("match", __doc__, option("--repeats", 1000, "matches to time"))
    def main(options: harness.Options) -> harness.Outcome:
        ...

    if __name__ == "__main__":
        harness.run(main)
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from benchmarks.common.options import Option, drawable, result_file
from prefixd.base.errors import PrefixdError
from prefixd.cli.demo.daemon_process import DaemonProcess, ended_by_sigterm
from prefixd.workloads.circumstances import circumstances

_SHOWN = 20
_OWN = ("json", "plot")
PLOT = Option("--plot", {"type": drawable, "metavar": "FILE", "help": "draw the result here (needs matplotlib)"})
"""The option of a benchmark whose outcome has `draw`."""
Options = argparse.Namespace


class BenchmarkError(Exception):
    """Ends a benchmark with exit status 2 and this one line."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of figures, and the columns to print. A column may name a figure inside another one: "ttft_s.p50"."""

    rows: Sequence[Mapping[str, Any]]
    columns: Sequence[str]

    def print(self) -> None:
        """Prints aligned columns below a line of names; a figure that a row does not have is left empty."""
        lines = [list(self.columns), *([_cell(row, column) for column in self.columns] for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for first, *others in lines:
            print(first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        result: figures for the JSON. The first lines of a list `found` are printed.
        broken: broken promises, in words. If there are some, the benchmark writes the result and then fails.
        tables: printed beside the plain figures.
        draw: fills the axes of the plot of a benchmark that has the option `PLOT`.
        columns: number of axes in the plot, in one row.
    """

    result: Mapping[str, Any]
    broken: Sequence[str] = ()
    tables: Sequence[Table] = ()
    draw: Callable[[Any], None] | None = None
    columns: int = 1


class Benchmark:
    """One command, `python -m benchmarks.MODULE`, made by `benchmark`."""

    def __init__(
        self,
        module: str,
        description: str,
        options: Sequence[Option],
        measure: Callable[[Options], Outcome],
        unrecorded: Sequence[str],
    ) -> None:
        self._module = module
        self._description = description
        self._options = options
        self._measure = measure
        self._unrecorded = (*_OWN, *unrecorded)

    def parser(self) -> argparse.ArgumentParser:
        made = parser(self._module, self._description)
        for each in self._options:
            each.add_to(made)
        return made

    def __call__(self, arguments: Sequence[str] | None = None) -> None:
        """Runs the command. Raises BenchmarkError if a promise was broken, after it has written the result."""
        options = self.parser().parse_args(arguments)
        began_s = time.perf_counter()
        outcome = self._measure(options)
        seconds = round(time.perf_counter() - began_s, 1)
        result = {**self._recorded(options), "seconds": seconds, **outcome.result}
        _print_figures(result)
        for table in outcome.tables:
            table.print()
        if options.json is not None:
            write(self._module.rpartition(".")[2], result, options.json)
        for line in result.get("found", ())[:_SHOWN]:
            print(line)
        if outcome.draw is not None:
            plot(options.plot, outcome.draw, outcome.columns)
        if outcome.broken:
            raise BenchmarkError("; ".join(outcome.broken))

    def _recorded(self, options: argparse.Namespace) -> dict[str, Any]:
        """Returns the options for the result, without files and folders of this machine."""
        return {
            name: value
            for name, value in vars(options).items()
            if name not in self._unrecorded and not (value is None or isinstance(value, Path))
        }


def benchmark(
    module: str, description: str | None, *options: Option, unrecorded: Sequence[str] = ()
) -> Callable[[Callable[[Options], Outcome]], Benchmark]:
    """Makes a command of the function that measures.

    Args:
        module: below `benchmarks`; its last part is the benchmark's name.
        description: the module's docstring, which says what the benchmark measures or checks.
        options: all options but `--json`.
        unrecorded: options that the result leaves out. It has the others, and `seconds` unless the outcome has a figure
            of that name.
    """

    def make(measure: Callable[[Options], Outcome]) -> Benchmark:
        return Benchmark(module, description or "", options, measure, unrecorded)

    return make


def bare_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser without options, for a module below `benchmarks`."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every benchmark has."""
    made = bare_parser(module, description)
    made.add_argument("--json", type=result_file, metavar="FILE", help="write the result here")
    return made


def committed(file: Path) -> Path:
    """Returns the file, for a result that no option names. Raises BenchmarkError if `result_file` refuses the file."""
    try:
        return result_file(str(file))
    except argparse.ArgumentTypeError as error:
        raise BenchmarkError(str(error)) from error


ADDRESS = Option("--address", {"help": "a running daemon; by default one is started for this run"})
"""The option whose value `daemon_address` takes."""


@contextmanager
def daemon_address(given: str | None, settings: Mapping[str, object]) -> Iterator[str]:
    """Yields `given`, or the address of a daemon with `settings` that runs as long as the context."""
    if given:
        yield given
        return
    with DaemonProcess(settings) as daemon:
        yield daemon.address


def free_port() -> int:
    """Returns a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(reached: Callable[[], bool], timeout_s: float, poll_s: float = 0.05) -> bool:
    """Waits until `reached` returns True; returns False if it does not within the time."""
    deadline = time.monotonic() + timeout_s
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(poll_s)
    return True


def missed(
    result: Mapping[str, Any],
    *,
    zero: Sequence[str] = (),
    true: Sequence[str] = (),
    most: Mapping[str, float] = MappingProxyType({}),
    least: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Returns in words, for `Outcome.broken`, the figures that are not 0, not true, above the most or below the
    least."""
    return [
        *(f"{name} is {result[name]}" for name in zero if result[name]),
        *(f"{name} is {result[name]}" for name in true if not result[name]),
        *(f"{name} is {result[name]:g}, more than {bound:g}" for name, bound in most.items() if result[name] > bound),
        *(f"{name} is {result[name]:g}, less than {bound:g}" for name, bound in least.items() if result[name] < bound),
    ]


def median_and_most(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Returns `NAME_p50_s` and `NAME_max_s`; 0 if there are no seconds."""
    ordered = sorted(seconds) or [0.0]
    return {f"{name}_p50_s": round(ordered[len(ordered) // 2], 4), f"{name}_max_s": round(ordered[-1], 4)}


def finish(name: str, result: Mapping[str, Any], json_file: Path | None) -> None:
    """Prints a result, and writes it with its circumstances if there is a file."""
    _print_figures(result)
    if json_file is not None:
        write(name, result, json_file)


def _print_figures(result: Mapping[str, Any]) -> None:
    """Prints single figures, and those one level below; lists are for tables."""
    for key, value in result.items():
        if isinstance(value, Mapping):
            value = {name: each for name, each in value.items() if not isinstance(each, Mapping | list)}
        if not isinstance(value, list) and value != {}:
            print(f"{key:>24}  {value:.6g}" if isinstance(value, float) else f"{key:>24}  {value}")


def _cell(row: Mapping[str, Any], column: str) -> str:
    value: Any = row
    for name in column.split("."):
        value = value.get(name, "") if isinstance(value, Mapping) else ""
    if isinstance(value, bool | str | None):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


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
