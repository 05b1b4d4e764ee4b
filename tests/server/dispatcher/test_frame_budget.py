"""Frames counted as requests come and go are those that sets of rows would give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prefixd.server.frame_budget import FrameBudget

ROWS = st.frozensets(st.integers(0, 30), max_size=8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ROWS, st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 9), st.none()),
        st.tuples(st.just("weigh"), ROWS, st.none()),
        st.tuples(st.just("round"), st.none(), st.none()),
    ),
    max_size=40,
)


def column(rows: frozenset[int]) -> np.ndarray[Any, Any]:
    return np.array(sorted(rows), np.int64)


@given(steps=STEPS)
def test_counts_are_those_of_sets(steps: list[tuple[str, Any, Any]]) -> None:
    budget = FrameBudget()
    trie = cast(Any, SimpleNamespace(rows=1))
    added: list[tuple[frozenset[int], int]] = []
    weighed: set[int] = set()
    for what, rows, own in steps:
        if isinstance(rows, frozenset):
            trie.rows = max(trie.rows, max(rows, default=0) + 1)  # a trie grows, and the budget with it
        if what == "add":
            added.append((rows, own))
            budget.add(trie, column(rows), own)
        elif what == "remove" and added:
            gone, count = added.pop(rows % len(added))
            budget.remove(column(gone), count)
        elif what == "round":
            weighed.clear()
            budget.begin_round()
        elif what == "weigh":
            taken = set().union(*(rows for rows, _ in added))
            assert budget.weigh(trie, column(rows)) == len(rows - taken - weighed)
            weighed |= rows
        assert budget.taken == len(set().union(*(rows for rows, _ in added))) + sum(own for _, own in added)
