"""Least frequently used, with ageing."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from prefixd_swap.eviction.policy import BlockTable, EvictionPolicy, Rows, Scores


class Lfu(EvictionPolicy):
    """Least frequently used first, with dynamic ageing (LFU-DA; Arlitt et al., "Evaluating Content Management
    Techniques for Web Proxy Caches", 1999).

    A block's rank is its number of uses plus the tier's age at its last use; the age is the rank of the last evicted
    block. So newer blocks overtake a block whose many uses were long ago. More than 255 uses count as 255.
    """

    name = "lfu"

    def __init__(self) -> None:
        self._age: defaultdict[int, float] = defaultdict(float)  # by tier

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        table.rank[rows, tier] = self._age[tier] + 1.0 + table.uses[rows]

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        # `uses` does not count this use yet.
        for tier, age in self._age.items():
            here = rows[(table.any_part[rows] & np.uint8(1 << tier)) != 0]
            table.rank[here, tier] = age + 2.0 + table.uses[here]

    def removed(self, table: BlockTable, rows: Rows, tier: int, *, evicted: bool = True) -> None:
        # The median: evicting a page also evicts some blocks of higher rank.
        if evicted and len(rows):
            self._age[tier] = max(self._age[tier], float(np.median(table.rank[rows, tier])))

    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        found: Scores = table.rank[rows, tier]
        return found

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        return float(table.rank[row, tier])
