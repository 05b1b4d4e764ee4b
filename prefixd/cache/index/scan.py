"""Scans of the trie's columns in slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.steps import Steps
from prefixd.cache.index.keys.key_index import Rows

SCANNED_AT_ONCE = 1 << 15
"""Rows that eviction and write-back scan in one turn of the event loop: 0.1 to 0.3 ms. A table with fewer rows is
scanned in one turn, so it does not change meanwhile."""


def slices(rows: int) -> Iterator[slice]:
    """The rows from 0 to `rows`, `SCANNED_AT_ONCE` at a time."""
    for start in range(0, rows, SCANNED_AT_ONCE):
        yield slice(start, min(start + SCANNED_AT_ONCE, rows))


T = TypeVar("T", bound=np.generic)

_ALIGNMENT = 64


class ColumnCopies:
    """Memory for copies, written beforehand: page faults in new memory make a copy five times slower.

    Args:
        nbytes: for all copies together; a copy that does not fit gets memory of its own.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = np.ones(nbytes, np.uint8)
        self._used = 0

    def copy(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """A contiguous copy of a column."""
        end = self._used + column.nbytes
        if end > len(self._memory):
            return column.copy()
        copied = self._memory[self._used : end].view(column.dtype).reshape(column.shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        np.copyto(copied, column)
        return copied


def memory_for_copies(*columns: npt.NDArray[Any]) -> Steps[ColumnCopies]:
    """Memory for copies of these columns, and of some rows that are added meanwhile; written in a thread."""
    nbytes = sum(column.nbytes + _ALIGNMENT for column in columns)
    copies: ColumnCopies = yield lambda: ColumnCopies(nbytes + nbytes // 8)
    return copies


Scores = npt.NDArray[np.float64]


class LowestRows:
    """Keeps the `keep` rows with the lowest scores of all offered rows, in memory for a few times as many.

    Of rows with equal scores it keeps those with the lowest `tie`, and of these the ones that were offered first.

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
        """Offers m rows, with a score and a tie each."""
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
