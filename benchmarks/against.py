"""The hot path beside that of an earlier commit: each call's time here over its time there.

    python -m benchmarks.against COMMIT

Starts the daemon of each tree with its defaults and its own client, and both take turns, a few calls at a time, so that
what else runs on the machine meets both. Where a process finds its memory makes copies up to a tenth slower, so they
start several times, each as often first as the other. An operation's ratio is the median of the launches' ratios, which
are medians of their rounds; between `low` and `high` it lies with a probability of 95% (bootstrap over launches and
rounds). Fails if an operation is surely slower than --most allows; blocks of 4 KiB, whose bytes cost nothing beside
the calls, have no bound.

match: a cached prompt of 1,000 blocks. store, load: 256 blocks of 4 KiB or 2 MiB through shared memory. generate: 16
tokens behind a new prompt of 200, on the embedded model's worker.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.common import harness
from benchmarks.common.options import Option, number, option

ROOT = Path(__file__).parents[1]
CALLS = {"match": 40, "store_4kib": 8, "load_4kib": 8, "store_2mib": 1, "load_2mib": 1, "generate": 1}
"""Calls of each operation in a round: about a tenth of a second."""
BOUND = ("match", "store_2mib", "load_2mib", "generate")
_DRIVER = Path(__file__).parent / "against_parts/driver.py"
_ROOMS = ("", "swap", "scheduler")  # of a tree, with packages
_DRAWN = 2000
Seconds = npt.NDArray[np.float64]


class Driver:
    """The driver of one tree.

    Args:
        tree: its root.

    Raises:
        BenchmarkError: it has ended.
    """

    def __init__(self, tree: Path) -> None:
        path = os.pathsep.join(str(tree / room) for room in _ROOMS)
        self._tree = tree
        self.process = subprocess.Popen(
            [sys.executable, "-P", _DRIVER],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Driver:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes stdin, at which it ends

    def seconds(self, operation: str, calls: int) -> list[float]:
        """Returns the seconds of each call."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{operation} {calls}\n")
        self.process.stdin.flush()
        found: list[float] = json.loads(self._answer())
        return found

    def _answer(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise harness.BenchmarkError(f"the daemon or the client of {self._tree} has failed; its errors are above")
        return line


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """The files of a commit in a temporary folder. Raises BenchmarkError if there is no such commit."""
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit], capture_output=True, check=False)
    if archive.returncode:
        reason = archive.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise harness.BenchmarkError(f"commit {commit}: {' '.join(reason)}; name one of this repository's commits")
    with tempfile.TemporaryDirectory(prefix="prefixd-against-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def compare(there: Seconds, here: Seconds, seed: int = 0) -> dict[str, float]:
    """The ratio of paired rounds, and the interval that holds it with a probability of 95%.

    Args:
        there: [launches, rounds] seconds of the other commit.
        here: [launches, rounds] seconds of this one.
        seed: of the bootstrap.
    """
    ratios, rng = np.asarray(here) / np.asarray(there), np.random.default_rng(seed)
    launches, rounds = ratios.shape
    drawn_launches = rng.integers(launches, size=(_DRAWN, launches, 1))
    drawn = ratios[drawn_launches, rng.integers(rounds, size=(_DRAWN, launches, rounds))]
    low, high = np.quantile(np.median(np.median(drawn, axis=2), axis=1), (0.025, 0.975))
    return {
        "there_s": float(f"{np.median(there):.4g}"),
        "here_s": float(f"{np.median(here):.4g}"),
        "ratio": round(float(np.median(np.median(ratios, axis=1))), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
    }


def measure(trees: Sequence[Path], launches: int, rounds: int) -> dict[str, dict[str, float]]:
    """Compares two trees, the other commit's first."""
    seconds = {name: np.empty((2, launches, rounds)) for name in CALLS}
    with harness.progress("rounds", launches * (rounds + 1)) as step:
        for launch in range(launches):
            with ExitStack() as stack:
                started = [Driver(trees[which]) for which in order(launch)]
                for driver in started:
                    stack.callback(driver.process.kill)
                drivers = [stack.enter_context(started[which]) for which in order(launch)]
                for round_ in range(-1, rounds):  # the first one warms up
                    for name, calls in CALLS.items():
                        for which in order(round_):
                            taken = drivers[which].seconds(name, calls)
                            if round_ >= 0:
                                seconds[name][which, launch, round_] = np.median(taken)
                    step()
    return {name: compare(*both) for name, both in seconds.items()}


def order(number: int) -> tuple[int, int]:
    """Each tree comes first as often as the other."""
    return (1, 0) if number % 2 else (0, 1)


def draw(figures: Mapping[str, Mapping[str, float]], axes: Any) -> None:
    """Draws the ratios with their intervals."""
    names = list(figures)
    ratios = [figures[name]["ratio"] for name in names]
    spread = [
        [figures[name]["ratio"] - figures[name]["low"] for name in names],
        [figures[name]["high"] - figures[name]["ratio"] for name in names],
    ]
    axes.errorbar(ratios, range(len(names)), xerr=spread, fmt="o", capsize=4)
    axes.axvline(1.0, color="gray", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time here / time there (95% interval)")
    axes.set_title("The hot path beside that of an earlier commit")


@harness.benchmark(
    "against",
    __doc__,
    Option("commit", {"help": "the other commit", "metavar": "COMMIT"}),
    option("--launches", 6, "starts of both daemons; an even number is fair"),
    option("--rounds", 12, "rounds after each start"),
    option("--most", 1.02, "the most that a call may take, of what it takes there", number(0, 100), metavar="RATIO"),
    harness.PLOT,
)
def main(options: harness.Options) -> harness.Outcome:
    """The ratios. Raises BenchmarkError for a commit that is not there, or a tree that does not run."""
    with tree_of(options.commit) as tree:
        figures = measure((tree, ROOT), options.launches, options.rounds)
    slower = [name for name in BOUND if figures[name]["low"] > options.most]
    rows = [{"operation": name, **figure} for name, figure in figures.items()]
    return harness.Outcome(
        {"operations": figures},
        [f"{name}: {figures[name]['ratio']:.3f} times as long, of {options.most:g} at most" for name in slower],
        [harness.Table(rows, ("operation", "there_s", "here_s", "ratio", "low", "high"))],
        lambda axes: draw(figures, axes),
    )


if __name__ == "__main__":
    harness.run(main)
