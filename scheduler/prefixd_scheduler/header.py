"""The header: the beginning that all prompts share, a system prompt for example."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeAlias

RECENT = 32
"""Prompts before something that they share counts as a header."""

Key: TypeAlias = Callable[[int], Hashable]
"""`key(n)` is equal for prompts whose first n units (blocks, or tokens) are equal; asked for n >= 1."""


@dataclass(slots=True)
class _Span:
    """Prompts that came one after the other."""

    key: Key  # of the first of them
    shared: int
    longest: int
    prompts: int = 1

    def add(self, key: Key, length: int) -> None:
        limit = min(self.shared, length)
        self.shared = bisect_left(range(1, limit + 1), True, key=lambda n: key(n) != self.key(n))
        self.longest = max(self.longest, length)
        self.prompts += 1


class Header:
    """Measures the header of the prompts that come, within the cached prefix of each at its arrival.

    Prompts are compared by the part behind the header: every prompt needs the header, and the first one brings it up
    for all. The last 32 to 64 prompts count. A prompt without the header ends it at once; a new header is found after
    32 prompts. If no prompt had more cached than the shared part, that part is not a header but a common prefix of all.
    """

    def __init__(self) -> None:
        self._last: _Span | None = None  # 32 to 64 prompts
        self._next: _Span | None = None  # the younger of these, fewer than 32

    def add(self, key: Key, cached: int) -> bool:
        """Counts a new prompt, of which `cached` units are cached; returns whether the header has changed."""
        before = self._length
        if self._last is not None:
            self._last.add(key, cached)
        if self._next is None:
            self._next = _Span(key, cached, cached)
        else:
            self._next.add(key, cached)
        if self._next.prompts == RECENT:
            self._last, self._next = self._next, None
        return self._length != before

    def within(self, key: Key, cached: int) -> int:
        """Length of the header in a prompt: 0 if the prompt does not begin with it."""
        length = self._length
        if not length or cached < length or self._last is None or key(length) != self._last.key(length):
            return 0
        return length

    @property
    def _length(self) -> int:
        return 0 if self._last is None or self._last.longest == self._last.shared else self._last.shared
