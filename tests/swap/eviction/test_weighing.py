"""The weighing policy: what it learns, and what it weighs."""

from __future__ import annotations

import numpy as np
import pytest

from prefixd_swap.eviction import UseHistory, Weighing
from prefixd_swap.eviction.reuse_times import ReuseTimes
from tests.swap.eviction.blocks import Blocks


def test_before_it_has_learned_it_is_lru() -> None:
    policy, table = Weighing(), Blocks(5)
    table.last_used[:] = [5, 1, 4, 2, 3]
    policy.admitted(table, np.arange(5), 0, 6.0)
    assert np.argsort(policy.scores(table, np.arange(5), 0)).tolist() == [1, 3, 4, 2, 0]


def test_what_is_asked_for_after_a_minute_is_worth_most_just_before_it() -> None:
    reuse = ReuseTimes(1)
    for _ in range(40):
        reuse.began(np.zeros(100, np.int64))
        reuse.ended(np.zeros(50, np.int64), np.full(50, 60.0))
    values = reuse.values(np.zeros(4, np.int64), np.array([0.0, 30.0, 55.0, 600.0])).tolist()
    assert values[3] < values[0] < values[1] < values[2]
    assert values[0] == pytest.approx(50 / (100 * 60 - 50 * 0), rel=0.2), "half of them, after a minute"


def test_what_was_used_more_often_is_worth_more_once_that_is_learned() -> None:
    reuse = ReuseTimes(2)
    for _ in range(40):
        reuse.began(np.repeat([0, 1], 50))
        reuse.ended(np.repeat([0, 1], [5, 45]), np.full(50, 20.0))
    once, often = reuse.values(np.array([0, 1]), np.array([10.0, 10.0])).tolist()
    assert often > 4 * once


def test_values_of_one_and_of_many_are_alike_at_every_idle_time() -> None:
    reuse = ReuseTimes(3)
    times = np.concatenate([[-1.0, 0.0, 1e-9], np.geomspace(1e-3, 1e12, 200)])
    reuse.began(np.arange(300) % 3)
    reuse.ended(np.arange(300) % 3, np.geomspace(1, 1e9, 300))
    for block_class in range(3):
        many = reuse.values(np.full(len(times), block_class), times)
        assert np.isfinite(many).all() and (many >= 0).all()
        assert [reuse.value(block_class, float(time)) for time in times] == pytest.approx(many.tolist())


def test_in_the_last_tier_deeper_blocks_and_those_of_slower_models_weigh_more() -> None:
    policy, table, slow = Weighing(), Blocks(4), Blocks(4, ordinal=1)
    policy.last_tier = 1
    for blocks in (table, slow):
        blocks.depth[:] = [0, 10, 100, 1000]
        policy.admitted(blocks, np.arange(4), 1, 1.0)
    policy.observe_compute_time(table, lambda tokens: 0.5 + 1e-4 * tokens + 1e-9 * tokens**2)
    policy.observe_compute_time(slow, lambda tokens: 0.5 + 1e-3 * tokens + 1e-8 * tokens**2)
    scores = policy.scores(table, np.arange(4), 1)
    assert (np.diff(scores) > 0).all()
    assert scores[1:] / scores[0] == pytest.approx([1 + 2e-9 * 16 * d / 1e-4 for d in (10, 100, 1000)], rel=1e-2)
    assert policy.scores(slow, np.arange(4), 1) == pytest.approx(10 * scores, rel=1e-6)
    above = policy.scores(table, np.arange(4), 0)
    assert (above == above[0]).all(), "a load from the next tier takes as long for each"
    assert [policy.score(table, row, 1) for row in range(4)] == pytest.approx(scores.tolist())


def test_large_blocks_weigh_less_than_small_ones_that_save_as_much() -> None:
    policy, small, large = Weighing(), Blocks(1), Blocks(1, block_bytes=4 << 20, ordinal=1)
    for blocks in (small, large):
        policy.admitted(blocks, np.arange(1), 0, 1.0)
    assert policy.score(small, 0, 0) == pytest.approx(4 * policy.score(large, 0, 0))


def test_a_block_of_half_the_bytes_weighs_twice_as_much_in_the_last_tier_and_as_much_above_it() -> None:
    policy, table = Weighing(), Blocks(2)
    policy.last_tier = 1
    table.compressed[:] = [1.0, 2.0]
    policy.admitted(table, np.arange(2), 1, 1.0)
    exact, coded = policy.scores(table, np.arange(2), 1).tolist()
    assert coded == 2 * exact == pytest.approx(policy.score(table, 1, 1))
    above = policy.scores(table, np.arange(2), 0).tolist()
    assert above == [policy.score(table, row, 0) for row in range(2)] and above[0] == above[1]


def test_what_has_left_is_remembered_and_what_remembers_it_does_not_grow() -> None:
    policy, table = Weighing(), Blocks(5000)
    history = UseHistory(policy, 1024)
    before = history.nbytes
    for start in range(0, 5000, 500):
        rows = np.arange(start, start + 500)
        table.any_part[rows], table.last_used[rows], table.uses[rows] = 1, start, 3
        history.admitted(table, rows, 0, float(start))
        table.any_part[rows] = 0
        history.removed(table, rows, 0)
    table.uses[:] = 0
    table.last_used[:], table.any_part[:] = 9000.0, 1
    history.admitted(table, np.arange(5000), 0, 9000.0)
    assert (table.uses[4500:] == 4).sum() > 300, "the last ones, and the use that brought them back"
    assert 600 < np.count_nonzero(table.uses) <= 1024
    assert set(np.unique(table.uses).tolist()) == {0, 4}
    assert (table.last_used == 9000.0).all()
    assert history.nbytes == before == 9 * 1024
