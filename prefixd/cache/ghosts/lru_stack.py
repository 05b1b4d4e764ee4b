"""LRU at every size at once, by stack distances (Mattson et al., "Evaluation techniques for storage hierarchies",
1970).

A block is found in every LRU cache that has room for it and for all blocks that were used after it.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


class LruStack:
    """Blocks in the order of their last use.

    Args:
        blocks: blocks have numbers below this one.
    """

    def __init__(self, blocks: int) -> None:
        self._used = np.zeros(blocks, np.int64)  # a time that counts up; 0: not in the stack
        self._nbytes = np.zeros(blocks)
        self._now = 0
        self.total_bytes = 0.0
        """Bytes of all blocks."""

    def distances(self, path: Numbers) -> npt.NDArray[np.float64]:
        """For the first blocks of a prompt, those that are in the stack: bytes of the block and all used after it."""
        before = self._used[path]
        known = int(np.count_nonzero(before)) if before.all() else int((before == 0).argmax())
        found = np.empty(known)
        if not known:
            return found
        used, nbytes = before[:known], self._nbytes[path[:known]]
        # Blocks that one prompt used side by side are searched once.
        starts = [0, *(np.flatnonzero(np.diff(used) != -1) + 1).tolist(), known]
        for start, end in pairwise(starts):
            later = float(self._nbytes[self._used > used[start]].sum())
            found[start:end] = later + np.cumsum(nbytes[start:end])
        return found

    def use(self, path: Numbers, nbytes: float) -> None:
        """A prompt uses its blocks, the first one last, so that a prompt's last block is the least recent."""
        self.total_bytes += nbytes * len(path) - float(self._nbytes[path].sum())
        self._nbytes[path] = nbytes
        self._used[path] = self._now + np.arange(len(path), 0, -1)
        self._now += len(path)

    def remove(self, path: Numbers) -> None:
        """Removes blocks."""
        self.total_bytes -= float(self._nbytes[path].sum())
        self._nbytes[path] = 0
        self._used[path] = 0

    def behind(self, nbytes: float) -> Numbers:
        """The blocks that no cache of `nbytes` has."""
        present = np.flatnonzero(self._used)
        order = present[np.argsort(-self._used[present])]
        return order[np.cumsum(self._nbytes[order]) > nbytes]
