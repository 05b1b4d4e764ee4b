"""Keys that are kept in order while they come and go."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

from prefixd_scheduler.errors import IntegrityError

# A key is what `bisect` can compare: here always a number or a tuple of numbers.
K = TypeVar("K", int, tuple[float, ...])

_CHUNK = 512


class SortedKeys(Generic[K]):
    """Different keys in ascending order.

    The keys lie in short sorted lists, one after the other, so that a change moves at most `2 * _CHUNK` keys in memory
    and compares O(log n). Example with chunks of 2: `[[1, 3], [4, 7], [9]]`.
    """

    __slots__ = ("_chunks", "_lasts")

    def __init__(self) -> None:
        self._chunks: list[list[K]] = []
        self._lasts: list[K] = []  # the last key of each chunk

    def add(self, key: K) -> None:
        """Puts a key that is not there into its place."""
        if not self._chunks:
            self._chunks.append([key])
            self._lasts.append(key)
            return
        at = min(bisect_left(self._lasts, key), len(self._chunks) - 1)
        chunk = self._chunks[at]
        insort(chunk, key)
        if len(chunk) > 2 * _CHUNK:
            self._chunks[at : at + 1] = [chunk[:_CHUNK], chunk[_CHUNK:]]
            self._lasts.insert(at, chunk[_CHUNK - 1])
            at += 1
        self._lasts[at] = self._chunks[at][-1]

    def remove(self, key: K) -> None:
        """Takes a key out. Raises IntegrityError if it is not there: its owner has changed it meanwhile."""
        at = bisect_left(self._lasts, key)
        chunk = self._chunks[at] if at < len(self._chunks) else []
        place = bisect_left(chunk, key)
        if place == len(chunk) or chunk[place] != key:
            raise IntegrityError(f"the key {key} is not where the order has it; it was changed while it was kept there")
        del chunk[place]
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]

    @property
    def first(self) -> K:
        """The lowest key. Raises IndexError when there is none."""
        return self._chunks[0][0]

    def __iter__(self) -> Iterator[K]:
        """The keys, ascending. Do not add or remove meanwhile."""
        for chunk in self._chunks:
            yield from chunk

    def __len__(self) -> int:
        return sum(map(len, self._chunks))

    def __bool__(self) -> bool:
        return bool(self._chunks)
