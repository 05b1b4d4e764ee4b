"""What a request has of the GPU tier."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from prefixd.cache import GPU, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.server.frame_budget import FrameBudget


class Footprint:
    """The cached blocks that a request holds in the GPU tier, and the frames that only it has.

    ```
    block      0    1    2  |  3    4  |  5    6
    rows     [ 17   18   40 |  52   53 ]               held: found when the request was staged | recorded by its run
    own                                [ 902  903 ]    in flight: in no trie yet
    ```

    The hold is taken here, when the request is staged, and ended by `end`, whatever happened in between. The frames
    count in the budget unless the request can be made to give them up (`yield_frames`).

    Args:
        cache: where the blocks are.
        budget: counts the frames.
        trie: of the blocks.
        rows: blocks from the prompt's first on; they are in the GPU tier or will be brought there.
    """

    def __init__(self, cache: TieredCache, budget: FrameBudget, trie: Trie, rows: Rows) -> None:
        self._cache = cache
        self._budget = budget
        self._trie = trie
        self._counted = True
        self.rows = rows
        self.own: set[int] = set()
        trie.hold(rows, GPU)
        budget.add(trie, rows)

    def yield_frames(self) -> None:
        """The request can give its frames up from now on."""
        self._budget.remove(self.rows)
        self._counted = False

    def claim_frames(self, own: Iterable[int]) -> None:
        """The request keeps its frames from now on, and gets these, in flight, for itself."""
        self.own.update(own)
        self._budget.add(self._trie, self.rows, len(self.own))
        self._counted = True

    def extend(self, own: list[int]) -> None:
        """Adds frames in flight to those of a request that keeps its frames."""
        self.own.update(own)
        self._budget.taken += len(own)

    def record(self, rows: list[int], given: Iterable[int]) -> None:
        """Adds blocks that `TieredCache.record` has held for the request; the trie has the `given` frames now."""
        before = len(self.own)
        self.own.difference_update(given)
        new = np.array(rows, np.int64)
        self._budget.add(self._trie, new, len(self.own) - before)
        self.rows = np.concatenate((self.rows, new))

    def shorten(self, blocks: int) -> None:
        """Ends the hold on all but the first `blocks` blocks."""
        rest = self.rows[blocks:]
        self.rows = self.rows[:blocks]
        if self._counted:
            self._budget.remove(rest)
        self._cache.unhold(self._trie, rest, GPU)

    def end(self) -> None:
        """Ends the hold and frees the own frames."""
        if self._counted:
            self._budget.remove(self.rows, len(self.own))
        self._cache.tiers.release(GPU, self.own)
        self._cache.unhold(self._trie, self.rows, GPU)
