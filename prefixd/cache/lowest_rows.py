"""The rows with the lowest scores of a table that is read a slice at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.key_index import Rows
from prefixd.cache.scan import SCANNED_AT_ONCE

Scores = npt.NDArray[np.float64]


class LowestRows:
    """Keeps the `keep` rows with the lowest scores of all that are offered, in memory for a few times as many.

    Of rows with equal scores those with the lowest `tie` are kept, and of these the ones that were offered first.

    Args:
        keep: how many rows; not negative.
    """

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._count = 0
        self._rows: list[Rows] = [np.empty(0, np.int64)]
        self._scores: list[Scores] = [np.empty(0, np.float64)]
        self._ties: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]

    def offer(self, rows: Rows, scores: Scores, ties: npt.NDArray[np.integer]) -> None:
        """Takes in m rows, with one score and one tie each."""
        self._rows.append(rows)
        self._scores.append(scores)
        self._ties.append(ties.astype(np.int64))
        self._count += len(rows)
        if self._count > 2 * self._keep + SCANNED_AT_ONCE:
            self._reduce()

    def ascending(self) -> Rows:
        """The rows, by score and tie."""
        self._reduce()
        order = np.lexsort((self._ties[0], self._scores[0]))
        return self._rows[0][order]

    def _reduce(self) -> None:
        rows, scores, ties = np.concatenate(self._rows), np.concatenate(self._scores), np.concatenate(self._ties)
        if not self._keep:
            rows, scores, ties = rows[:0], scores[:0], ties[:0]
        elif len(rows) > self._keep:
            border = np.partition(scores, self._keep - 1)[self._keep - 1]
            below, tied = np.flatnonzero(scores < border), np.flatnonzero(scores == border)
            tied = tied[np.argsort(ties[tied], kind="stable")][: self._keep - len(below)]
            kept = np.sort(np.concatenate([below, tied]))  # in the order in which they were offered
            rows, scores, ties = rows[kept], scores[kept], ties[kept]
        self._rows, self._scores, self._ties, self._count = [rows], [scores], [ties], len(rows)
