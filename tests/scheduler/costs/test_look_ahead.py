"""How far ahead prefixes are brought up: as far as loads take longer than hand-overs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from prefixd_scheduler import CostModel, Distance
from prefixd_scheduler.costs.look_ahead import MOST, LookAhead


def looking(*, load_s: float, interval_s: float, fixed: int | None = None) -> LookAhead:
    """One that has seen loads and hand-overs of such lengths."""
    clock, cost = SimpleNamespace(now=0.0), CostModel()
    ahead = LookAhead(cost, lambda: float(clock.now), fixed)
    for _ in range(8):
        ahead.loads(Distance.DISK, 1 << 20)
        cost.observe_load(Distance.DISK, 1 << 20, load_s)
        ahead.handed_over(others_wait=True)
        clock.now += interval_s
    return ahead


def test_nothing_known_looks_some_way_ahead() -> None:
    ahead = LookAhead(CostModel(), lambda: 0.0)
    assert (ahead.requests(running=8), ahead.requests(running=40)) == (16, 40)
    assert ahead.until_turn_s(5) == 0.0


def test_it_follows_what_loads_and_hand_overs_take() -> None:
    fast = looking(load_s=0.01, interval_s=0.1)
    slow = looking(load_s=0.5, interval_s=0.1)
    assert fast.requests(running=4) == 4 + 1
    assert slow.requests(running=4) == 4 + 10, "twice the load's time, in hand-overs"
    assert looking(load_s=0.5, interval_s=0.05).requests(running=4) == 4 + 20
    assert slow.until_turn_s(3) == pytest.approx(0.3) and slow.until_turn_s(-2) == 0


@pytest.mark.parametrize("interval_s", [1e-9, 0.0])
def test_it_has_a_limit(interval_s: float) -> None:
    assert looking(load_s=1.0, interval_s=interval_s).requests(running=4) == MOST
    assert looking(load_s=1e-3, interval_s=1.0).requests(running=10**6) == MOST


@pytest.mark.parametrize("number", [0, 7, 1000])
def test_a_fixed_number_stays(number: int) -> None:
    assert looking(load_s=0.5, interval_s=0.1, fixed=number).requests(running=4) == number


def test_the_time_in_which_nobody_waits_says_nothing() -> None:
    clock: list[float] = [0.0]
    now: Callable[[], float] = lambda: clock[0]  # noqa: E731
    ahead = LookAhead(CostModel(), now)
    for others_wait in (True, False, True, True):
        ahead.handed_over(others_wait)
        clock[0] += 100.0 if not others_wait else 1.0
    assert ahead.interval_s == pytest.approx(1.0)
