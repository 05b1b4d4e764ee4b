"""The victims among scored blocks: the lowest scores first, leaves before their parents."""

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
) -> list[int]:
    """The rows of up to `count` blocks to evict, in the order in which they must go: leaves before parents.

    Only blocks without children can go, so each choice is the lowest score among the leaves of that moment;
    equal scores go by row. Taking a leaf may make its parent one.

    Args:
        count: how many to choose.
        candidates: rows of the leaves that may go, int64 [n].
        scores: their scores, float64 [n], aligned with `candidates`.
        reveal: called once with each chosen row, in order; gives its parent's (row, score) if that was the
            parent's last child and the parent may go too, else None.
    """
    if count <= 0:
        return []
    heap = _lowest(count, candidates, scores)
    heapq.heapify(heap)
    victims: list[int] = []
    while heap and len(victims) < count:
        _, row = heapq.heappop(heap)
        victims.append(row)
        parent = reveal(row)
        if parent is not None:
            parent_row, parent_score = parent
            heapq.heappush(heap, (parent_score, parent_row))
    return victims


def _lowest(count: int, rows: Rows, scores: Scores) -> list[tuple[float, int]]:
    """(score, row) of the `count` lowest; ties at the border go by row, so that the choice is repeatable.

    The others cannot be chosen: `count` lower ones go before them, whatever is revealed.
    """
    if len(rows) > count:
        border = np.partition(scores, count - 1)[count - 1]
        below = np.flatnonzero(scores < border)
        tied = np.flatnonzero(scores == border)
        tied = tied[np.argsort(rows[tied], kind="stable")][: count - len(below)]
        picked = np.concatenate([below, tied])
        rows, scores = rows[picked], scores[picked]
    return list(zip(scores.tolist(), rows.tolist(), strict=True))
