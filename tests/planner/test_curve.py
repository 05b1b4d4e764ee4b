"""The curve's caches against plain ones, a block at a time."""

from __future__ import annotations

import itertools
import json
import threading
import time
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.planner.curve import (
    OPTIMUM,
    CurvePart,
    References,
    capacities,
    lru_hits,
    optimal_hits,
    parts,
    policy_hits,
    put_together,
    references,
)
from prefixd.planner.sweep import curve_of, processes
from prefixd.workloads.mooncake import TraceRequest
from prefixd_swap import create_eviction_policy
from prefixd_swap.eviction import POLICY_NAMES

Paths = list[list[int]]
TRACES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=12)


def trace_of(paths: Paths) -> References:
    return references(
        [TraceRequest(1000 * number, 512 * len(path), 1, tuple(path)) for number, path in enumerate(paths)]
    )


def plain_lru(paths: Paths, capacity: int) -> int:
    """Prefixes in the order of their last use; of one request the longest is the least recent."""
    order: list[tuple[int, ...]] = []
    hits = 0
    for path in paths:
        prefixes = [tuple(path[: length + 1]) for length in range(len(path))]
        hits += sum(prefix in order for prefix in prefixes)
        order = [prefix for prefix in order if prefix not in prefixes] + prefixes[::-1]
        order = order[max(0, len(order) - capacity) :]
    return hits


def best(paths: Paths, capacity: int) -> int:
    """The most hits of any choice of what stays after each request, whole prefixes."""
    states: dict[frozenset[tuple[int, ...]], int] = {frozenset(): 0}
    for path in paths:
        prefixes = {tuple(path[: length + 1]) for length in range(len(path))}
        following: dict[frozenset[tuple[int, ...]], int] = {}
        for state, hits in states.items():
            hits += len(prefixes & state)
            there = state | prefixes
            for count in range(min(capacity, len(there)) + 1):
                for kept in itertools.combinations(sorted(there), count):
                    chosen = frozenset(kept)
                    if all(len(prefix) == 1 or prefix[:-1] in chosen for prefix in chosen):
                        following[chosen] = max(following.get(chosen, 0), hits)
        states = following
    return max(states.values())


@given(TRACES)
def test_lru_finds_what_a_list_in_the_order_of_use_finds(paths: Paths) -> None:
    trace = trace_of(paths)
    hits = lru_hits(trace)
    assert len(hits) == trace.blocks + 1 and hits[0] == 0
    for capacity in range(1, trace.blocks + 1):
        assert hits[capacity] == plain_lru(paths, capacity)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=3), min_size=1, max_size=5), st.integers(1, 3))
def test_no_choice_finds_more_than_the_optimum(paths: Paths, capacity: int) -> None:
    assert optimal_hits(trace_of(paths), capacity) == best(paths, capacity)


@given(TRACES, st.integers(1, 12), st.sampled_from(POLICY_NAMES))
def test_policies_find_at_most_the_optimum_and_all_with_room_for_all(paths: Paths, capacity: int, name: str) -> None:
    trace = trace_of(paths)
    hits = policy_hits(trace, create_eviction_policy(name, 1), capacity)
    assert hits <= optimal_hits(trace, capacity)
    if capacity >= trace.blocks:
        assert hits == len(trace.nodes) - trace.blocks


def test_the_score_of_lru_is_its_stack() -> None:
    chance = np.random.default_rng(2)
    paths = [[int(chance.zipf(1.5)) % 30, *chance.integers(0, 3, 5).tolist()] for _ in range(400)]
    trace = trace_of(paths)
    exact = lru_hits(trace)
    for capacity in (50, 100):
        assert policy_hits(trace, create_eviction_policy("lru", 0), capacity) == pytest.approx(
            exact[capacity], rel=0.05
        )


def test_requests_that_come_together_are_used_one_after_the_other() -> None:
    paths = [[1], [2], [1], [3], [1], [2]]
    together = references([TraceRequest(3000, 512, 1, tuple(path)) for path in paths])
    assert (np.diff(together.at_s) > 0).all() and together.at_s[-1] == pytest.approx(3.0)
    for name in ("lru", "fifo"):
        one_by_one = policy_hits(trace_of(paths), create_eviction_policy(name, 1), 2)
        assert policy_hits(together, create_eviction_policy(name, 1), 2) == one_by_one, name
    assert policy_hits(together, create_eviction_policy("lru", 1), 2) == lru_hits(together)[2] == 2


def test_a_curve_is_put_together_of_its_parts() -> None:
    trace = trace_of([[1, 2], [1, 3], [1, 2]])
    sizes = capacities(trace.blocks, 3)
    assert sizes == [1, 3] and capacities(10_000, 3) == [100, 1000, 10_000]
    made = parts(["lru", "fifo"], sizes)
    assert {part.policy for part in made} == {"lru", "fifo", OPTIMUM}
    curve = put_together(trace, sizes, 512, [(part, part.run(trace)) for part in made])
    assert curve.hit_rates["lru"] == [2 / 6, 3 / 6] and curve.hit_rates[OPTIMUM] == [2 / 6, 3 / 6]
    assert curve.most == 0.5 and curve.to_plain()["capacity_blocks"] == [1, 3]


def test_a_trace_without_a_full_block_has_nothing_to_find() -> None:
    trace = references([TraceRequest(0, 100, 1, ())])
    sizes = capacities(trace.all_blocks)
    made = parts(["lru", "fifo"], sizes)
    curve = put_together(trace, sizes, 512, [(part, part.run(trace)) for part in made])
    assert curve.most == 0.0 and set(map(tuple, curve.hit_rates.values())) == {(0.0,)}


def test_random_is_repeatable() -> None:
    trace = trace_of([[at % 7, at % 3] for at in range(50)])
    part = CurvePart("random", (5,), seed=3)
    assert part.run(trace) == part.run(trace)


def chats(count: int, seed: int) -> list[TraceRequest]:
    """Conversations that grow, some of them much longer asked for than others, all behind one of two system prompts."""
    chance = np.random.default_rng(seed)
    said = [[1_000_000 + int(chance.integers(0, 2)), number] for number in range(count // 8)]
    found = []
    for number in range(count):
        conversation = said[min(int(chance.zipf(1.2)), len(said)) - 1]
        conversation += chance.integers(0, 1 << 20, 3).tolist()
        del conversation[40:]
        found.append(TraceRequest(100 * number, 512 * len(conversation), 1, tuple(conversation)))
    return found


@pytest.mark.slow
def test_a_sample_stands_for_the_whole_trace() -> None:
    found = chats(4000, seed=5)
    whole, sample = references(found), references(found, 0.3)
    assert sample.asked == whole.asked == len(whole.nodes)
    assert sample.all_blocks == pytest.approx(whole.blocks, rel=0.05) and len(sample.nodes) < whole.asked / 2
    assert (sample.parent < np.arange(sample.blocks)).all()
    sizes = capacities(whole.blocks, 4)
    for name in ("lru", "fifo", "weighing", OPTIMUM):
        part = CurvePart(name, tuple(sizes))
        for exact, estimate in zip(part.run(whole), part.run(sample), strict=True):
            assert sample.hit_rate(estimate) == pytest.approx(whole.hit_rate(exact), abs=0.05), name


def test_a_curve_of_a_sample_says_so(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = (
        {"timestamp": each.timestamp_ms, "input_length": each.input_length, "output_length": 1, "hash_ids": ids}
        for each in chats(400, seed=1)
        if (ids := list(each.hash_ids))
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told: list[tuple[int, int]] = []
    with processes(1) as pool:
        made = curve_of(
            file, 300, ["lru"], pool, lambda done, total: told.append((done, total)), references_at_most=1000
        )
        whole = curve_of(file, 300, ["lru"], pool)
    assert 0 < made.share < 1 and made.to_plain()["sampled_share"] == made.share
    assert told[-1] == (len(told), len(told)), "every computation is told"
    assert whole.share == 1.0 and whole.most == pytest.approx(made.most, abs=0.1)


def test_processes_that_are_left_by_an_error_end_with_their_pools_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt), processes(2) as pool:
        for _ in range(4):
            pool.submit(time.sleep, 600)
        raise KeyboardInterrupt
    assert set(threading.enumerate()) <= before, "at the interpreter's exit it would close what that writes to"
    assert not active_children()
