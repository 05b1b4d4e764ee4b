from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixd_scheduler import (
    POLICIES,
    WEIGHT_CLASSES,
    Distance,
    DuplicateRequestError,
    IntegrityError,
    InvalidValueError,
    QueuedRequest,
    QueueFullError,
    RequestQueue,
    UnknownRequestError,
    create_policy,
)


def request(id: int, arrival_s: float = 0.0, distance: Distance = Distance.NONE) -> QueuedRequest:
    return QueuedRequest(id, arrival_s, prompt_tokens=10, weight=distance.weight)


def fcfs(limit: int) -> RequestQueue:
    return RequestQueue(create_policy("fcfs"), limit)


def test_a_full_queue_refuses_with_its_limit_and_a_remedy() -> None:
    queue = fcfs(2)
    queue.push(request(1))
    queue.push(request(2))
    with pytest.raises(QueueFullError, match=r"2 is the limit; send the request again later") as refusal:
        queue.push(request(3))
    assert refusal.value.limit == 2
    assert 3 not in queue
    queue.remove(1)
    queue.push(request(3))
    assert [r.id for r in queue] == [2, 3]


def test_an_interrupted_request_comes_back_to_a_full_queue() -> None:
    queue = fcfs(1)
    queue.push(request(1, arrival_s=1.0))
    interrupted = queue.remove(1)
    queue.push(request(2, arrival_s=2.0))
    queue.readmit(interrupted)
    queue.check_integrity()
    assert [r.id for r in queue.window(2, 3.0)] == [1, 2]
    with pytest.raises(QueueFullError):
        queue.push(request(3))


def test_ids_are_unique_and_unknown_ones_are_refused() -> None:
    queue = fcfs(4)
    queue.push(request(1))
    with pytest.raises(DuplicateRequestError, match="id 1 waits already"):
        queue.push(request(1))
    with pytest.raises(DuplicateRequestError):
        queue.readmit(request(1))
    with pytest.raises(UnknownRequestError, match="no request with id 9 waits"):
        queue.remove(9)
    assert queue.get(9) is None
    assert len(queue) == 1


def test_a_queue_has_room_for_one_at_least() -> None:
    with pytest.raises(InvalidValueError, match="limited to 0 requests"):
        fcfs(0)


def test_a_request_that_moves_changes_its_place() -> None:
    queue = RequestQueue(create_policy("fpf"), 4)
    queue.push(request(1, 1.0, Distance.CPU))
    queue.push(request(2, 2.0, Distance.DISK))
    assert [r.id for r in queue.window(2, 3.0)] == [1, 2]
    queue.update(2, 4.0, 4, "a")
    assert [r.id for r in queue.window(2, 3.0)] == [2, 1]
    waiting = queue.get(2)
    assert waiting is not None
    assert (waiting.weight, waiting.cached_tokens, waiting.prefix) == (4.0, 4, "a")
    with pytest.raises(InvalidValueError, match="request 2 has 11 cached of 10"):
        queue.update(2, 4.0, 11, None)
    with pytest.raises(UnknownRequestError, match="no request with id 9 waits"):
        queue.update(9, 4.0, 0, None)


def test_time_alone_changes_the_order_of_relaxed_fpf() -> None:
    queue = RequestQueue(create_policy("relaxed-fpf"), 4)
    queue.push(request(1, 0.0, Distance.NONE))
    queue.push(request(2, 6.0, Distance.GPU))
    assert [r.id for r in queue.window(2, 7.0)] == [1, 2]  # 7 * 1 against 1 * 4
    assert [r.id for r in queue.window(2, 10.0)] == [2, 1]  # 10 * 1 against 4 * 4


@pytest.mark.parametrize("policy", POLICIES)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 50), st.sampled_from(Distance)), max_size=60),
    n=st.integers(0, 70),
)
def test_a_window_is_the_head_of_the_whole_order(policy: str, arrivals: list[tuple[int, Distance]], n: int) -> None:
    queue = RequestQueue(create_policy(policy), 100)
    for id, (arrival_s, distance) in enumerate(arrivals):
        queue.push(request(id, float(arrival_s), distance))
    everything = queue.window(len(arrivals), 60.0)
    assert sorted(r.id for r in everything) == list(range(len(arrivals)))
    assert queue.window(n, 60.0) == everything[:n]
    assert len(queue) == len(arrivals)


def test_integrity_notices_a_request_that_changed_its_id() -> None:
    queue = fcfs(2)
    waiting = request(1)
    queue.push(waiting)
    waiting.id = 2
    with pytest.raises(IntegrityError, match="queued as 1 says that its id is 2"):
        queue.check_integrity()


def test_integrity_notices_impossible_counts() -> None:
    queue = fcfs(2)
    waiting = request(1)
    queue.push(waiting)
    waiting.cached_tokens = 11
    with pytest.raises(IntegrityError, match="11 cached of 10"):
        queue.check_integrity()


def test_integrity_notices_a_request_that_moved_behind_the_queues_back() -> None:
    queue = RequestQueue(create_policy("fpf"), 4)
    queue.push(request(1, 1.0, Distance.CPU))
    late = request(2, 2.0, Distance.CPU)
    queue.push(late)
    late.weight = 4.0
    with pytest.raises(IntegrityError, match="request 1 stands where request 2 belongs"):
        queue.check_integrity()


def test_integrity_notices_a_request_that_the_order_has_lost() -> None:
    queue = fcfs(2)
    queue.push(request(1))
    queue._order.remove(1)
    with pytest.raises(IntegrityError, match="the order has 0 requests, but 1 others belong"):
        queue.check_integrity()


def test_of_those_that_lack_the_same_block_one_stands_in_the_order() -> None:
    queue = fcfs(2000)
    for number in range(1000):
        queue.push(QueuedRequest(number, float(number), 100, lacks="a"))
    queue.push(QueuedRequest(1000, 1000.0, 100))
    assert [r.id for r in queue.window(10, 2000.0)] == [0, 1000]
    queue.remove(0)  # it runs, and computes what they lack
    assert [r.id for r in queue.window(10, 2000.0)] == [1, 1000]
    queue.update(500, 4.0, 16, "a")  # it was found that this is there by now
    assert [r.id for r in queue.window(10, 2000.0)] == [1, 500, 1000]
    queue.check_integrity(2000.0)


def test_the_most_urgent_of_those_that_lack_the_same_computes_it() -> None:
    queue = RequestQueue(create_policy("deadline"), 10)
    queue.push(QueuedRequest(1, 1.0, 100, lacks="a"))
    queue.push(QueuedRequest(2, 2.0, 100, lacks="a", deadline_s=9.0))
    queue.push(QueuedRequest(3, 3.0, 100, deadline_s=5.0))
    assert [r.id for r in queue.window(10, 4.0)] == [3, 2]
    queue.push(QueuedRequest(4, 4.0, 100, lacks="a", priority=-1))
    assert [r.id for r in queue.window(10, 4.0)] == [4, 3]


@pytest.mark.parametrize("policy", ["fpf", "deadline"])
def test_with_a_bound_or_without_deadlines_the_oldest_of_those_that_lack_the_same_computes_it(policy: str) -> None:
    """Else one that has waited beyond the bound could stand behind a later one that never comes up."""
    queue = RequestQueue(create_policy(policy, 5.0), 10)
    queue.push(QueuedRequest(1, 1.0, 100, lacks="a"))
    queue.push(QueuedRequest(2, 2.0, 100, lacks="a", deadline_s=9.0))
    assert [r.id for r in queue.window(10, 4.0)] == [1]


class QueueMachine(RuleBasedStateMachine):
    """Any sequence of calls leaves the queue with exactly the requests that a plain dict says it has."""

    LIMIT = 12

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.waiting: dict[int, QueuedRequest] = {}
        self.running: dict[int, QueuedRequest] = {}
        self.next_id = 0

    @initialize(policy=st.sampled_from(sorted(POLICIES)), bound_s=st.sampled_from([None, 0.75]))
    def begin(self, policy: str, bound_s: float | None) -> None:
        bound_s = bound_s if POLICIES[policy].may_starve else None
        self.queue = RequestQueue(create_policy(policy, bound_s), self.LIMIT)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 1e-9, 1e9]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(
        weight=st.sampled_from(WEIGHT_CLASSES),
        priority=st.integers(-1, 1),
        prefix=st.sampled_from([None, "a", "b"]),
        early_s=st.sampled_from([-1.0, 0.0, 0.5, 2.0]),
        lacks=st.sampled_from([None, None, "c", "d"]),
        due_s=st.sampled_from([math.inf, 1.0, 2.0]),
    )
    def push(
        self, weight: float, priority: int, prefix: str | None, early_s: float, lacks: str | None, due_s: float
    ) -> None:
        new = QueuedRequest(self.next_id, self.now_s - early_s, 10, 0, weight, priority, prefix, lacks)
        new.deadline_s = due_s
        self.next_id += 1
        if len(self.waiting) >= self.LIMIT:
            with pytest.raises(QueueFullError):
                self.queue.push(new)
        else:
            self.queue.push(new)
            self.waiting[new.id] = new

    @precondition(lambda self: self.waiting)
    @rule()
    def hand_over(self) -> None:
        first = self.queue.window(1, self.now_s)[0]
        assert self.queue.remove(first.id) is first
        self.running[first.id] = self.waiting.pop(first.id)

    @precondition(lambda self: self.running)
    @rule()
    def interrupt(self) -> None:
        id, interrupted = self.running.popitem()
        self.queue.readmit(interrupted)
        self.waiting[id] = interrupted

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(),
        weight=st.sampled_from(WEIGHT_CLASSES),
        prefix=st.sampled_from([None, "a", "b"]),
        lacks=st.sampled_from([None, "c", "d"]),
        cached=st.sampled_from([0, 5]),
        ready_s=st.sampled_from([0.0, 1.0, math.inf]),
    )
    def move(
        self,
        data: st.DataObject,
        weight: float,
        prefix: str | None,
        lacks: str | None,
        cached: int,
        ready_s: float,
    ) -> None:
        moved = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queue.update(moved, weight, cached, prefix, lacks=lacks, ready_s=ready_s)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(id) is self.waiting.pop(id)

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "queue"):
            return
        policy = self.queue.policy
        by_due = policy.name == "deadline" and policy.starvation_bound_s is None
        standing = [r for r in self.waiting.values() if r.lacks is None]
        for lacks in ("c", "d"):
            together = [r for r in self.waiting.values() if r.lacks == lacks]
            due = {r.id: r.deadline_s if by_due else 0.0 for r in together}
            standing += sorted(together, key=lambda r: (r.priority, due[r.id], r.arrival_s, r.id))[:1]
        ranks = self.queue.policy.ranks(standing, self.now_s)
        ranked = [r for _, r in sorted(zip(ranks, standing, strict=True), key=lambda pair: pair[0])]
        assert self.queue.window(100, self.now_s) == ranked
        assert self.queue.window(3, self.now_s) == ranked[:3]
        self.queue.check_integrity(self.now_s)
        assert {r.id: r for r in self.queue} == self.waiting
        assert len(self.queue) == len(self.waiting)
        assert all(self.queue.get(id) is r and id in self.queue for id, r in self.waiting.items())


TestQueueMachine = QueueMachine.TestCase
