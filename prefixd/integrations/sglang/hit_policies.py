"""Computes the lengths at which a prefix can be used, where several pools need their pages of it.

Beside the KV, a pool needs either its pages of the whole prefix (a draft model's KV, an indexer) or the ones at its end
(a window, a state). With KV of 6 pages, a window of 2 and a state:

    page                0 1 2 3 4 5
    kv                  x x x x x x     usable up to 1 2 3 4 5 6
    window of 2         x x . x x x                1 2     5 6
    state               . x . . x .                  2     5
    all                                              2     5      the longest is 5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TrailingPool:
    """A pool that has pages at the ends of prefixes.

    Args:
        pages: how many of the last pages of a prefix are needed.
        there: (pages) -> for each whether it is cached; called once for each page.
    """

    def __init__(self, pages: int, there: Callable[[Sequence[int]], Sequence[bool]]) -> None:
        self.pages = max(1, pages)
        self._there = there
        self._known: dict[int, bool] = {}

    def allows(self, length: int) -> bool:
        """Whether a prefix of `length` pages can be used."""
        needed = range(max(0, length - self.pages), length)
        if not self._has([length - 1]):  # most lengths fail here, after one look-up
            return False
        return self._has(needed)

    def look_up(self, pages: Sequence[int]) -> None:
        """Looks up pages that will be needed, all at once."""
        self._has(pages)

    def _has(self, pages: Sequence[int]) -> bool:
        unknown = [page for page in pages if page not in self._known]
        if unknown:
            self._known.update(zip(unknown, self._there(unknown), strict=True))
        return all(self._known[page] for page in pages)


def usable_lengths(most: int, pools: Sequence[TrailingPool], *, every: bool, step: int = 32) -> list[int]:
    """Lengths up to `most` that all pools allow, in rising order; the longest alone without `every`.

    Ranks with pages of their own have to agree on a length, so they need every one.
    """
    found: list[int] = []
    for length in range(most, 0, -1):
        if (most - length) % step == 0:  # the last pages of the next lengths, at once
            for pool in pools:
                pool.look_up(range(max(0, length - step), length))
        if all(pool.allows(length) for pool in pools):
            found.append(length)
            if not every:
                break
    return sorted(found)
