"""Scans of the trie's columns in slices."""

from __future__ import annotations

from collections.abc import Iterator

SCANNED_AT_ONCE = 1 << 15
"""Rows that eviction and write-back look at in one turn of the event loop: 0.1 to 0.3 ms. A table with fewer rows is
scanned in one turn, so that nothing changes meanwhile."""


def slices(rows: int) -> Iterator[slice]:
    """The rows from 0 to `rows`, `SCANNED_AT_ONCE` at a time."""
    for start in range(0, rows, SCANNED_AT_ONCE):
        yield slice(start, min(start + SCANNED_AT_ONCE, rows))
