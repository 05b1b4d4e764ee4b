"""Runs of consecutive numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt


def consecutive_runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers as runs of consecutive ones: `[3, 4, 7]` -> `range(3, 5), range(7, 8)`."""
    start = 0
    for stop in range(1, len(numbers) + 1):
        if stop == len(numbers) or numbers[stop] != numbers[stop - 1] + 1:
            yield range(numbers[start], numbers[stop - 1] + 1)
            start = stop


def true_runs(mask: npt.NDArray[np.bool_]) -> list[range]:
    """The runs of True in a mask: `[True, True, False, True]` -> `[range(0, 2), range(3, 4)]`."""
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [range(start, stop) for start, stop in edges.tolist()]
