"""Which blocks go first when a tier is full: a score for each, and leaves before their parents."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from prefixd_swap.errors import UnknownPolicyError

Scores = NDArray[np.float64]
Rows = NDArray[np.int64]


class EvictionPolicy(ABC):
    """Gives every block a score; the lowest goes first."""

    name: str

    @abstractmethod
    def scores(self, last_used: Scores, entered: Scores) -> Scores:
        """Scores [n] of n blocks, from the times of last use and of entry (seconds, one clock)."""


class Lru(EvictionPolicy):
    """Least recently used first."""

    name = "lru"

    def scores(self, last_used: Scores, entered: Scores) -> Scores:
        """The time of last use."""
        return last_used


class Fifo(EvictionPolicy):
    """First in, first out, whatever was used since."""

    name = "fifo"

    def scores(self, last_used: Scores, entered: Scores) -> Scores:
        """The time of entry."""
        return entered


class Random(EvictionPolicy):
    """Any block, each as likely; the yardstick for the others. The seed makes a run repeatable."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def scores(self, last_used: Scores, entered: Scores) -> Scores:
        """Uniform in [0, 1), drawn anew at every call."""
        return self._generator.random(len(last_used))


def create_eviction_policy(name: str, seed: int) -> EvictionPolicy:
    """The policy of that name; `seed` is for the policies that draw.

    Raises:
        UnknownPolicyError: there is none; the message names those there are.
    """
    makers: dict[str, Callable[[], EvictionPolicy]] = {
        Lru.name: Lru,
        Fifo.name: Fifo,
        Random.name: lambda: Random(seed),
    }
    if name not in makers:
        raise UnknownPolicyError(f"no eviction policy is called {name!r}; choose one of {', '.join(makers)}")
    return makers[name]()


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
