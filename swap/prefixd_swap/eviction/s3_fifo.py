"""S3-FIFO: three queues, first in first out (Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23).

```
new ──> small queue, a tenth ──────────────> out, and remembered (ghost queue: `UseHistory`)
             │ used again                           │ comes back
             v                                      v
        main queue ──> out;  each use, at most 3, gives a block one more round
```

Leaves are evicted first, so a queue is not popped but scored: a block's rank is its place in its queue, from 1 on; 0
means that it is in no queue.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prefixd_swap.eviction.policy import BlockTable, EvictionPolicy, Rows, Scores

_MAIN = float(1 << 46)  # ranks in the main queue lie above it, those in the small one below
_SMALL_SHARE = 0.1
_MOST_ROUNDS = 3


class S3Fifo(EvictionPolicy):
    """Evicts first the block that entered first and was not used again.

    Three differences to the paper. A block moves to the main queue when it is used again, not when it reaches the end
    of the small queue. A further round moves its place back by the length of the queue at once, at the use, so that
    eviction moves nothing. And a block that comes back enters the main queue for as long as `UseHistory` remembers it.
    """

    name = "s3-fifo"
    remembers = True

    def __init__(self) -> None:
        self._places: Counter[int] = Counter()  # given out, by tier; both queues count together
        self._small: Counter[int] = Counter()  # blocks in the small queue, by tier
        self._main: Counter[int] = Counter()

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        again = table.uses[rows] > 0
        self._join(table, rows[~again], tier, self._small, 0.0)
        self._join(table, rows[again], tier, self._main, _MAIN)

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        for tier in list(self._places):
            here = rows[(table.any_part[rows] & np.uint8(1 << tier)) != 0]
            here = here[table.rank[here, tier] > 0]  # a block that comes back now joins a queue in `admitted`
            rank = table.rank[here, tier]
            moving, old = here[rank < _MAIN], here[rank >= _MAIN]
            self._small[tier] -= len(moving)
            self._join(table, moving, tier, self._main, _MAIN)
            round_trip = float(self._main[tier])
            most = _MAIN + self._places[tier] + _MOST_ROUNDS * round_trip
            table.rank[old, tier] = np.minimum(table.rank[old, tier] + round_trip, most)

    def removed(self, table: BlockTable, rows: Rows, tier: int, *, evicted: bool = True) -> None:
        small = int(np.count_nonzero(table.rank[rows, tier] < _MAIN))
        table.rank[rows, tier] = 0
        self._small[tier] -= small
        self._main[tier] -= len(rows) - small

    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        """Their places; blocks of the queue to evict from come before the other queue's."""
        rank: Scores = table.rank[rows, tier]
        return rank if self._small_is_long(tier) else np.where(rank >= _MAIN, rank - 2 * _MAIN, rank)

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        rank = float(table.rank[row, tier])
        return rank if rank < _MAIN or self._small_is_long(tier) else rank - 2 * _MAIN

    def _small_is_long(self, tier: int) -> bool:
        small, main = self._small[tier], self._main[tier]
        return small > _SMALL_SHARE * (small + main)

    def _join(self, table: BlockTable, rows: Rows, tier: int, queue: Counter[int], above: float) -> None:
        table.rank[rows, tier] = above + self._places[tier] + 1 + np.arange(len(rows))
        self._places[tier] += len(rows)
        queue[tier] += len(rows)
