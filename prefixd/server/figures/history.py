"""What happened lately: counters of the daemon as they were every 10 s for 10 minutes, and every minute for a day.

A sample is one row of numbers; all of them take less than half a megabyte, from the start on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import TieredCache
from prefixd.cache.index.trie import TIERS
from prefixd.server.figures.measured_figures import quantiles
from prefixd.v1 import admin_pb2 as pb

FINE_S, FINE_SAMPLES = 10.0, 61
COARSE_S, COARSE_SAMPLES = 60.0, 1441
LONGEST_S = COARSE_S * (COARSE_SAMPLES - 1)
_POINTS = 60

Row = npt.NDArray[np.int64]
"""Counters since the start, in the order of `Counters.now`."""


class Counters:
    """Reads the counters that the history keeps.

    Args:
        cache: counts hits, copies and measurements.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self.bounds = cache.measurements.timings.first_token_s.bounds

    def now(self) -> Row:
        """[n]: the counters now."""
        cache, measured = self._cache, self._cache.measurements
        return np.array(
            [
                cache.counters.asked_tokens,
                measured.traffic.requests.total,
                sum(measured.timings.lookup_s.counts),
                measured.traffic.generated_tokens.total,
                cache.mover.disk.writes.written_bytes,
                *cache.counters.hit_tokens,
                *(each.loaded_bytes for each in cache.tiers.counters),
                *(each.evicted for each in cache.tiers.counters),
                *measured.timings.first_token_s.counts,
            ],
            np.int64,
        )

    def figures(self, grown: Row) -> pb.PeriodFigures:
        """The message for what the counters have grown by."""
        asked, requests, lookups, generated, written, *rest = grown.tolist()
        hits, loaded, evicted, buckets = (
            rest[:TIERS],
            rest[TIERS : 2 * TIERS],
            rest[2 * TIERS : 3 * TIERS],
            rest[3 * TIERS :],
        )
        return pb.PeriodFigures(
            asked_tokens=asked,
            requests=requests,
            lookups=lookups,
            generated_tokens=generated,
            written_bytes=written,
            hit_tokens=hits,
            loaded_bytes=loaded,
            evicted_blocks=evicted,
            first_token_s=quantiles(self.bounds, buckets),
        )


class _Ring:
    """The last samples, oldest first.

    Args:
        samples: how many are kept.
        width: numbers of a sample.
    """

    def __init__(self, samples: int, width: int) -> None:
        self._at_s = np.empty(samples)
        self._rows = np.empty((samples, width), np.int64)
        self._added = 0

    def add(self, at_s: float, row: Row) -> None:
        """Adds a sample, in place of the oldest one if the ring is full."""
        place = self._added % len(self._at_s)
        self._at_s[place], self._rows[place] = at_s, row
        self._added += 1

    def since(self, start_s: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Times and samples from the last one not after `start_s` on; from the oldest one if all are later."""
        size = len(self._at_s)
        order = np.arange(max(0, self._added - size), self._added) % size
        times = self._at_s[order]
        first = max(int(np.searchsorted(times, start_s, "right")) - 1, 0)
        return times[first:], self._rows[order[first:]]


class History:
    """Keeps the counters of the last day.

    Args:
        counters: reads them.
        clock: seconds.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._clock = clock
        now = counters.now()
        self._fine, self._coarse = _Ring(FINE_SAMPLES, len(now)), _Ring(COARSE_SAMPLES, len(now))
        self._coarse_due_s = 0.0
        self.sample()

    async def run(self) -> None:
        """Takes samples until it is cancelled."""
        while True:
            await asyncio.sleep(FINE_S)
            self.sample()

    def sample(self) -> None:
        """Takes a sample now."""
        now_s, row = self._clock(), self._counters.now()
        self._fine.add(now_s, row)
        if now_s >= self._coarse_due_s:
            self._coarse.add(now_s, row)
            self._coarse_due_s = now_s + COARSE_S - FINE_S / 2

    def written_bytes_per_s(self, last_s: float) -> float:
        """Bytes of blocks written to disk a second, in the last `last_s` seconds."""
        times, rows = self._samples(last_s)
        seconds = float(times[-1] - times[0])
        return self._counters.figures(rows[-1] - rows[0]).written_bytes / seconds if seconds else 0.0

    def period(self, last_s: float) -> pb.Period:
        """What happened in the last `last_s` seconds, and the same in some 60 steps.

        Raises:
            InvalidArgumentError: it is not above 0, or more than a day.
        """
        if not 0 < last_s <= LONGEST_S:
            raise InvalidArgumentError(
                f"last_s = {last_s:g}, but the history is kept for a day; give seconds above 0, up to {LONGEST_S:g}"
            )
        times, rows = self._samples(last_s)
        step_s = FINE_S if last_s <= FINE_S * (FINE_SAMPLES - 1) else COARSE_S
        stride = max(1, round(last_s / step_s / _POINTS))
        chosen = np.append(np.arange(0, len(times) - 1, stride), len(times) - 1)
        grown = np.diff(rows[chosen], axis=0)
        return pb.Period(
            seconds=float(times[-1] - times[0]),
            total=self._counters.figures(rows[-1] - rows[0]),
            step_s=step_s * stride,
            points=[self._counters.figures(row) for row in grown],
        )

    def _samples(self, last_s: float) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Times and samples of the last `last_s` seconds, with one of now."""
        now_s = self._clock()
        ring = self._fine if last_s <= FINE_S * (FINE_SAMPLES - 1) else self._coarse
        times, rows = ring.since(now_s - last_s)
        earlier = times < now_s
        return np.append(times[earlier], now_s), np.vstack([rows[earlier], self._counters.now()])
