"""Tenants are served in turn, by what they have received and not by how much they ask for."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixd_scheduler import (
    POLICIES,
    WEIGHT_CLASSES,
    IntegrityError,
    QueuedRequest,
    QueueFullError,
    RequestQueue,
    SharedLimit,
    create_policy,
)


def request(id: int, tenant: str, tokens: int = 10, **more: object) -> QueuedRequest:
    return QueuedRequest(id, float(id), tokens, tenant=tenant, **more)  # type: ignore[arg-type]


def queue_of(*requests: QueuedRequest, policy: str = "fcfs") -> RequestQueue:
    queue = RequestQueue(create_policy(policy), 10_000)
    for each in requests:
        queue.push(each)
    return queue


def in_order(queue: RequestQueue, n: int = 100) -> list[int]:
    return [each.id for each in queue.window(n, 1000.0)]


def test_a_tenant_that_came_late_does_not_wait_behind_anothers_flood() -> None:
    queue = queue_of(*[request(number, "flood") for number in range(100)], request(100, "late"), request(101, "late"))
    assert in_order(queue, 5) == [0, 100, 1, 101, 2]
    assert queue.waiting_of("flood") == 100
    assert queue.waiting_of("late") == 2


def test_a_window_foretells_what_is_served() -> None:
    sizes = random.Random(5)
    requests = [request(number, "abc"[number % 3], sizes.randint(1, 100)) for number in range(60)]
    queue = queue_of(*requests)
    foretold, served = in_order(queue), []
    while len(queue):
        served.append(queue.serve(in_order(queue, 1)[0]).id)
    assert served == foretold


def test_priorities_and_deadlines_order_requests_of_one_tenant_alone() -> None:
    queue = queue_of(
        request(0, "a"), request(1, "b", priority=-(2**31)), request(2, "b", priority=-(2**31), deadline_s=1.0),
        request(3, "a", priority=-1), policy="deadline",
    )  # fmt: skip
    assert in_order(queue) == [3, 2, 0, 1]


def test_nobody_waits_behind_another_tenants_request_that_lacks_the_same() -> None:
    queue = queue_of(
        request(0, "a", priority=9, lacks="x"), request(1, "b", lacks="x"), request(2, "b", lacks="x"), request(3, "a")
    )
    assert in_order(queue) == [3, 1, 0]
    queue.serve(1)
    assert in_order(queue) == [3, 2, 0]
    queue.check_integrity(1000.0)


def test_what_a_tenant_did_not_use_while_it_was_idle_is_gone() -> None:
    queue = queue_of(*[request(number, "busy", 100) for number in range(50)])
    for _ in range(40):
        queue.serve(in_order(queue, 1)[0])
    for number in range(50, 60):
        queue.push(request(number, "idle", 100))
    assert in_order(queue, 6) == [50, 40, 51, 41, 52, 42]


def test_output_that_came_while_nobody_waited_gives_no_credit_either() -> None:
    queue = queue_of(request(0, "busy"))
    queue.serve(0)
    queue.charge("busy", 100_000)
    for number in range(1, 7):
        queue.push(request(number, "idle" if number % 2 else "busy"))
    assert in_order(queue) == [1, 2, 3, 4, 5, 6]


def test_a_change_of_what_is_cached_loses_no_turn() -> None:
    queue = queue_of(*[request(number, "a") for number in range(4)], request(9, "b", lacks="x"))
    for _ in range(3):
        queue.serve(next(number for number in in_order(queue) if number != 9))
    before = in_order(queue)
    queue.update(9, 1.0, 0, None, lacks="y")
    assert in_order(queue) == before == [9, 3]


def test_output_counts_and_an_interruption_does_not_count_twice() -> None:
    queue = queue_of(
        *[request(number, "a") for number in range(3)], *[request(number, "b") for number in range(10, 40)]
    )
    taken = queue.serve(0)
    queue.charge("a", 20)
    assert in_order(queue, 6) == [10, 11, 12, 13, 14, 1], "b has received 50 when it is a's turn again"
    queue.readmit(taken)
    assert in_order(queue, 7) == [10, 11, 12, 13, 14, 0, 15]
    queue.serve(0)
    assert in_order(queue, 6) == [10, 11, 12, 13, 14, 1]


def test_what_is_cached_costs_nothing() -> None:
    cached = [request(number, "a", 100, cached_tokens=95) for number in range(40)]
    queue = queue_of(*cached, *[request(number, "b", 100) for number in range(40, 44)])
    assert in_order(queue, 23) == [0, 40, *range(1, 20), 41, 20]


def share_of_the_polite(flood: int, *, polite: int = 4, services: int = 2000) -> float:
    """What part of the service a tenant gets that keeps `polite` requests waiting beside one that keeps `flood`."""
    chance, queue, made = random.Random(7), RequestQueue(create_policy("relaxed-fpf"), 10_000), 0
    received = {"polite": 0, "flood": 0}

    def push(tenant: str) -> None:
        nonlocal made
        made += 1
        queue.push(request(made, tenant, chance.randint(1, 100), priority=0 if tenant == "polite" else -9))

    for tenant, count in (("polite", polite), ("flood", flood)):
        for _ in range(count):
            push(tenant)
    for _ in range(services):
        served = queue.serve(queue.window(1, float(made))[0].id)
        output = chance.randint(0, 30)
        queue.charge(served.tenant, output)
        received[str(served.tenant)] += served.prompt_tokens + 2 * output
        push(str(served.tenant))
    return received["polite"] / sum(received.values())


def test_a_tenants_share_does_not_depend_on_how_much_another_floods() -> None:
    shares = [share_of_the_polite(flood) for flood in (4, 40, 400)]
    assert all(abs(share - 0.5) < 0.01 for share in shares), shares


@given(
    sizes=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50)), min_size=20, max_size=60),
    tenants=st.integers(2, 4),
    seed=st.integers(0, 99),
)
def test_what_two_that_wait_have_received_differs_by_a_bound(
    sizes: list[tuple[int, int]], tenants: int, seed: int
) -> None:
    """Two requests of the longest at most, however the requests are shaped: here each ends before the next begins."""
    chance, received = random.Random(seed), [0] * tenants
    queue = queue_of(*[request(tenants * number + t, str(t), size) for number, (size, _) in enumerate(sizes)
                       for t in range(tenants)])  # fmt: skip
    longest = max(prompt + 2 * output for prompt, output in sizes)
    while all(queue.waiting_of(str(t)) for t in range(tenants)):
        served = queue.serve(queue.window(1, 0.0)[0].id)
        output = chance.choice(sizes)[1]
        queue.charge(served.tenant, output)
        received[int(str(served.tenant))] += served.prompt_tokens + 2 * output
        assert max(received) - min(received) <= 2 * (longest + 100)


# -- the limit ---------------------------------------------------------------------------------------------------------


def test_no_tenant_takes_the_places_of_the_others() -> None:
    queue = RequestQueue(create_policy("fcfs"), 80, tenants=lambda: 4)
    made = iter(range(1000))
    for _ in range(50):  # its own 10, and the 40 that are anybody's
        queue.push(request(next(made), "a"))
    with pytest.raises(QueueFullError, match=r"50 requests of the tenant wait; of the queue's 80 places 10 are kept"):
        queue.push(request(next(made), "a"))
    for tenant in "bcd":
        for _ in range(10):
            queue.push(request(next(made), tenant))
    with pytest.raises(QueueFullError, match="80 is the limit"):
        queue.push(request(next(made), "b"))
    queue.check_integrity()
    queue.serve(0)
    queue.push(request(next(made), "b"))
    with pytest.raises(QueueFullError):
        queue.push(request(next(made), "c"))


@given(
    limit=st.integers(1, 40),
    known=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(-5, 30)), max_size=60),
)
def test_a_shared_limit_holds_and_leaves_everybody_its_part(
    limit: int, known: int, steps: list[tuple[int, int]]
) -> None:
    shared, had = SharedLimit(limit, lambda: known), [0] * 5
    for tenant, amount in steps:
        tenant %= known
        change = max(-had[tenant], min(amount, shared.left(tenant)))
        shared.add(tenant, change)
        had[tenant] += change
        assert shared.total == sum(had) <= limit
        assert [shared[t] for t in range(5)] == had
        for t in range(known):
            assert shared.left(t) >= shared.reserved - had[t]
            assert known > 1 or shared.left(t) == limit - had[t]
        assert shared.reserved >= 1 or limit < known


# -- any sequence of calls ---------------------------------------------------------------------------------------------


class FairMachine(RuleBasedStateMachine):
    """The order is that of a model which looks at every request for each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[int, QueuedRequest] = {}
        self.running: dict[int, QueuedRequest] = {}
        self.again: set[int] = set()
        self.received = dict.fromkeys("abc", 0)
        self.turns = dict.fromkeys("abc", 0)
        self.began: list[str] = []  # tenants that wait, in the order in which they began to
        self.last = ""
        self.made = self.turn = 0

    @initialize(policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, policy: str) -> None:
        self.queue = RequestQueue(create_policy(policy), 100)

    def enter(self, new: QueuedRequest) -> None:
        tenant = str(new.tenant)
        if tenant not in self.began:
            floors = [self.received[each] for each in self.began]
            floor = min(floors) if floors else self.received.get(self.last, 0)
            self.received[tenant] = max(self.received[tenant], floor)
            self.began.append(tenant)
        self.waiting[new.id] = new

    def take(self, id: int) -> QueuedRequest:
        taken = self.waiting.pop(id)
        self.again.discard(id)
        if all(each.tenant != taken.tenant for each in self.waiting.values()):
            self.last = str(taken.tenant)
            self.began.remove(self.last)
        return taken

    def cost(self, each: QueuedRequest) -> int:
        return 0 if each.id in self.again else max(1, each.prompt_tokens - each.cached_tokens)

    @rule(
        tenant=st.sampled_from("abc"),
        tokens=st.integers(1, 9),
        priority=st.integers(-1, 1),
        lacks=st.sampled_from([None, "x", "y"]),
    )
    def push(self, tenant: str, tokens: int, priority: int, lacks: str | None) -> None:
        new = request(self.made, tenant, tokens, priority=priority, lacks=lacks)
        self.made += 1
        self.queue.push(new)
        self.enter(new)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """Whoever is ready, not always the first."""
        chosen = data.draw(st.sampled_from(self.queue.window(3, 100.0)))
        self.turn += 1
        self.turns[str(chosen.tenant)] = self.turn
        self.received[str(chosen.tenant)] += self.cost(chosen)
        assert self.queue.serve(chosen.id) is chosen
        self.running[chosen.id] = self.take(chosen.id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), output=st.integers(0, 9), ends=st.booleans())
    def step(self, data: st.DataObject, output: int, ends: bool) -> None:
        runs = data.draw(st.sampled_from(sorted(self.running)))
        self.queue.charge(self.running[runs].tenant, output)
        self.received[str(self.running[runs].tenant)] += 2 * output
        if ends:
            del self.running[runs]

    @precondition(lambda self: self.running)
    @rule()
    def interrupt(self) -> None:
        _, interrupted = self.running.popitem()
        self.queue.readmit(interrupted)
        self.enter(interrupted)
        self.again.add(interrupted.id)

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(), lacks=st.sampled_from([None, "x"]), weight=st.sampled_from(WEIGHT_CLASSES), cached=st.booleans()
    )
    def move(self, data: st.DataObject, lacks: str | None, weight: float, cached: bool) -> None:
        moved = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        self.queue.update(moved.id, weight, moved.prompt_tokens if cached else 0, None, lacks=lacks)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.waiting)))
        assert self.queue.remove(gone) is self.take(gone)

    @invariant()
    def same_as_the_model(self) -> None:
        if not hasattr(self, "queue"):
            return
        policy = self.queue.policy
        lines: dict[str, list[QueuedRequest]] = {}
        for tenant in self.began:
            own = [each for each in self.waiting.values() if each.tenant == tenant]
            standing = [each for each in own if each.lacks is None]
            for lacks in ("x", "y"):
                standing += sorted((each for each in own if each.lacks == lacks), key=policy.first_of)[:1]
            ranks = dict(zip((each.id for each in standing), policy.ranks(standing, 100.0), strict=True))
            lines[tenant] = sorted(standing, key=lambda each: ranks[each.id])
        received, turns, turn = dict(self.received), dict(self.turns), self.turn
        expected: list[QueuedRequest] = []
        while any(lines.values()):
            least = min((t for t in lines if lines[t]), key=lambda t: (received[t], turns[t]))
            turn += 1
            turns[least] = turn
            received[least] += self.cost(lines[least][0])
            expected.append(lines[least].pop(0))
        window = self.queue.window(100, 100.0)
        if all(self.turns.values()):  # else who came first of two that never had a turn is not said
            assert window == expected
        assert sorted(each.id for each in window) == sorted(each.id for each in expected)
        for tenant in "abc":
            assert [each for each in window if each.tenant == tenant] == [e for e in expected if e.tenant == tenant]
            assert self.queue.waiting_of(tenant) == sum(each.tenant == tenant for each in self.waiting.values())
        self.queue.check_integrity(100.0)


TestFairMachine = FairMachine.TestCase


def test_integrity_notices_wrong_counts() -> None:
    queue = queue_of(request(1, "a"))
    queue._share._waiting["a"] = 2
    with pytest.raises(IntegrityError, match="1 requests of tenant a wait, counted are 2"):
        queue.check_integrity()
    queue = queue_of(request(1, "a"))
    queue._admitted.total = 2
    with pytest.raises(IntegrityError, match="1 admitted requests wait, counted are 2"):
        queue.check_integrity()


def test_who_is_not_admitted_is_passed_by_others_with_all_that_stands_behind_it() -> None:
    queue = RequestQueue(create_policy("fcfs"), 100)
    for number in range(12):
        queue.push(QueuedRequest(number, float(number), 10, tenant="abc"[number % 3]))
    asked: list[int] = []

    def admits(request: QueuedRequest) -> bool:
        asked.append(request.id)
        return request.id not in (3, 7)

    assert [each.id for each in queue.window(6, 100.0, admits)] == [0, 1, 2, 4, 5, 8]
    assert sorted(asked) == [0, 1, 2, 3, 4, 5, 7, 8], "each once, and none behind one that was not admitted"
    assert [each.id for each in queue.window(100, 100.0)] == list(range(12))
    alone = RequestQueue(create_policy("fcfs"), 100)
    for number in range(4):
        alone.push(QueuedRequest(number, float(number), 10))
    assert [each.id for each in alone.window(4, 100.0, lambda request: request.id != 2)] == [0, 1]
