from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prefixd.integrations.engine.waiting.ordering import PrefixOrder, Waits, held_blocks
from prefixd.integrations.engine.waiting.ready import time_to_ready
from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import POLICIES, CostModel, Distance, QueuedRequest, create_policy

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
    due: float = math.inf
    asked: list[int] = field(default_factory=list)


def order_of(policy: str, look_ahead: int, by_priority: bool = False, header_tokens: int = 0) -> PrefixOrder[Request]:
    def local_tokens(request: Request, last: int) -> int:
        request.asked.append(last)
        return request.local

    return PrefixOrder(
        create_policy(policy),
        look_ahead,
        may_move=lambda request: not request.begun,
        local_tokens=local_tokens,
        seen=lambda request: request.seen,
        prefix_key=lambda request, tokens: (request.key if tokens > header_tokens else "", tokens),
        ready_s=lambda request, local, seen: float(request.num_prompt_tokens - max(local, seen.tokens)),
        deadline_s=lambda request: request.due,
        by_priority=by_priority,
    )


def names(order: PrefixOrder[Request]) -> str:
    return "".join(request.request_id for request in order)


def arranged(
    requests: list[Request], policy: str = "fpf", look_ahead: int = 256, by_priority: bool = False, now_s: float = NOW
) -> str:
    order = order_of(policy, look_ahead, by_priority)
    for request in requests:
        order.add(request)
    order.refresh(now_s, 1)
    return names(order)


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
    requests[1].num_prompt_tokens = 4 * BLOCK + 1
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


def test_partial_prefixes_and_deadlines_count_where_the_policy_asks_for_them() -> None:
    requests = queue(a=1, b=on(Distance.DISK, 7), c=None, d=3)
    requests[2].due = NOW
    assert arranged(requests) == arranged(requests, "relaxed-fpf") == "bdac", "one block on the GPU is little of 8"
    assert arranged(requests, "shortest-ready") == arranged(requests, "lpm") == "bdac"
    assert arranged(requests, "deadline") == "cabd"


def test_a_header_that_all_prompts_share_decides_nothing() -> None:
    """Three quarters of each prompt; it counts as one after 32 prompts."""
    requests = queue(a=6, b=on(Distance.DISK, 8))
    for request in requests:
        request.local, request.key, request.num_prompt_tokens = 6 * BLOCK, request.request_id, 8 * BLOCK + 1
    assert arranged(requests) == "ab", "of one weight"
    order = order_of("fpf", 256, header_tokens=6 * BLOCK)
    for number in range(32):
        other = Request(f"{number}", 800.0, local=(6 + number % 2) * BLOCK, key=f"{number}")
        order.add(other)
        order.remove(other)
    for request in requests:
        order.add(request)
    order.refresh(NOW, 1)
    assert names(order) == "ba"


def test_prompts_that_share_less_than_a_block_have_no_header() -> None:
    order = order_of("fpf", 256)
    order._prefix_key = lambda request, tokens: (request.key, tokens // BLOCK) if tokens >= BLOCK else None
    for number in range(40):
        order.add(Request(f"{number}", 800.0, local=(1 + number % 2) * BLOCK, key=f"{number}"))
    assert order._header._length == 0


def test_begun_requests_stay_in_front() -> None:
    requests = queue(a=None, b=None, c=4, d=None, e=4)
    requests[0].begun = requests[3].begun = True
    assert arranged(requests) == "adceb"


def test_priority_classes_come_first_only_where_they_count() -> None:
    requests = queue(a=4, b=None, c=4, d=None)
    requests[0].priority = requests[1].priority = 1
    assert arranged(requests) == "acbd"
    assert arranged(requests, by_priority=True) == "cdab"
    requests[1].begun = True
    assert arranged(requests, by_priority=True) == "cdba", "a class above passes even those that were begun"


def test_an_answer_that_comes_late_counts_from_then_on() -> None:
    requests = queue(a=None, b=None)
    order = order_of("fpf", 8)
    for request in requests:
        order.add(request)
    assert names(order) == "ab"
    requests[1].seen = on(Distance.CPU)
    order.refresh(NOW, 1)
    assert names(order) == "ba"
    requests[1].seen = NOTHING_SEEN
    order.refresh(NOW, 1)
    assert names(order) == "ab"


def test_a_request_is_asked_with_its_last_answer_and_forgotten_when_it_leaves() -> None:
    request = Request("a", 900.0, local=3 * BLOCK)
    order = order_of("fpf", 8)
    order.add(request)
    assert order.take() is request
    order.put_back(request)
    assert order.remove(request) and not order.remove(request)
    order.add(request)
    order.take()
    order.refresh(NOW, 1)
    order.put_back(request)
    assert request.asked == [0, 3 * BLOCK, 0, 0]


def test_a_refresh_looks_at_so_many_and_in_turn_at_all() -> None:
    requests = [Request(f"r{i}", float(i), seen=on(Distance.DISK) if i % 2 else None) for i in range(100)]
    order = order_of("fpf", 3)
    for request in requests:
        order.add(request)
        request.asked.clear()
    for refresh in range(1, 18):
        order.refresh(NOW, 2)
        assert sum(len(request.asked) for request in requests) == refresh * (2 + 3 + 3)
    assert all(request.asked for request in requests)


def test_taking_from_an_empty_queue() -> None:
    order = order_of("relaxed-fpf", 4)
    order.refresh(NOW, 1)
    assert len(order) == 0 and names(order) == "" and order.next_to_load(3) == []
    with pytest.raises(IndexError, match="no request waits"):
        order.first()


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
        due=st.just(math.inf) | st.floats(0, 2 * NOW),
    ),
    max_size=30,
    unique_by=lambda request: request.request_id,
)


@given(REQUESTS, st.sampled_from(sorted(POLICIES)), st.booleans())
def test_the_order_is_the_policys_behind_those_that_were_begun(
    requests: list[Request], policy: str, by_priority: bool
) -> None:
    order = order_of(policy, 4, by_priority)
    for request in requests:
        order.add(request)
    order.refresh(NOW, 3)
    queued = []
    for number, r in enumerate(requests):
        if not r.begun:
            seen = r.seen or NOTHING_SEEN
            cached = max(r.local, seen.tokens)
            q = QueuedRequest(
                number, r.arrival_time, r.num_prompt_tokens, cached, seen.weight(r.local, r.num_prompt_tokens)
            )
            q.priority = r.priority if by_priority else 0
            q.prefix = (r.key, cached) if cached else None
            q.ready_s, q.deadline_s = float(r.num_prompt_tokens - cached), r.due
            queued.append(q)
    ranks = create_policy(policy).ranks(queued, NOW)
    moving = [requests[q.id] for _, q in sorted(zip(ranks, queued, strict=True), key=lambda pair: pair[0])]
    wanted = [r for r in requests if r.begun] + moving
    if by_priority:
        wanted.sort(key=lambda r: r.priority)
    assert list(order) == wanted
    taken = []
    while len(order):
        first = next(iter(order))  # where one leaves, the group that it led may stand elsewhere
        assert order.first() is first is order.take()
        taken.append(first)
    assert order.begun == taken and len(taken) == len(requests)


class EngineMachine(RuleBasedStateMachine):
    """vLLM's ways with its queue: it appends what arrives, takes from the front, puts back what it had to skip in the
    same order, and what it preempts at the front."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.waiting: dict[str, Request] = {}
        self.running: list[Request] = []
        self.arrived = 0
        self.order = order_of("relaxed-fpf", 4)
        self.waits = Waits()

    @rule(tier=st.sampled_from(Distance))
    def arrive(self, tier: Distance) -> None:
        request = Request(f"r{self.arrived}", self.now_s, seen=None if tier is Distance.NONE else on(tier))
        self.arrived += 1
        self.order.add(request)
        self.waiting[request.request_id] = request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), tier=st.sampled_from(Distance))
    def move(self, data: st.DataObject, tier: Distance) -> None:
        request = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        request.seen = None if tier is Distance.NONE else on(tier)

    @rule(skip=st.integers(0, 2), take=st.integers(1, 3))
    def step(self, skip: int, take: int) -> None:
        self.now_s += 1
        self.waits.waiting(len(self.order), self.now_s)
        self.order.refresh(self.now_s, take)
        skipped = [self.order.take() for _ in range(min(skip, len(self.order)))]
        taken = [self.order.take() for _ in range(min(take, len(self.order)))]
        for request in taken:
            request.begun = True
            del self.waiting[request.request_id]
        for request in reversed(skipped):
            self.order.put_back(request)
        assert self.order.begun == taken
        if taken:
            self.waits.begun([r.arrival_time for r in taken], self.now_s, bool(self.waiting))
        self.running += taken

    @precondition(lambda self: self.running)
    @rule()
    def preempt(self) -> None:
        request = self.running.pop()
        self.order.put_back(request)
        self.waiting[request.request_id] = request
        assert self.order.first() is request

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.order.remove(self.waiting.pop(data.draw(st.sampled_from(sorted(self.waiting)))))

    @invariant()
    def all_are_there_and_the_preempted_in_front(self) -> None:
        waiting = list(self.order)
        assert {r.request_id: r for r in waiting} == self.waiting
        assert len(waiting) == len(self.order) == len(self.waiting)
        begun = [r.begun for r in waiting]
        assert begun == sorted(begun, reverse=True)


EngineMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestEngine = EngineMachine.TestCase


@given(
    arrivals=st.lists(st.tuples(st.integers(0, 60), st.sampled_from(Distance)), min_size=1, max_size=80),
    look_ahead=st.integers(1, 12),
    limit=st.integers(1, 20),
)
def test_relaxed_fpf_keeps_its_promise(arrivals: list[tuple[int, Distance]], look_ahead: int, limit: int) -> None:
    """One is begun in each second, and no more than `limit` wait at a time: none waits longer than 4 * L * s."""
    coming = sorted(arrivals, key=lambda arrival: arrival[0])
    order, waits = order_of("relaxed-fpf", look_ahead), Waits()
    now = 0
    while coming or len(order):
        while coming and coming[0][0] <= now and len(order) < limit:
            _, tier = coming.pop(0)
            seen = None if tier is Distance.NONE else on(tier)
            order.add(Request(f"r{len(coming)}", float(now), seen=seen))
        waits.waiting(len(order), float(now))
        if len(order):
            order.refresh(float(now), 1)
            waits.begun([order.take().arrival_time], float(now), len(order) > 0)
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
    """Of those next in order, those of which more can be loaded than the engine has itself."""
    requests = queue(a=None, **dict.fromkeys("bcdef", on(Distance.CPU)))
    requests[2].local = 4 * BLOCK
    requests[3].local = 2 * BLOCK
    order = order_of("fcfs", look_ahead=5)
    for request in requests:
        order.add(request)
    wanted = [("b", 0), ("d", 2 * BLOCK), ("e", 0)]
    assert [(r.request_id, tokens) for r, tokens in order.next_to_load(9)] == wanted
    assert [r.request_id for r, _ in order.next_to_load(2)] == ["b", "d"]


def test_ready_is_the_best_of_loading_and_computing() -> None:
    cost = CostModel()
    seen = SeenPrefix(80, ((Distance.CPU, 40), (Distance.DISK, 40)))

    def ready_s(local_tokens: int, seen: SeenPrefix = seen) -> float:
        return time_to_ready(cost, 100, local_tokens, seen, lambda tokens: 1000 * tokens)

    assert ready_s(0, NOTHING_SEEN) == pytest.approx(100 / 10_000), "nothing was observed"
    assert ready_s(0) == pytest.approx(20 / 10_000)
    assert ready_s(100, NOTHING_SEEN) == pytest.approx(1 / 10_000), "the last token is always computed"
    for tokens in (10, 100, 50):
        cost.observe_compute(tokens, tokens * 0.01)
    for nbytes in (1000, 100_000, 50_000):
        cost.observe_load(Distance.CPU, nbytes, nbytes * 1e-6)
        cost.observe_load(Distance.DISK, nbytes, nbytes * 1e-4)
    assert ready_s(0, NOTHING_SEEN) == pytest.approx(1.0, rel=0.01)
    assert ready_s(0) == pytest.approx(40 * 0.001 + 60 * 0.01, rel=0.01), "the disk is slower than computing"
    assert ready_s(30) == pytest.approx(10 * 0.001 + 60 * 0.01, rel=0.01)
    assert ready_s(90) == pytest.approx(10 * 0.01, rel=0.01)
