"""Learns the duration of an operation as a sum of its features, each times a coefficient of at least 0."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

Features = tuple[float, ...]
_Observation = tuple[Features, float]

_KEPT = 5
"""Number of observations of a class, of which the median counts: two stalls in a row change nothing."""
_LATELY = 5
"""Number of the last observations of all classes. If the median of their errors is more than `_STEADY`, the machine has
become faster or slower: then the last observation of each class counts, and all estimates are scaled by the error that
is left."""
_STEADY = 1.25
_HALF_AGE = 64
"""A class that was not seen for this many observations counts half."""
_WORTH = 4e-4
"""A coefficient is used if it reduces the mean square of the relative error by this much: 2% squared."""


@dataclass(slots=True)
class _Class:
    """Observations of about the same size."""

    seen: deque[_Observation] = field(default_factory=lambda: deque(maxlen=_KEPT))
    last: int = 0


class Seconds:
    """Learns `seconds = c0 * f0 + c1 * f1 + ...` online.

    Observations are put into classes by the powers of two of their features. Of each class the median of the last few
    counts, so that a stall does no harm, and small operations stay known while only large ones are seen. When the
    machine has become faster or slower, the last one counts. The coefficients minimize the sum of the squares of the
    relative errors, so that each class has the same weight, whatever its seconds.

    Args:
        features: number of features. While nothing else is known, the seconds are a multiple of the first one.
    """

    def __init__(self, features: int) -> None:
        self._features = features
        self._classes: dict[tuple[int, ...], _Class] = {}
        self._lately: deque[_Observation] = deque(maxlen=_LATELY)
        self._count = 0
        self._known: tuple[Features, float] | None = None  # coefficients, level

    def observe(self, features: Features, elapsed_s: float) -> None:
        """An operation with these features took `elapsed_s` seconds; 0 counts as a nanosecond, since errors are
        relative."""
        self._count += 1
        elapsed_s = max(elapsed_s, 1e-9)
        known = self._classes.setdefault(tuple(math.frexp(value)[1] for value in features), _Class())
        known.seen.append((features, elapsed_s))
        known.last = self._count
        self._lately.append((features, elapsed_s))
        self._known = None

    def estimate_s(self, features: Features) -> float | None:
        """Estimated seconds of an operation with these features; None before the first observation."""
        if not self._count:
            return None
        if self._known is None:
            self._known = self._with_level(self._fit(_middle))
            if self._known[1] != 1.0:
                self._known = self._with_level(self._fit(_last))
        coefficients, level = self._known
        return level * _dot(coefficients, features)

    def _with_level(self, coefficients: Features) -> tuple[Features, float]:
        """The coefficients, and a factor for their estimates: 1 while these are about right."""
        level = median(seconds / _dot(coefficients, seen) for seen, seconds in self._lately)
        return coefficients, level if not 1 / _STEADY < level < _STEADY else 1.0

    def _fit(self, of_class: Callable[[Sequence[_Observation]], _Observation]) -> Features:
        """The coefficients: least squares over each subset of the features; the best subset without a negative one.

        of_class: which of a class's observations counts, the oldest first.
        """
        rows: list[tuple[list[float], float]] = []  # features over seconds, weight
        for known in self._classes.values():
            at = of_class(known.seen)
            age = self._count - known.last
            rows.append(([value / at[1] for value in at[0]], 0.5 ** (age / _HALF_AGE)))
        total = sum(weight for _, weight in rows)
        moments = [
            [sum(weight * row[i] * row[j] for row, weight in rows) / total for j in range(self._features)]
            for i in range(self._features)
        ]
        sums = [sum(weight * row[i] for row, weight in rows) / total for i in range(self._features)]
        best: tuple[float, Features] | None = None
        for count in range(1, self._features + 1):
            for chosen in itertools.combinations(range(self._features), count):
                solution = _solve([[moments[i][j] for j in chosen] for i in chosen], [sums[i] for i in chosen])
                if solution is None or min(solution) < 0:
                    continue
                error = 1 - sum(value * sums[i] for value, i in zip(solution, chosen, strict=True))
                # A single class is explained by any feature alone: prefer the main one.
                cost = max(error, 0.0) + _WORTH * count + (0.0 if 0 in chosen else _WORTH / 2)
                if best is None or cost < best[0]:
                    spread = dict(zip(chosen, solution, strict=True))
                    best = cost, tuple(spread.get(i, 0.0) for i in range(self._features))
        assert best is not None  # the main feature is above 0 in every observation
        return best[1]


def _middle(seen: Sequence[_Observation]) -> _Observation:
    return sorted(seen, key=lambda each: each[1] / each[0][0])[(len(seen) - 1) // 2]


def _last(seen: Sequence[_Observation]) -> _Observation:
    return seen[-1]


def _dot(coefficients: Features, features: Features) -> float:
    return sum(map(float.__mul__, coefficients, map(float, features)))


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """The solution of a symmetric system; None if its rows depend on each other."""
    size = len(right)
    scale = [math.sqrt(matrix[i][i]) for i in range(size)]
    if min(scale) <= 0:
        return None
    rows = [[matrix[i][j] / scale[i] / scale[j] for j in range(size)] + [right[i] / scale[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < 1e-9:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for other in range(size):
            if other != column:
                factor = rows[other][column] / rows[column][column]
                rows[other] = [value - factor * by for value, by in zip(rows[other], rows[column], strict=True)]
    return [rows[i][size] / rows[i][i] / scale[i] for i in range(size)]
