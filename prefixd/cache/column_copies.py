"""Copies of columns, taken in one callback of the event loop while others may change the columns right after it."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from prefixd.steps import Steps

T = TypeVar("T", bound=np.generic)

_ALIGNMENT = 64


class ColumnCopies:
    """Memory for copies, touched beforehand: new memory makes a copy five times slower, page by page.

    Args:
        nbytes: what the copies take together; one that does not fit gets memory of its own.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = np.ones(nbytes, np.uint8)
        self._used = 0

    def copy(self, column: npt.NDArray[T]) -> npt.NDArray[T]:
        """A copy of a column, of which each row lies behind the one before."""
        end = self._used + column.nbytes
        if end > len(self._memory):
            return column.copy()
        copied = self._memory[self._used : end].view(column.dtype).reshape(column.shape)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        np.copyto(copied, column)
        return copied


def memory_for_copies(*columns: npt.NDArray[Any]) -> Steps[ColumnCopies]:
    """Memory for copies of these columns, and of some rows that they may get meanwhile; made in a thread."""
    nbytes = sum(column.nbytes + _ALIGNMENT for column in columns)
    copies: ColumnCopies = yield lambda: ColumnCopies(nbytes + nbytes // 8)
    return copies
