"""Least frequently used, with ageing."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from prefixd_swap.eviction.policy import BlockTable, EvictionPolicy, Rows, Scores


class Lfu(EvictionPolicy):
    """Least frequently used first, with dynamic ageing (LFU-DA; Arlitt et al., "Evaluating Content Management
    Techniques for Web Proxy Caches", 1999).

    A block's rank is how often it was asked for, above the rank of what was evicted last when it was asked for last.
    So what was asked for often, long ago, is overtaken. What is asked for more often than 255 times counts as 255.
    """

    name = "lfu"

    def __init__(self) -> None:
        self._age: defaultdict[int, float] = defaultdict(float)  # by tier

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """They rank as what has been asked for `uses` times."""
        table.rank[rows, tier] = self._age[tier] + 1.0 + table.uses[rows]

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        """They rank one higher than by their `uses` so far, above the present age."""
        for tier, age in self._age.items():
            here = rows[(table.any_part[rows] & np.uint8(1 << tier)) != 0]
            table.rank[here, tier] = age + 2.0 + table.uses[here]

    def removed(self, table: BlockTable, rows: Rows, tier: int, *, evicted: bool = True) -> None:
        """The tier's age is what was evicted, of several the middle one: a page takes some that are worth more."""
        if evicted and len(rows):
            self._age[tier] = max(self._age[tier], float(np.median(table.rank[rows, tier])))

    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        """Their ranks."""
        found: Scores = table.rank[rows, tier]
        return found

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        """Its rank."""
        return float(table.rank[row, tier])
