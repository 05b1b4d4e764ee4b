"""The history tells what happened in a stretch of time, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import TieredCache
from prefixd.server.figures.disk_wear import DiskWear
from prefixd.server.figures.history import FINE_S, LONGEST_S, Counters, History


class Day:
    """A cache whose counters and clock the test moves."""

    def __init__(self, cache: TieredCache) -> None:
        self.cache = cache
        self.now_s = 1000.0
        self.history = History(Counters(self.cache), lambda: self.now_s)

    def live(self, seconds: float, hits_per_s: int) -> None:
        for _ in range(round(seconds / FINE_S)):
            self.now_s += FINE_S
            self.cache.counters.hit_tokens[1] += round(hits_per_s * FINE_S)
            self.cache.counters.asked_tokens += round(2 * hits_per_s * FINE_S)
            self.cache.mover.disk.writes.written_bytes += round(100 * FINE_S)
            self.history.sample()


@pytest.fixture
def day(cache: TieredCache) -> Day:
    return Day(cache)


def test_a_young_daemon_has_a_short_period(day: Day) -> None:
    day.live(30, hits_per_s=5)
    period = day.history.period(3600)
    assert (period.seconds, list(period.total.hit_tokens), period.total.asked_tokens) == (30, [0, 150, 0, 0], 300)


def test_what_lies_before_the_period_does_not_count(day: Day) -> None:
    day.live(7200, hits_per_s=100)
    day.live(3600, hits_per_s=1)
    hour = day.history.period(3600)
    assert hour.seconds == pytest.approx(3600, abs=60)
    assert hour.total.hit_tokens[1] == pytest.approx(3600, abs=6100), "up to a minute of the time before"
    ten = day.history.period(600)
    assert (ten.seconds, ten.total.hit_tokens[1], ten.step_s, len(ten.points)) == (600, 600, 10, 60)
    assert {point.hit_tokens[1] for point in ten.points} <= {0, 10}


@pytest.mark.parametrize("last_s", [600.0, 3600.0, LONGEST_S])
def test_the_steps_add_up_and_are_few(day: Day, last_s: float) -> None:
    day.live(1.2 * LONGEST_S if last_s == LONGEST_S else 2 * last_s, hits_per_s=3)
    period = day.history.period(last_s)
    assert 55 <= len(period.points) <= 62
    assert sum(point.hit_tokens[1] for point in period.points) == period.total.hit_tokens[1] > 0
    assert period.seconds == pytest.approx(last_s, abs=FINE_S + 60)


def test_first_tokens_of_the_period(day: Day) -> None:
    first_token_s = day.cache.measurements.timings.first_token_s
    first_token_s.observe(50.0, "blue", "qwen", times=1000)
    day.live(1200, hits_per_s=0)
    assert not day.history.period(600).total.HasField("first_token_s")
    first_token_s.observe(0.02, "blue", "qwen", times=4)
    found = day.history.period(600).total.first_token_s
    assert found.count == 4 and 0.01 < found.p50 <= found.p95 <= found.p99 <= 0.025


@pytest.mark.parametrize("last_s", [-1.0, 0.0, LONGEST_S + 1, float("nan")])
def test_a_period_that_is_not_kept_is_refused(day: Day, last_s: float) -> None:
    with pytest.raises(InvalidArgumentError, match="kept for a day"):
        day.history.period(last_s)


def test_wear_is_a_rate_and_a_part_of_the_endurance(day: Day) -> None:
    began_s = day.now_s

    def wear(**drive: int) -> DiskWear:
        writes = day.cache.mover.disk.writes
        return DiskWear(Path("/disk"), lambda: writes.written_bytes, day.history, lambda: day.now_s - began_s, **drive)

    day.live(7200, hits_per_s=0)
    found = wear(endurance_bytes=10_000_000, start_bytes=4_000_000).figures()
    assert (found.recent_bytes_per_s, found.mean_bytes_per_s) == (100, 100)
    assert found.used_ratio == pytest.approx(0.472)
    assert found.left_s == pytest.approx(5_280_000 / 100)
    unknown = wear().figures()
    assert not (unknown.HasField("endurance_bytes") or unknown.HasField("used_ratio") or unknown.HasField("left_s"))
    assert wear(endurance_bytes=1, start_bytes=4).figures().left_s == 0
