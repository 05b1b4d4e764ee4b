"""A part of `benchmarks.host_share`: measured in a process whose CUDA driver returns at once and copies nothing.

The driver is the tests' stand-in with PREFIXD_STAND_IN_COPY_US=-1. The calls go through cuda-bindings as on a GPU, so
what they cost in Python counts; what a driver costs does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.harness import BenchmarkError
from benchmarks.kv.stand_in import stand_in_environment

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class HostPart:
    """One question about the host's share.

    Attributes:
        module: a module that prints its figures as a JSON object; "--short" makes it short.
        least: figures with the least value that they are to have.
        most: figures with the most.
    """

    name: str
    module: str
    least: dict[str, float]
    most: dict[str, float]


def measure(parts: tuple[HostPart, ...], short: bool) -> dict[str, dict[str, float]]:
    """The figures of each part, by name: each the best of its rounds, which whatever else runs makes worse.

    Raises BenchmarkError when a part fails, with its last lines.
    """
    rounds: dict[str, list[dict[str, float]]] = {part.name: [] for part in parts}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**stand_in_environment(Path(folder)), "PREFIXD_STAND_IN_COPY_US": "-1"}
        for part in parts * (1 if short else ROUNDS):
            command = [sys.executable, "-m", part.module, *(["--short"] if short else [])]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode != 0:
                raise BenchmarkError(f"the part {part.name} failed: {done.stderr.strip()[-500:]}")
            rounds[part.name].append(json.loads(done.stdout))
    return {name: best(each) for name, each in rounds.items()}


def best(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The best of each figure: the most of a rate, the least of a time."""
    return {name: (max if name.startswith("gbps_") else min)(figures[name] for figures in rounds) for name in rounds[0]}


def answer(figures: dict[str, float]) -> None:
    """Prints the figures of a part for `measure`, rounded."""
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))
