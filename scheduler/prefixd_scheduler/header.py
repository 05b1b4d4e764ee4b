"""The header: what all prompts begin with, a system prompt for example."""

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
    """How long the header of the prompts that come is, of what was cached of each when it came.

    Which prompt is nearer to its first token is decided behind the header: every prompt needs that, and the first one
    brings it for all. Counted are the last 32 to 64 prompts. One that does not share the header ends it at once,
    a new one is found after 32 prompts. If nothing was cached behind what all share, that is no header: it is the
    prefix that all ask about.
    """

    def __init__(self) -> None:
        self._last: _Span | None = None  # 32 to 64 prompts
        self._next: _Span | None = None  # the younger of these, fewer than 32

    def add(self, key: Key, cached: int) -> bool:
        """Counts a new prompt, of which `cached` units are cached; returns whether the header is another one now."""
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
        """How much of a prompt is header: all of the header, or nothing if it does not begin with it."""
        length = self._length
        if not length or cached < length or self._last is None or key(length) != self._last.key(length):
            return 0
        return length

    @property
    def _length(self) -> int:
        return 0 if self._last is None or self._last.longest == self._last.shared else self._last.shared
