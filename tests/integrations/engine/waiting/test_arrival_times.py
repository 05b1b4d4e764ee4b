from __future__ import annotations

import gc
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.engine.waiting.arrival_times import FRONT_END_S, Arrivals
from prefixd.integrations.engine.waiting.ordering import PrefixOrder, Waits
from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import Distance, create_policy

DAY_S = 86400.0


@dataclass(eq=False)
class Request:
    request_id: str
    arrival_time: float
    seen: SeenPrefix | None
    num_prompt_tokens: int = 128
    priority: int = 0


class Clocks:
    """The host's, and the wall clock, which a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ahead_s = 1.7e9
        self.arrivals = Arrivals(lambda: self.now_s, lambda: self.now_s + self.ahead_s)

    def stamped(self, name: str = "r", seen: SeenPrefix | None = None) -> Request:
        return Request(name, self.now_s + self.ahead_s, seen)


def test_time_in_the_front_end_counts() -> None:
    clocks = Clocks()
    request = clocks.stamped()
    clocks.now_s += 3
    assert clocks.arrivals.arrival_s(request) == 0
    clocks.now_s += 100
    clocks.ahead_s += DAY_S
    assert clocks.arrivals.arrival_s(request) == 0, "asked again, it is the same"


@given(st.floats(-40 * DAY_S, 40 * DAY_S), st.floats(0, FRONT_END_S))
def test_a_step_while_a_request_is_in_the_front_end_is_bounded(step_s: float, front_end_s: float) -> None:
    clocks = Clocks()
    request = clocks.stamped()
    clocks.now_s += front_end_s
    clocks.ahead_s += step_s
    assert abs(clocks.arrivals.arrival_s(request)) <= FRONT_END_S


def test_requests_that_are_gone_are_forgotten() -> None:
    clocks = Clocks()
    for _ in range(100):
        clocks.arrivals.arrival_s(clocks.stamped())
    gc.collect()
    assert not clocks.arrivals._known


@given(
    coming=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(Distance), st.just(0.0) | st.floats(-40 * DAY_S, 40 * DAY_S)),
        min_size=1,
        max_size=40,
    ),
    look_ahead=st.integers(1, 12),
)
def test_relaxed_fpf_keeps_its_promise_whatever_the_wall_clock_says(
    coming: list[tuple[int, Distance, float]], look_ahead: int
) -> None:
    """One is begun in each second; the wall clock is set between any two arrivals."""
    clocks, waits = Clocks(), Waits()
    order: PrefixOrder[Request] = PrefixOrder(
        create_policy("relaxed-fpf"),
        look_ahead,
        may_move=lambda request: True,
        local_tokens=lambda request, last: 0,
        seen=lambda request: request.seen,
        prefix_key=lambda request, tokens: None,
        arrival_s=clocks.arrivals.arrival_s,
    )

    def second() -> None:
        clocks.now_s += 1
        waits.waiting(len(order), clocks.now_s)
        if len(order):
            order.refresh(clocks.now_s, 1)
            request = order.take()
            waits.begun([clocks.arrivals.arrival_s(request)], clocks.now_s, len(order) > 0)

    for number, (seconds, tier, step_s) in enumerate(coming):
        for _ in range(seconds):
            second()
        clocks.ahead_s += step_s
        seen = NOTHING_SEEN if tier is Distance.NONE else SeenPrefix(64, ((tier, 64),))
        order.add(clocks.stamped(f"r{number}", seen))
    waits.waiting(len(order), clocks.now_s)
    while len(order):
        second()
    assert 0 <= waits.longest_s <= len(coming) and waits.longest_s <= waits.bound_s + 1
