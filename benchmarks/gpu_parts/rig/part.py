"""What a part of the benchmark is: a question with a time budget."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_parts.rig.device import Device
from benchmarks.gpu_parts.rig.prediction import Prediction

Draw = Callable[[Any, Mapping[str, Any]], None]


class Unavailable(Exception):
    """The device or its software lacks what a part needs; a result, not a failure."""


class Budget:
    """The time that a part has; it asks before every point whether another one fits.

    skipped: names of the points that were left out, in order.  errors: by point, what broke it.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.skipped: list[str] = []
        self.errors: dict[str, str] = {}
        self._clock = clock
        self._deadline = clock() + seconds

    @property
    def over(self) -> bool:
        return self._clock() >= self._deadline

    def allows(self, point: str) -> bool:
        """Whether there is time for `point`; one for which there is none is noted."""
        if self.over:
            self.skipped.append(point)
        return not self.over

    @contextmanager
    def attempt(self, point: str) -> Iterator[None]:
        """A point whose failure is recorded and leaves the others standing."""
        try:
            yield
        except Unavailable:
            raise
        except Exception as error:  # whatever breaks in one point, the others are worth having
            traceback.print_exc()
            self.errors[point] = one_line(error)


def one_line(error: Exception) -> str:
    """An error in a result."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


@dataclass(frozen=True, slots=True)
class Part:
    """One question.

    measure: the answer, to be written as JSON; raises Unavailable where it cannot be asked.
    draw: fills a matplotlib axes from the answer.
    predictions: judged by the answer of a GPU.
    files: further files from the answer, by what their names have behind the result's.
    """

    name: str
    budget_s: float
    measure: Callable[[Device, Budget], Mapping[str, Any]]
    draw: Draw | None = None
    predictions: Sequence[Prediction] = ()
    files: Callable[[Device, Mapping[str, Any]], Mapping[str, str]] | None = None
