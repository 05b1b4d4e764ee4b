"""Histograms and counters by labels, in bounded memory; adding a value costs about a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

OTHERS = "(others)"
"""The value of `tenant` and `model` in the series that stands for all beyond `MOST_SERIES`."""
MOST_SERIES = 256
"""Combinations of labels that a histogram or counter tells apart, and as many more of tenants whose models it does not
tell apart: tenants that invent namespaces may use up the first, and not hide another tenant."""
MOST_OF_A_TENANT = 64
"""Those of one tenant."""
_STEPS = (1.0, 2.5, 5.0)

S = TypeVar("S")


def bounds(least: float, most: float) -> tuple[float, ...]:
    """Upper bounds of buckets: 1, 2.5 and 5 times each power of ten, from `least` to `most`. `bounds(0.1, 2.5)` is
    `(0.1, 0.25, 0.5, 1.0, 2.5)`."""
    every = (float(f"{step}e{power}") for power in range(-9, 10) for step in _STEPS)
    return tuple(bound for bound in every if least <= bound <= most)


@dataclass(slots=True)
class Series:
    """The values of one combination of labels.

    Attributes:
        counts: values in each bucket; the last one has those above the last bound.
        total: their sum.
        exemplars: by bucket, the last value that belonged to a trace, and the trace's id.
    """

    counts: list[int]
    total: float = 0.0
    exemplars: dict[int, tuple[float, str]] = field(default_factory=dict)


class _Labelled(Generic[S]):
    """Something for each combination of labels that has occurred.

    After `MOST_OF_A_TENANT` combinations of a tenant, or `MOST_SERIES` of all, a new one counts for the tenant's model
    `(others)`; after twice as many, for the tenant `(others)` and the model `(others)`. Other labels, such as the tier,
    have few values and stay.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self._series: dict[tuple[str, ...], S] = {}
        self._of_tenant = Counter[str]()

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], S]]:
        """The values of the labels, in their order, and what is kept for them."""
        return iter(self._series.items())

    def _key_of_new(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """The combination under which a combination that has not occurred before counts."""
        if len(values) != len(self.labels):
            raise ValueError(f"{values} has {len(values)} values for the labels {self.labels}; give each one value")
        by_label = dict(zip(self.labels, values, strict=True))
        tenant = by_label.get("tenant", "")
        full = len(self._series) >= MOST_SERIES or self._of_tenant[tenant] >= MOST_OF_A_TENANT
        if "model" in by_label and full:
            by_label["model"] = OTHERS
        if (
            "tenant" in by_label
            and len(self._series) >= 2 * MOST_SERIES
            and tuple(by_label.values()) not in self._series
        ):
            by_label["tenant"] = OTHERS
        key = tuple(by_label.values())
        self._of_tenant[tenant] += key not in self._series
        return key


class Histogram(_Labelled[Series]):
    """Counts values in buckets.

    Args:
        bounds: upper bounds of the buckets, ascending; a value equal to a bound is in its bucket.
        labels: names of the labels.
    """

    def __init__(self, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__(labels)
        self.bounds = tuple(bounds)

    def observe(self, value: float, *values: str, times: int = 1, trace_id: str = "") -> None:
        """Counts a value `times` times, for these values of the labels. `trace_id`: a recorded trace that shows it."""
        series = self._series.get(values)
        if series is None:
            key = self._key_of_new(values)
            series = self._series.setdefault(key, Series([0] * (len(self.bounds) + 1)))
        bucket = bisect_left(self.bounds, value)
        series.counts[bucket] += times
        series.total += value * times
        if trace_id:
            series.exemplars[bucket] = (value, trace_id)

    def show(self, value: float, *values: str, trace_id: str) -> None:
        """Notes a trace that shows a value which was counted before."""
        if (series := self._series.get(values)) is not None:
            series.exemplars[bisect_left(self.bounds, value)] = (value, trace_id)

    @property
    def counts(self) -> list[int]:
        """Values in each bucket, of all combinations of labels."""
        if not self._series:
            return [0] * (len(self.bounds) + 1)
        return [sum(column) for column in zip(*(series.counts for _, series in self), strict=True)]


class LabelledCounter(_Labelled[int]):
    """A count for each combination of labels."""

    def add(self, count: int, *values: str) -> None:
        """Adds to the count of these values of the labels."""
        if values not in self._series:
            values = self._key_of_new(values)
        self._series[values] = self._series.get(values, 0) + count

    @property
    def total(self) -> int:
        """The count of all combinations."""
        return sum(self._series.values())


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Estimates the value below which `share` of the values lie; None without values.

    As Prometheus does it (`histogram_quantile`): values are spread evenly in their bucket, and the last bucket, which
    has no upper bound, stands for the last bound.
    """
    wanted, below = share * sum(counts), 0
    if not sum(counts):
        return None
    for at, bound in enumerate(bounds):
        if below + counts[at] >= wanted and counts[at]:
            first = bounds[at - 1] if at else min(0.0, bound)
            return first + (bound - first) * (wanted - below) / counts[at]
        below += counts[at]
    return bounds[-1]
