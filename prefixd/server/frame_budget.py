"""How many GPU frames the requests have that will not give them up."""

from __future__ import annotations

import numpy as np

from prefixd.cache import Trie
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.trie import Rows


class FrameBudget:
    """Counts frames by their use, so that a dispatch does not look at the blocks of running requests.

    A cached block takes one frame however many requests hold it, so blocks are counted by row. All requests of a worker
    have blocks of one geometry, hence of one trie.

    Attributes:
        taken: frames of the blocks counted, each once, and of the requests' own frames.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._memory = ColumnMemory()  # a table of a million rows grows without copying
        self._holders = np.zeros(0, np.int32)  # by row: how many counted requests hold the block
        self._round = 1
        self._weighed_in = np.zeros(0, np.int64)  # by row: the last round in which the block was weighed

    def add(self, trie: Trie, rows: Rows, own: int = 0) -> None:
        """Counts `rows`, which are distinct, for one more request, and `own` more frames."""
        self._fit(trie)
        self._holders[rows] += 1
        self.taken += int(np.count_nonzero(self._holders[rows] == 1)) + own

    def remove(self, rows: Rows, own: int = 0) -> None:
        """Ends what `add` began."""
        self._holders[rows] -= 1
        self.taken -= int(np.count_nonzero(self._holders[rows] == 0)) + own

    def begin_round(self) -> None:
        """From here on `weigh` has seen no block."""
        self._round += 1

    def weigh(self, trie: Trie, rows: Rows) -> int:
        """How many more frames a request with these blocks takes, besides those taken or weighed in this round."""
        self._fit(trie)
        more = (self._holders[rows] == 0) & (self._weighed_in[rows] != self._round)
        self._weighed_in[rows] = self._round
        return int(np.count_nonzero(more))

    def _fit(self, trie: Trie) -> None:
        if trie.rows > len(self._holders):
            self._holders = self._memory.grown("holders", self._holders, 2 * trie.rows)
            self._weighed_in = self._memory.grown("weighed in", self._weighed_in, 2 * trie.rows)
