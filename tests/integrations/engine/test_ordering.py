from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixd.integrations.engine.ordering import PrefixOrder, Waits, held_blocks
from prefixd.integrations.engine.seen import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import Distance, create_policy

BLOCK = 16
NOW = 1000.0


@dataclass(eq=False)
class Request:
    request_id: str
    arrival_time: float
    num_prompt_tokens: int = 8 * BLOCK
    priority: int = 0
    local: int = 0
    seen: SeenPrefix | None = None
    begun: bool = False
    key: str = ""
    asked: list[int] = field(default_factory=list)


def order_of(policy: str, look_ahead: int, by_priority: bool = False) -> PrefixOrder[Request]:
    def local_tokens(request: Request, last: int) -> int:
        request.asked.append(last)
        return request.local

    return PrefixOrder(
        create_policy(policy),
        look_ahead,
        may_move=lambda request: not request.begun,
        local_tokens=local_tokens,
        seen=lambda request: request.seen,
        prefix_key=lambda request, tokens: (request.key, tokens),
        by_priority=by_priority,
    )


def arranged(
    requests: list[Request], policy: str = "fpf", look_ahead: int = 256, by_priority: bool = False, now_s: float = NOW
) -> str:
    order = order_of(policy, look_ahead, by_priority)
    return "".join(request.request_id for request in order.arrange(requests, now_s))


def on(tier: Distance, blocks: int = 4) -> SeenPrefix:
    return SeenPrefix.of([tier] * blocks, BLOCK)


def queue(**places: SeenPrefix | int | None) -> list[Request]:
    """Requests that came a second apart: an int is what the engine holds itself, in blocks."""
    requests = []
    for i, (name, held) in enumerate(places.items()):
        request = Request(name, 900.0 + i)
        if isinstance(held, int):
            request.local = held * BLOCK
        else:
            request.seen = held
        requests.append(request)
    return requests


def test_the_nearest_prefix_goes_first() -> None:
    requests = queue(a=None, b=on(Distance.DISK), c=on(Distance.CPU), d=4, e=NOTHING_SEEN, f=4)
    assert arranged(requests) == "dfcbae"
    assert arranged(requests, "fcfs") == "abcdef"
    assert arranged(requests, "relaxed-fpf") == "dfcbae", "all are about as old"


def test_relaxed_lets_age_count() -> None:
    requests = queue(a=None, b=4)
    assert arranged(requests, "relaxed-fpf", now_s=901.1) == "ab", "1.1 s * 1 over 0.1 s * 4"
    assert arranged(requests, "relaxed-fpf", now_s=901.5) == "ba"


def test_what_the_engine_holds_itself_need_not_be_loaded() -> None:
    requests = queue(a=on(Distance.CPU), b=on(Distance.DISK), c=None)
    requests[1].local = 4 * BLOCK
    assert arranged(requests) == "bac"


def test_who_shares_a_prefix_runs_one_after_the_other() -> None:
    requests = queue(a=4, b=4, c=4, d=4)
    for request, key in zip(requests, "xyxy", strict=True):
        request.key = key
    assert arranged(requests) == "acbd"


def test_only_the_oldest_are_put_in_order() -> None:
    assert arranged(queue(a=None, b=4, c=None, d=4, e=4), look_ahead=3) == "bacde"


def test_begun_requests_keep_their_places() -> None:
    requests = queue(a=None, b=None, c=4, d=None, e=4)
    requests[0].begun = requests[3].begun = True
    assert arranged(requests) == "acedb"
    assert arranged(requests, look_ahead=2) == "acbde", "they take no place in the window"


def test_priority_classes_come_first_only_where_they_count() -> None:
    requests = queue(a=4, b=None, c=4, d=None)
    requests[0].priority = requests[1].priority = 1
    assert arranged(requests) == "acbd"
    assert arranged(requests, by_priority=True) == "cdab"
    requests[1].begun = True
    assert arranged([requests[1], requests[0], *requests[2:]], by_priority=True) == "cdba"


def test_a_request_is_asked_with_its_last_answer_and_forgotten_when_it_leaves() -> None:
    requests = queue(a=3, b=None)
    order = order_of("fpf", 8)
    order.arrange(requests, NOW)
    order.arrange(requests, NOW)
    assert requests[0].asked == [0, 3 * BLOCK]
    order.arrange(requests[1:], NOW)
    order.arrange(requests, NOW)
    assert requests[0].asked == [0, 3 * BLOCK, 0]


def test_an_answer_that_comes_late_counts_from_then_on() -> None:
    requests = queue(a=None, b=None)
    order = order_of("fpf", 8)
    assert order.arrange(requests, NOW) == requests
    requests[1].seen = on(Distance.CPU)
    assert order.arrange(requests, NOW) == requests[::-1]
    requests[1].seen = NOTHING_SEEN
    assert order.arrange(requests, NOW) == requests


REQUESTS = st.lists(
    st.builds(
        Request,
        request_id=st.uuids().map(str),
        arrival_time=st.floats(0, NOW + 5),
        priority=st.integers(-1, 1),
        local=st.integers(0, 8).map(lambda blocks: blocks * BLOCK),
        seen=st.none()
        | st.lists(st.sampled_from([Distance.CPU, Distance.DISK]), max_size=8).map(
            lambda tiers: SeenPrefix.of(tiers, BLOCK)
        ),
        begun=st.booleans(),
        key=st.sampled_from("xyz"),
    ),
    max_size=30,
)


@given(REQUESTS, st.sampled_from(["fcfs", "fpf", "relaxed-fpf"]), st.integers(1, 32), st.booleans())
def test_an_order_is_a_permutation(requests: list[Request], policy: str, look_ahead: int, by_priority: bool) -> None:
    before = sorted(requests, key=lambda r: r.priority) if by_priority else list(requests)
    after = order_of(policy, look_ahead, by_priority).arrange(requests, NOW)
    assert Counter(map(id, after)) == Counter(map(id, requests))
    assert [r if r.begun else None for r in after] == [r if r.begun else None for r in before], "begun ones stay"
    movable = [r for r in before if not r.begun]
    assert [r for r in after if not r.begun][look_ahead:] == movable[look_ahead:], "beyond the window nothing moves"
    if by_priority:
        assert [r.priority for r in after] == [r.priority for r in before]


class EngineMachine(RuleBasedStateMachine):
    """vLLM's ways with its queue: it appends what arrives, takes from the front, puts back what it had to skip in the
    same order, and what it preempts at the front."""

    LOOK_AHEAD = 4

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.arrived = 0
        self.order = order_of("relaxed-fpf", self.LOOK_AHEAD)
        self.waits = Waits()

    @rule(tier=st.sampled_from(Distance))
    def arrive(self, tier: Distance) -> None:
        request = Request(f"r{self.arrived}", self.now_s, seen=None if tier is Distance.NONE else on(tier))
        self.arrived += 1
        self.waiting.append(request)

    @rule(skip=st.integers(0, 2), take=st.integers(1, 3))
    def step(self, skip: int, take: int) -> None:
        self.now_s += 1
        self.waits.waiting(len(self.waiting), self.now_s)
        before = list(self.waiting)
        self.waiting = self.order.arrange(self.waiting, self.now_s)
        assert {id(r) for r in before} == {id(r) for r in self.waiting}
        skipped, rest = self.waiting[:skip], self.waiting[skip:]
        taken, self.waiting = rest[:take], skipped + rest[take:]
        oldest = [r for r in before if not r.begun][: self.LOOK_AHEAD]
        assert all(r.begun or r in oldest for r in (skipped + taken)[: self.LOOK_AHEAD])
        if taken:
            arrivals = [r.arrival_time for r in taken if not r.begun]
            self.waits.begun(arrivals, self.now_s, bool(self.waiting))
        for request in taken:
            request.begun = True
        self.running += taken

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        self.waiting.insert(0, self.running.pop())

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.waiting.remove(data.draw(st.sampled_from(self.waiting)))

    @invariant()
    def the_preempted_are_in_front(self) -> None:
        begun = [r.begun for r in self.waiting]
        assert begun == sorted(begun, reverse=True)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngine = EngineMachine.TestCase


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(Distance)), min_size=1, max_size=80),
    look_ahead=st.integers(1, 12),
    limit=st.integers(1, 20),
)
def test_relaxed_fpf_keeps_its_promise_behind_a_look_ahead(
    arrivals: list[tuple[int, Distance]], look_ahead: int, limit: int
) -> None:
    """One request is begun in each second, and no more than `limit` wait at a time; whatever the window is, none waits
    longer than 4 * L * s."""
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    order, waits = order_of("relaxed-fpf", look_ahead), Waits()
    waiting: list[Request] = []
    now = 0
    while coming or waiting:
        while coming and coming[0][0] <= now and len(waiting) < limit:
            _, tier = coming.pop(0)
            seen = None if tier is Distance.NONE else on(tier)
            waiting.append(Request(f"r{len(coming)}", float(now), seen=seen))
        waits.waiting(len(waiting), float(now))
        if waiting:
            first, *waiting = order.arrange(waiting, float(now))
            waits.begun([first.arrival_time], float(now), bool(waiting))
        now += 1
    assert waits.most <= limit and waits.slowest_s <= 1
    assert waits.longest_s <= waits.bound_s


def test_waits_are_counted_from_when_somebody_waited() -> None:
    waits = Waits()
    waits.waiting(0, 10)
    waits.waiting(2, 20)
    waits.waiting(3, 21)
    waits.begun([19.0, 20.5], 24, more=True)
    assert (waits.longest_s, waits.most, waits.slowest_s, waits.bound_s) == (5, 3, 4, 48)
    waits.begun([23.0], 25, more=False)
    waits.waiting(1, 90)
    waits.begun([], 91, more=False)
    assert (waits.longest_s, waits.slowest_s) == (5, 4), "nobody waits for an idle engine; a resumed one did before"


def counted(held: Callable[[int], bool]) -> tuple[Callable[[int], bool], list[int]]:
    asked: list[int] = []

    def holds(block: int) -> bool:
        asked.append(block)
        return held(block)

    return holds, asked


@given(st.integers(0, 600), st.data())
def test_the_end_of_a_prefix_is_found_from_any_guess(count: int, data: st.DataObject) -> None:
    held = data.draw(st.integers(0, count))
    guess = data.draw(st.integers(0, count))
    holds, asked = counted(lambda block: block < held)
    assert held_blocks(holds, count, guess) == held
    assert len(asked) <= count.bit_length() + 2
    holds, asked = counted(lambda block: block < held)
    assert held_blocks(holds, count, held) == held
    assert len(asked) <= 2


@given(st.lists(st.booleans(), max_size=40), st.data())
def test_with_holes_it_is_still_an_end(held: list[bool], data: st.DataObject) -> None:
    guess = data.draw(st.integers(0, len(held)))
    end = held_blocks(held.__getitem__, len(held), guess)
    assert end == 0 or held[end - 1]
    assert end == len(held) or not held[end]


def test_what_is_to_be_loaded_soon() -> None:
    """Of the window, in the new order, those of which more can be loaded than the engine has itself."""
    requests = queue(a=None, **dict.fromkeys("bcdef", on(Distance.CPU)))
    requests[2].local = 4 * BLOCK
    requests[3].local = 2 * BLOCK
    order = order_of("fpf", look_ahead=5)
    order.arrange(requests, NOW)
    wanted = [("b", 0), ("d", 2 * BLOCK), ("e", 0)]
    assert [(r.request_id, tokens) for r, tokens in order.to_load(9)] == wanted
    assert [r.request_id for r, _ in order.to_load(2)] == ["b", "d"]


@pytest.mark.parametrize("look_ahead", [1, 256])
def test_an_empty_queue(look_ahead: int) -> None:
    assert arranged([], look_ahead=look_ahead) == ""
