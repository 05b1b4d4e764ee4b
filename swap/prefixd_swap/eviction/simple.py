"""Policies that need no more than the times of entry and of last use."""

from __future__ import annotations

import numpy as np

from prefixd_swap.eviction.policy import BlockTable, EvictionPolicy, Rows, Scores


class Lru(EvictionPolicy):
    """Least recently used first."""

    name = "lru"

    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        found: Scores = table.last_used[rows]
        return found

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        return float(table.last_used[row])


class Fifo(EvictionPolicy):
    """First in, first out, however often a block was used."""

    name = "fifo"

    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        found: Scores = table.entered[rows, tier]
        return found

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        return float(table.entered[row, tier])


class Random(EvictionPolicy):
    """A random block; the baseline for the other policies. The seed makes a run repeatable."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        """Uniform in [0, 1), drawn anew at every call."""
        return self._generator.random(len(rows))
