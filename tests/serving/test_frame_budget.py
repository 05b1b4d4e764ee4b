"""Frames counted as requests come and go are those that sets of bytes would give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.cache.rules import FullAttention, KvGroup, SlidingWindow
from prefixd.serving.frame_budget import FrameBudget

ONE = (KvGroup(FullAttention(), (0,), 0),)
TWO = (KvGroup(FullAttention(), (0, 2), 0), KvGroup(SlidingWindow(1), (1,), 1))
ROWS = st.dictionaries(st.integers(0, 30), st.integers(0, 3), max_size=8)  # by row, a mask of groups
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), ROWS, st.integers(0, 3)),
        st.tuples(st.just("remove"), st.integers(0, 9), st.none()),
        st.tuples(st.just("weigh"), ROWS, st.none()),
        st.tuples(st.just("round"), st.none(), st.none()),
    ),
    max_size=40,
)
Parts = frozenset[tuple[int, int]]


def parts(rows: dict[int, int], groups: tuple[KvGroup, ...]) -> Parts:
    """(row, part) of all bytes that are counted; with one group a row has all of it."""
    return frozenset(
        (row, part)
        for row, mask in rows.items()
        for group in groups
        if len(groups) == 1 or mask & group.mask
        for part in group.parts
    )


def columns(rows: dict[int, int], groups: tuple[KvGroup, ...]) -> tuple[Any, Any]:
    wanted = None if len(groups) == 1 else np.array([rows[row] for row in sorted(rows)], np.uint8)
    return np.array(sorted(rows), np.int64), wanted


@pytest.mark.parametrize("groups", [ONE, TWO])
@given(steps=STEPS)
def test_counts_are_those_of_sets(groups: tuple[KvGroup, ...], steps: list[tuple[str, Any, Any]]) -> None:
    budget = FrameBudget()
    trie = cast(Any, SimpleNamespace(rows=1, groups=groups, part_bytes=(1, 1, 1)))
    added: list[tuple[dict[int, int], int]] = []
    weighed: Parts = frozenset()
    for what, rows, own in steps:
        if isinstance(rows, dict):
            trie.rows = max(trie.rows, max(rows, default=0) + 1)  # a trie grows, and the budget with it
        taken = frozenset[tuple[int, int]]().union(*(parts(rows, groups) for rows, _ in added))
        if what == "add":
            added.append((rows, own))
            budget.add(trie, *columns(rows, groups), own)
        elif what == "remove" and added:
            gone, count = added.pop(rows % len(added))
            budget.remove(*columns(gone, groups), count)
        elif what == "round":
            weighed = frozenset()
            budget.begin_round()
        elif what == "weigh":
            assert budget.weigh(trie, *columns(rows, groups)) == len(parts(rows, groups) - taken - weighed)
            weighed |= parts(rows, groups)
        taken = frozenset[tuple[int, int]]().union(*(parts(rows, groups) for rows, _ in added))
        assert budget.taken == len(taken) + sum(own for _, own in added)
