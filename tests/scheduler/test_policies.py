from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd_scheduler import (
    POLICIES,
    Distance,
    InvalidValueError,
    QueuedRequest,
    RequestQueue,
    UnknownPolicyError,
    create_policy,
)

NOW_S = 1000.0


def request(
    id: int,
    age_s: float,
    distance: Distance = Distance.NONE,
    priority: int = 0,
    prefix: str | None = None,
) -> QueuedRequest:
    return QueuedRequest(id, NOW_S - age_s, 100, 0, distance.weight, priority, prefix)


def order(policy: str, *requests: QueuedRequest) -> list[int]:
    queue = RequestQueue(create_policy(policy), limit=len(requests))
    for r in requests:
        queue.push(r)
    return [r.id for r in queue.window(len(requests), NOW_S)]


requests_st = st.lists(
    st.builds(
        request,
        id=st.integers(0, 10_000),
        age_s=st.integers(0, 500).map(float),
        distance=st.sampled_from(Distance),
        priority=st.integers(0, 2),
        prefix=st.sampled_from([None, "a", "b", "c"]),
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda r: r.id,
)


def test_fcfs_looks_at_arrival_alone() -> None:
    assert order("fcfs", request(1, 5, Distance.GPU), request(2, 9, Distance.NONE), request(3, 7)) == [
        2,
        3,
        1,
    ]


def test_fpf_takes_the_nearest_however_late_it_came() -> None:
    waiting = [request(1, 900, Distance.NONE), request(2, 800, Distance.DISK), request(3, 700, Distance.CPU)]
    assert order("fpf", *waiting, request(4, 0, Distance.GPU)) == [4, 3, 2, 1]


def test_fpf_keeps_those_that_share_a_prefix_together() -> None:
    cpu = Distance.CPU
    waiting = [
        request(1, 9, cpu, prefix="a"),
        request(2, 8, cpu, prefix="b"),
        request(3, 7, cpu),
        request(4, 6, cpu, prefix="a"),
        request(5, 5, cpu, prefix="b"),
    ]
    assert order("fpf", *waiting) == [1, 4, 2, 5, 3]
    assert order("fcfs", *waiting) == order("relaxed-fpf", *waiting) == [1, 2, 3, 4, 5]


@given(requests_st)
def test_fpf_groups_are_contiguous_and_ordered_by_their_oldest(waiting: list[QueuedRequest]) -> None:
    by_id = {r.id: r for r in waiting}
    ordered = [by_id[i] for i in order("fpf", *waiting)]

    def group(r: QueuedRequest) -> tuple[int, float, object]:
        return (r.priority, -r.weight, r.prefix if r.prefix is not None else r.id)

    runs = [(key, list(members)) for key, members in groupby(ordered, key=group)]
    assert len({key for key, _ in runs}) == len(runs)
    for _, members in runs:
        assert members == sorted(members, key=lambda r: (r.arrival_s, r.id))
    heads = [(key[0], key[1], members[0].arrival_s, members[0].id) for key, members in runs]
    assert heads == sorted(heads)


@pytest.mark.parametrize(
    ("older", "younger", "first"),
    [
        (request(1, 3.9, Distance.NONE), request(2, 1.0, Distance.GPU), 2),
        (request(1, 4.0, Distance.NONE), request(2, 1.0, Distance.GPU), 1),  # equal products: by arrival
        (request(1, 2.9, Distance.NONE), request(2, 1.0, Distance.CPU), 2),
        (request(1, 3.1, Distance.NONE), request(2, 1.0, Distance.CPU), 1),
        (request(1, 1.9, Distance.DISK), request(2, 1.0, Distance.GPU), 2),
        (request(1, 2.1, Distance.DISK), request(2, 1.0, Distance.GPU), 1),
    ],
)
def test_relaxed_fpf_is_equation_4(older: QueuedRequest, younger: QueuedRequest, first: int) -> None:
    assert order("relaxed-fpf", younger, older)[0] == first


@given(requests_st)
def test_relaxed_fpf_is_never_passed_by_the_much_younger(waiting: list[QueuedRequest]) -> None:
    by_id = {r.id: r for r in waiting}
    ordered = [by_id[i] for i in order("relaxed-fpf", *waiting)]
    for position, ahead in enumerate(ordered):
        for behind in ordered[position + 1 :]:
            if ahead.priority == behind.priority:
                assert NOW_S - ahead.arrival_s >= (NOW_S - behind.arrival_s) / 4


def test_a_request_stamped_after_the_clock_was_read_counts_as_new() -> None:
    assert order("relaxed-fpf", request(1, -1, Distance.GPU), request(2, 0, Distance.NONE)) == [2, 1]
    assert order("relaxed-fpf", request(1, -1, Distance.GPU), request(2, -2, Distance.NONE)) == [1, 2]


@pytest.mark.parametrize("policy", POLICIES)
@given(waiting=requests_st)
def test_priority_goes_before_everything(policy: str, waiting: list[QueuedRequest]) -> None:
    by_id = {r.id: r for r in waiting}
    priorities = [by_id[i].priority for i in order(policy, *waiting)]
    assert priorities == sorted(priorities)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data(), waiting=requests_st)
def test_the_order_does_not_depend_on_how_requests_were_queued(
    policy: str, data: st.DataObject, waiting: list[QueuedRequest]
) -> None:
    assert order(policy, *waiting) == order(policy, *data.draw(st.permutations(waiting)))


def test_policies_are_created_by_name() -> None:
    assert [create_policy(name).name for name in POLICIES] == list(POLICIES)
    with pytest.raises(UnknownPolicyError, match="'lifo'; choose one of fcfs, fpf, relaxed-fpf"):
        create_policy("lifo")


def test_the_longest_match_the_soonest_ready_and_the_earliest_deadline_go_first() -> None:
    long = QueuedRequest(1, NOW_S - 1, 100, 90, 2.0, ready_s=5.0)
    near = QueuedRequest(2, NOW_S - 2, 100, 10, 4.0, ready_s=9.0, deadline_s=NOW_S + 1)
    none = QueuedRequest(3, NOW_S - 3, 5, ready_s=0.5, deadline_s=NOW_S + 2)
    assert order("fpf", long, near, none) == [2, 1, 3]
    assert order("lpm", long, near, none) == [1, 2, 3]
    assert order("shortest-ready", long, near, none) == [3, 1, 2]
    assert order("deadline", long, near, none) == [2, 3, 1]


def test_who_has_waited_for_the_bound_goes_first_in_order_of_arrival() -> None:
    queue = RequestQueue(create_policy("fpf", 10.0), limit=8)
    for waiting in (request(1, 11, Distance.NONE), request(2, 12, Distance.DISK), request(3, 9, Distance.GPU)):
        queue.push(waiting)
    assert [r.id for r in queue.window(8, NOW_S)] == [2, 1, 3]
    queue.push(request(4, 1, Distance.NONE, priority=-1))
    assert [r.id for r in queue.window(8, NOW_S + 2)] == [4, 2, 1, 3]


@pytest.mark.parametrize("bound_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_has_to_be_a_time(bound_s: float) -> None:
    with pytest.raises(InvalidValueError, match="give seconds above 0"):
        create_policy("fpf", bound_s)


@pytest.mark.parametrize("policy", ["fcfs", "relaxed-fpf"])
def test_who_starves_nobody_takes_no_bound(policy: str) -> None:
    with pytest.raises(InvalidValueError, match="never starves a request"):
        create_policy(policy, 1.0)


@pytest.mark.parametrize(("cached", "ready_s"), [(0, -1.0), (0, float("nan")), (101, 1.0)])
def test_impossible_states_are_refused(cached: int, ready_s: float) -> None:
    with pytest.raises(InvalidValueError, match="pass"):
        QueuedRequest(1, 0.0, 100, cached, ready_s=ready_s)
    with pytest.raises(InvalidValueError, match="deadline"):
        QueuedRequest(1, 0.0, 100, deadline_s=float("nan"))
