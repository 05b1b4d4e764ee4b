"""Who has to go: the policy's order, but leaves before their parents, over all tries, and never what is protected."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.cache import CPU, DISK, GPU, Trie
from prefixd.cache.victims import find_victims
from prefixd_swap import create_eviction_policy

POLICIES = ["lru", "fifo", "random"]


class Forest:
    """Two tries with blocks of which each continues an earlier one, as `parents` says (-1: a first block)."""

    def __init__(self, parents: list[int]) -> None:
        self.tries = [Trie(1, (1,), 0), Trie(1, (1,), 1)]
        self.rows: list[tuple[Trie, int]] = []
        for number, parent in enumerate(parents):
            trie = self.rows[parent][0] if parent >= 0 else self.tries[number % 2]
            up = self.rows[parent][1] if parent >= 0 else -1
            row = trie.insert(up, 0, number.to_bytes(16, "little"), number.to_bytes(4, "little"), 0.0)
            assert row is not None
            self.rows.append((trie, row))

    def put(self, number: int, tier: int, entered: float = 0.0) -> None:
        trie, row = self.rows[number]
        trie.put_copy(row, tier, [number], entered)

    def victims(self, tier: int, want: int, policy: str = "lru", *, demotable: bool, spare: bool = False) -> list[int]:
        """Numbers of the victims; within a trie in order."""
        number_of = {(trie.ordinal, row): number for number, (trie, row) in enumerate(self.rows)}
        found = find_victims(
            self.tries, tier, want, create_eviction_policy(policy, 0), demotable=demotable, spare_copies=spare
        )
        return [number_of[trie.ordinal, row] for trie, rows in found for row in rows.tolist()]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    size = draw(st.integers(5, 20))
    forest = Forest([draw(st.integers(max(-1, number - 4), number - 1)) for number in range(size)])
    for number, (trie, row) in enumerate(forest.rows):
        for tier in draw(st.sampled_from([(CPU,), (CPU,), (GPU, CPU), (CPU, DISK), (GPU, CPU, DISK), (DISK,), ()])):
            forest.put(number, tier, draw(st.floats(0, 9)))
        trie.last_used[row] = draw(st.integers(0, 5))
        one = np.array([row])
        protection = draw(st.sampled_from(["none"] * 9 + ["held", "held elsewhere", "kept", "pinned"]))
        if protection == "held":
            trie.hold(one, CPU)
        elif protection == "held elsewhere":
            trie.hold(one, GPU)
        elif protection == "kept":
            trie.retain(one)
        trie.pinned[row] = protection == "pinned"
    return forest


@settings(max_examples=200)
@given(forests(), st.integers(0, 25), st.sampled_from(POLICIES), st.booleans(), st.booleans())
def test_each_victim_may_go_when_its_turn_comes(
    forest: Forest, want: int, policy: str, demotable: bool, spare: bool
) -> None:
    victims = forest.victims(CPU, want, policy, demotable=demotable, spare=spare)
    assert len(set(victims)) == len(victims) <= want
    for number in victims:
        trie, row = forest.rows[number]
        assert row in trie.evictable(CPU, demotable=demotable), "a leaf of its tier, and not protected"
        assert not spare or not trie.any_part[row] & (1 << GPU)
        alone = trie.any_part[row] == 1 << CPU
        trie.drop_copy(row, CPU)
        if alone and demotable:
            trie.put_copy(row, DISK, [0], 0.0)
        elif alone:
            trie.remove(row)
    if len(victims) < want:
        for trie in forest.tries:
            left = trie.evictable(CPU, demotable=demotable)
            assert not len(left[(trie.any_part[left] & (1 << GPU) == 0) | (not spare)]), "nobody who may go was left"


@pytest.mark.parametrize(("policy", "order"), [("lru", [2, 1, 0]), ("fifo", [0, 1, 2])])
def test_the_policy_decides_among_leaves(policy: str, order: list[int]) -> None:
    forest = Forest([-1, -1, -1])
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU, entered=number)
        trie.last_used[row] = 10 - number
    assert [forest.victims(CPU, n, policy, demotable=False) for n in (1, 2, 3)] == [
        sorted(order[:n], key=lambda number: (number % 2, order.index(number))) for n in (1, 2, 3)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_goes_from_its_end(policy: str) -> None:
    forest = Forest([-1, 0, 1, 2])
    for number, (trie, row) in enumerate(forest.rows):
        forest.put(number, CPU, entered=-number)
        trie.last_used[row] = number
    assert forest.victims(CPU, 3, policy, demotable=False) == [3, 2, 1]
    forest.rows[2][0].hold(np.array([forest.rows[2][1]]), CPU)
    assert forest.victims(CPU, 3, policy, demotable=False) == [3]


def test_a_parent_stays_while_its_child_is_elsewhere() -> None:
    forest = Forest([-1, 0, 0])
    for number in range(3):
        forest.put(number, DISK)
    forest.put(1, CPU)
    assert forest.victims(DISK, 3, demotable=False) == [1, 2], "block 1 would be without its prefix"
    forest.put(0, GPU)
    assert forest.victims(DISK, 3, demotable=False) == [1, 2, 0]


def test_a_torn_block_cannot_go_down() -> None:
    trie = Trie(1, (1, 1), 0)
    row = trie.insert(-1, 0, bytes(16), bytes(4), 0.0)
    assert row is not None
    trie.put_copy(row, CPU, [0, -1], 0.0)
    lru = create_eviction_policy("lru", 0)
    assert find_victims([trie], CPU, 1, lru, demotable=True) != []
    trie.pinned[row] = True
    assert find_victims([trie], CPU, 1, lru, demotable=True) == [], "pinned, and no tier below can take half a block"
    trie.put_copy(row, CPU, [-1, 1], 0.0)
    assert find_victims([trie], CPU, 1, lru, demotable=True) != []


def test_a_block_above_others_without_copies_goes_after_what_continues_them() -> None:
    forest = Forest([-1, 0, 1, 2])
    forest.put(0, CPU)
    forest.put(3, CPU)
    assert forest.victims(CPU, 4, demotable=False) == [3, 0]
    forest.put(0, DISK)
    assert sorted(forest.victims(CPU, 4, demotable=False)) == [0, 3], "a leaf of its tier from the start; once"
    forest.put(1, DISK)
    forest.tries[0].drop_copy(forest.rows[0][1], DISK)
    assert forest.victims(CPU, 4, demotable=False) == [3], "a block between them stays"
