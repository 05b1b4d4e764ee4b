"""Which of several loads that wait for the same blocks counts them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd.cache import Trie
from prefixd.cache.index.trie import Rows


class LoadClaims:
    """Blocks on their way to one tier, each the load's that began with it first.

    A movement that others join moves its bytes once: if each of eight who wait for one prefix counted its bytes, each
    would learn that loading takes an eighth of what it does.
    """

    def __init__(self) -> None:
        self._claimed: dict[int, npt.NDArray[np.bool_]] = {}  # by trie, of each row; only while there are some
        self._counts: dict[int, int] = {}

    def claim(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which of them nobody else has claimed. They are to be released."""
        claimed = self._claimed.get(trie.ordinal, np.empty(0, np.bool_))
        if (most := int(rows.max(initial=-1)) + 1) > len(claimed):
            grown = np.zeros(max(most, 2 * len(claimed)), np.bool_)
            grown[: len(claimed)] = claimed
            claimed = grown
        fresh = ~claimed[rows]
        if fresh.any():
            claimed[rows] = True
            self._claimed[trie.ordinal] = claimed
            self._counts[trie.ordinal] = self._counts.get(trie.ordinal, 0) + int(np.count_nonzero(fresh))
        return fresh

    def claimed(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which of them somebody has claimed."""
        known = self._claimed.get(trie.ordinal, np.empty(0, np.bool_))
        found = np.zeros(len(rows), np.bool_)
        inside = rows < len(known)
        found[inside] = known[rows[inside]]
        return found

    def release(self, trie: Trie, rows: Rows) -> None:
        """What was claimed has come, or was given up."""
        if not len(rows):
            return
        self._claimed[trie.ordinal][rows] = False
        self._counts[trie.ordinal] -= len(rows)
        if not self._counts[trie.ordinal]:
            del self._claimed[trie.ordinal], self._counts[trie.ordinal]
