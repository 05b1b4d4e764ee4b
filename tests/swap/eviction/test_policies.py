"""Each policy against a model that keeps a dict a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prefixd_swap.errors import UnknownPolicyError
from prefixd_swap.eviction import POLICY_NAMES, EvictionPolicy, Random, S3Fifo, UseHistory, create_eviction_policy
from tests.swap.eviction.blocks import TIERS, Blocks

BLOCKS = 24
MAIN = 1 << 46


def rows_of(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


class PolicyMachine(RuleBasedStateMachine):
    """Blocks 0 to 23, of which each of a chain of six continues the one before it, come to two tiers, are asked for and
    go, leaves first."""

    name = "lru"

    @initialize()
    def begin(self) -> None:
        self.policy: EvictionPolicy = create_eviction_policy(self.name, 7)
        self.history = UseHistory(self.policy, 64 if self.policy.remembers else 0)
        self.table = Blocks(BLOCKS)
        self.table.parent[:] = [-1 if row % 6 == 0 else row - 1 for row in range(BLOCKS)]
        self.table.depth[:] = np.arange(BLOCKS) % 6
        self.now_s = 100.0
        self.used = dict[int, float]()
        self.entered = dict[tuple[int, int], float]()
        self.uses = dict[int, int]()
        self.gone = dict[int, tuple[float, int]]()  # what is remembered
        self.rank = dict[tuple[int, int], float]()
        self.age = [0.0] * TIERS
        self.places = [0] * TIERS
        self.seen: set[int] = set()  # tiers that something came to

    def there(self, tier: int) -> list[int]:
        return [row for row, of in sorted(self.entered) if of == tier]

    @rule(by_s=st.sampled_from([0.5, 3.0, 40.0, 1000.0]))
    def wait(self, by_s: float) -> None:
        self.now_s += by_s

    @rule(row=st.integers(0, BLOCKS - 1), tier=st.integers(0, TIERS - 1))
    def admit(self, row: int, tier: int) -> None:
        parent = int(self.table.parent[row])
        if (row, tier) in self.entered or (parent >= 0 and parent not in self.used):
            return
        fresh = row not in self.used
        if fresh:
            self.table.last_used[row] = self.used[row] = self.now_s
            self.table.uses[row] = self.uses[row] = 0
        self.entered[row, tier] = self.table.entered[row, tier] = self.now_s
        self.table.any_part[row] |= 1 << tier
        self.seen.add(tier)
        if fresh and self.policy.remembers and row in self.gone and (parent < 0 or self.uses[parent]):
            used_s, uses = self.gone.pop(row)
            self.uses[row] = uses + (self.now_s - used_s >= 1.0)
        self.history.admitted(self.table, rows_of(row), tier, self.now_s)
        self.model_admitted(row, tier)

    @rule(end=st.integers(0, BLOCKS - 1))
    def ask(self, end: int) -> None:
        path = [row for row in range(end - end % 6, end + 1) if row in self.used]
        counts = [self.now_s - self.used[row] >= 1.0 for row in path]
        last = max((place for place, count in enumerate(counts) if count), default=-1)
        for row in path[: last + 1]:
            self.model_accessed(row)
            self.uses[row] += 1
        self.history.accessed(self.table, rows_of(*path), self.now_s)
        for row in path:
            self.table.last_used[row] = self.used[row] = self.now_s

    @precondition(lambda self: self.entered)
    @rule(data=st.data(), tier=st.integers(0, TIERS - 1), evicted=st.booleans())
    def remove(self, data: st.DataObject, tier: int, evicted: bool) -> None:
        leaves = [row for row in self.there(tier) if row % 6 == 5 or row + 1 not in self.used]
        if not leaves:
            return
        row = data.draw(st.sampled_from(leaves))
        del self.entered[row, tier]
        self.table.any_part[row] &= ~np.uint8(1 << tier)
        rank = self.rank.pop((row, tier), 0.0)
        if evicted:
            self.age[tier] = max(self.age[tier], rank)
        self.history.removed(self.table, rows_of(row), tier, evicted=evicted)
        if not self.table.any_part[row]:
            self.gone[row] = float(np.float32(self.used.pop(row))), self.uses.pop(row)

    # -- the models ---------------------------------------------------------------------------------------------

    def model_admitted(self, row: int, tier: int) -> None:
        if self.name == "lfu":
            self.rank[row, tier] = self.age[tier] + 1 + self.uses[row]
        elif self.name == "s3-fifo":
            self.rank[row, tier] = (MAIN if self.uses[row] else 0) + self.places[tier]
            self.places[tier] += 1

    def model_accessed(self, row: int) -> None:
        for tier in self.seen:
            if (row, tier) not in self.entered:
                continue
            if self.name == "lfu":
                self.rank[row, tier] = self.age[tier] + 2 + self.uses[row]

    @invariant()
    def uses_are_counted(self) -> None:
        assert {row: int(self.table.uses[row]) for row in self.used} == self.uses
        assert all(self.uses[row] == 0 or self.uses[row - 1] > 0 for row in self.used if row % 6), "parents as well"

    @invariant()
    def queues_are_counted(self) -> None:
        if isinstance(self.policy, S3Fifo):
            for tier in range(TIERS):
                main = [self.uses[row] > 0 for row in self.there(tier)]
                assert (self.policy._small[tier], self.policy._main[tier]) == (main.count(False), main.count(True))

    @invariant()
    def one_score_is_that_of_many(self) -> None:
        for tier in range(TIERS):
            rows = self.there(tier)
            if not rows or self.name == "random":
                continue
            scores = self.policy.scores(self.table, rows_of(*rows), tier)
            assert np.isfinite(scores).all()
            assert [self.policy.score(self.table, row, tier) for row in rows] == pytest.approx(scores.tolist())

    @invariant()
    def scores_are_the_models(self) -> None:
        for tier in range(TIERS):
            rows = self.there(tier)
            scores = self.policy.scores(self.table, rows_of(*rows), tier).tolist()
            match self.name:
                case "lru":
                    assert scores == [self.used[row] for row in rows]
                case "fifo":
                    assert scores == [self.entered[row, tier] for row in rows]
                case "lfu":
                    assert scores == [self.rank[row, tier] for row in rows]
                case "s3-fifo":
                    rank = self.table.rank[rows, tier]
                    main = rank >= MAIN
                    assert main.tolist() == [self.uses[row] > 0 for row in rows], "asked for again: the main queue"
                    young = [row for row, it in zip(rows, main.tolist(), strict=True) if not it]
                    order = [self.rank[row, tier] for row in young]
                    assert np.argsort(rank[~main]).tolist() == np.argsort(order).tolist(), "first in, first out"
                    if len(young) > 0.1 * len(rows):
                        assert max(np.array(scores)[~main], default=0) < min(np.array(scores)[main], default=MAIN)
                    elif len(young):
                        assert max(np.array(scores)[main]) < min(np.array(scores)[~main])
                case "weighing":
                    assert all(score >= 0 for score in scores)


def machine_of(policy: str) -> Any:
    machine = type(f"{policy}_machine", (PolicyMachine,), {"name": policy})
    machine.TestCase.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
    return machine.TestCase


TestLru = machine_of("lru")
TestFifo = machine_of("fifo")
TestRandom = machine_of("random")
TestLfu = machine_of("lfu")
TestS3Fifo = machine_of("s3-fifo")
TestWeighing = machine_of("weighing")


def test_policies_by_name() -> None:
    assert POLICY_NAMES == ("lru", "fifo", "random", "lfu", "s3-fifo", "weighing")
    assert [create_eviction_policy(name, 0).name for name in POLICY_NAMES] == list(POLICY_NAMES)
    with pytest.raises(UnknownPolicyError, match=r"'mru'.*lru, fifo, random, lfu, s3-fifo, weighing"):
        create_eviction_policy("mru", 0)


def test_random_repeats_with_its_seed_and_changes_between_calls() -> None:
    table, rows = Blocks(3), rows_of(0, 1, 2)
    first, again, other = Random(5), Random(5), Random(6)
    draw = first.scores(table, rows, 0)
    assert draw.tolist() == again.scores(table, rows, 0).tolist()
    assert draw.tolist() != first.scores(table, rows, 0).tolist()
    assert draw.tolist() != other.scores(table, rows, 0).tolist()
    assert ((draw >= 0) & (draw < 1)).all()


def test_lfu_forgets_what_was_asked_for_often_long_ago() -> None:
    policy, table = create_eviction_policy("lfu", 0), Blocks(40)
    table.any_part[:] = 1
    policy.admitted(table, rows_of(0), 0, 0.0)
    for uses in range(5):
        policy.accessed(table, rows_of(0), float(uses))
        table.uses[0] += 1
    for row in range(1, 12):  # each comes, is the one that goes, and ages the tier by one
        policy.admitted(table, rows_of(row), 0, 10.0)
        young, old = policy.scores(table, rows_of(row, 0), 0).tolist()
        if young >= old:
            break
        policy.removed(table, rows_of(row), 0)
    assert 4 < row < 8


def test_s3_fifo_takes_a_block_round_once_more_for_each_use_and_three_times_at_most() -> None:
    policy, table = create_eviction_policy("s3-fifo", 0), Blocks(10)
    table.any_part[:] = 1
    table.uses[:] = 1
    policy.admitted(table, np.arange(10), 0, 0.0)
    policy.accessed(table, rows_of(0), 5.0)
    assert policy.scores(table, rows_of(0, 1), 0).tolist() == [11.0 - MAIN, 2.0 - MAIN]
    for _ in range(9):
        policy.accessed(table, rows_of(0), 5.0)
    assert policy.score(table, 0, 0) == 10 + 3 * 10 - MAIN


def test_what_comes_back_joins_one_queue_of_s3_fifo() -> None:
    """It is remembered, asked for at this moment, and not in the small queue that it would move from."""
    policy, table = S3Fifo(), Blocks(4)
    history, chain = UseHistory(policy, 64), rows_of(0, 1, 2, 3)
    table.parent[:] = [-1, 0, 1, 2]
    for now_s in (10.0, 20.0, 30.0):
        table.any_part[:], table.uses[:], table.last_used[:] = 1, 0, now_s
        history.admitted(table, chain, 0, now_s)
        assert policy._small[0] + policy._main[0] == 4
        assert policy._main[0] == (4 if now_s > 10.0 else 0)
        table.any_part[:] = 0
        history.removed(table, chain, 0)
        assert (policy._small[0], policy._main[0]) == (0, 0)


def test_what_is_dropped_for_another_reason_does_not_age_lfu() -> None:
    policy, table = create_eviction_policy("lfu", 0), Blocks(2)
    table.any_part[:], table.uses[:] = 1, [200, 0]
    policy.admitted(table, rows_of(0), 0, 0.0)
    policy.removed(table, rows_of(0), 0, evicted=False)
    policy.admitted(table, rows_of(1), 0, 0.0)
    assert policy.score(table, 1, 0) == 1.0
