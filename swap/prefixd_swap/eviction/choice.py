"""Chooses victims among scored blocks: the lowest scores first, leaves before their parents."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from prefixd_swap.eviction.policy import Rows, Scores


def choose_victims(
    count: int,
    candidates: Rows,
    scores: Scores,
    reveal: Callable[[int], tuple[int, float] | None],
    rank: Callable[[int], int] | None = None,
    allow: Callable[[int], bool] | None = None,
) -> list[int]:
    """The rows of up to `count` blocks to evict, in the order of eviction: leaves before parents.

    Only a block without children can be evicted, so each choice is the lowest score among the leaves of that moment;
    equal scores are ordered by row. Evicting a leaf may make its parent a leaf.

    Args:
        count: the most blocks to choose.
        candidates: rows of the leaves that may be evicted, int64 [n].
        scores: their scores, float64 [n], aligned with `candidates`.
        reveal: called once with each chosen row, in order; returns its parent's (row, score) if that was the parent's
            last child and the parent may be evicted too, else None.
        rank: rank of a row; a lower rank is evicted first, whatever the scores are. All ranks are equal by default.
        allow: called with each row in the order of eviction; a refused block stays, and so do its ancestors.
    """
    if count <= 0:
        return []
    if rank is None and allow is None:
        candidates, scores = _lowest(count, candidates, scores)
    ranks = [0] * len(candidates) if rank is None else map(rank, candidates.tolist())
    heap = list(zip(ranks, scores.tolist(), candidates.tolist(), strict=True))
    heapq.heapify(heap)
    victims: list[int] = []
    while heap and len(victims) < count:
        _, _, row = heapq.heappop(heap)
        if allow is not None and not allow(row):
            continue
        victims.append(row)
        parent = reveal(row)
        if parent is not None:
            parent_row, parent_score = parent
            heapq.heappush(heap, (0 if rank is None else rank(parent_row), parent_score, parent_row))
    return victims


def _lowest(count: int, rows: Rows, scores: Scores) -> tuple[Rows, Scores]:
    """The rows with the `count` lowest scores; ties at the border are ordered by row, so that the choice is repeatable.

    The other rows cannot be chosen: `count` rows with lower scores come before them, whatever `reveal` adds.
    """
    if len(rows) > count:
        border = np.partition(scores, count - 1)[count - 1]
        below = np.flatnonzero(scores < border)
        tied = np.flatnonzero(scores == border)
        tied = tied[np.argsort(rows[tied], kind="stable")][: count - len(below)]
        picked = np.concatenate([below, tied])
        rows, scores = rows[picked], scores[picked]
    return rows, scores
