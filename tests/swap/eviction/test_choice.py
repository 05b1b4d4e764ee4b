from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd_swap.eviction import choose_victims


def test_a_revealed_parent_competes_at_once() -> None:
    # 0 <- 1 and 2: once 1 is gone its parent 0 is older than 2.
    victims = choose_victims(2, np.array([1, 2]), np.array([1.0, 9.0]), lambda row: (0, 5.0) if row == 1 else None)
    assert victims == [1, 0]


@pytest.mark.parametrize("count", [-1, 0])
def test_nothing_is_asked_for(count: int) -> None:
    assert choose_victims(count, np.array([1]), np.array([1.0]), lambda row: pytest.fail("revealed")) == []


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[float], set[int]]:
    """Parents (-1: none), scores with many ties, and pinned rows that may not go."""
    size = draw(st.integers(1, 30))
    parents = [draw(st.integers(-1, row - 1)) for row in range(size)]
    scores = [float(draw(st.integers(0, 6))) for _ in range(size)]
    pinned = draw(st.sets(st.integers(0, size - 1), max_size=5))
    return parents, scores, pinned


def brute_force(count: int, parents: list[int], scores: list[float], pinned: set[int]) -> list[int]:
    """The definition: again and again, the lowest (score, row) among rows without children that may go."""
    alive, victims = set(range(len(parents))), []
    while len(victims) < count:
        leaves = alive - {parents[row] for row in alive} - pinned
        if not leaves:
            break
        victim = min(leaves, key=lambda row: (scores[row], row))
        alive.remove(victim)
        victims.append(victim)
    return victims


@given(forests(), st.integers(0, 35))
def test_victims_are_those_of_the_definition(forest: tuple[list[int], list[float], set[int]], count: int) -> None:
    parents, scores, pinned = forest
    children = [parents.count(row) for row in range(len(parents))]

    def reveal(row: int) -> tuple[int, float] | None:
        parent = parents[row]
        if parent < 0:
            return None
        children[parent] -= 1
        return (parent, scores[parent]) if not children[parent] and parent not in pinned else None

    leaves = [row for row in range(len(parents)) if not children[row] and row not in pinned]
    # Reversed, because the order in which candidates are given must not matter.
    candidates = np.array(leaves[::-1], dtype=np.int64)
    victims = choose_victims(count, candidates, np.array(scores)[candidates], reveal)
    assert victims == brute_force(count, parents, scores, pinned)
    gone: set[int] = set()
    for row in victims:
        assert all(child in gone for child, parent in enumerate(parents) if parent == row)
        gone.add(row)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 50))
def test_exactly_the_lowest_go(times: list[int], count: int) -> None:
    scores = np.array(times, dtype=np.float64)
    victims = choose_victims(count, np.arange(len(scores)), scores, lambda row: None)
    assert victims == np.lexsort((np.arange(len(scores)), scores))[:count].tolist()
