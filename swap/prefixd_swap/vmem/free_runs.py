"""Free numbers, kept as runs of consecutive numbers."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from prefixd_swap.errors import IntegrityError


class FreeRuns:
    """A set of integers in ``range(0, size)`` that gives out consecutive numbers where it can.

    Best fit: numbers come from the start of the shortest run that is long enough, so long runs stay whole. If no run is
    long enough, the longest runs are used up first, which gives the fewest runs.
    """

    def __init__(self, size: int) -> None:
        self._stops: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        self._by_length: list[tuple[int, int]] = []
        self._free = 0
        if size:
            self._add(0, size)

    def __len__(self) -> int:
        return self._free

    def runs(self) -> Iterator[range]:
        """The free numbers as maximal runs, in ascending order."""
        for start in sorted(self._stops):
            yield range(start, self._stops[start])

    def take(self, count: int) -> list[range] | None:
        """Take `count` numbers as runs in ascending order, or nothing at all if there are fewer."""
        if count > self._free:
            return None
        taken: list[range] = []
        while count:
            index = bisect_left(self._by_length, (count, 0))
            length, start = self._by_length[min(index, len(self._by_length) - 1)]
            part = min(count, length)
            self._remove(start)
            if part < length:
                self._add(start + part, start + length)
            taken.append(range(start, start + part))
            count -= part
        return sorted(taken, key=lambda run: run.start)

    def give(self, run: range) -> None:
        """Put back a run that was taken; it merges with its free neighbours."""
        start, stop = run.start, run.stop
        if start in self._starts:
            start = self._remove(self._starts[start]).start
        if stop in self._stops:
            stop = self._remove(stop).stop
        self._add(start, stop)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the runs are disjoint, merged, and counted right."""
        previous = -1
        total = 0
        for run in self.runs():
            if run.start <= previous or not run:
                raise IntegrityError(f"the free run {run} overlaps or touches the one that ends at {previous}")
            previous = run.stop
            total += len(run)
        lengths = sorted((stop - start, start) for start, stop in self._stops.items())
        ends = {stop: start for start, stop in self._stops.items()}
        if total != self._free or lengths != self._by_length or ends != self._starts:
            raise IntegrityError(f"{self._free} numbers are counted as free, the runs hold {total}")

    def _add(self, start: int, stop: int) -> None:
        self._stops[start] = stop
        self._starts[stop] = start
        insort(self._by_length, (stop - start, start))
        self._free += stop - start

    def _remove(self, start: int) -> range:
        stop = self._stops.pop(start)
        del self._starts[stop]
        del self._by_length[bisect_left(self._by_length, (stop - start, start))]
        self._free -= stop - start
        return range(start, stop)
