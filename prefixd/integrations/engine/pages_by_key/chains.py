"""Turns keys of pages into prompts of prefixd.

The engine names a page by a hash over (the key of the page before it, the page's tokens), so a key names the whole
prefix. prefixd compares the token ids of its blocks. So the 32 bytes of a key, its digest, serve as the 8 token ids of
the page's block, and a prompt is the digests of its pages one after the other:

    digests     d0         d1         d2          32 bytes each
    path        8 tokens   8 tokens   8 tokens    as little-endian uint32: the digests themselves
"""

from __future__ import annotations

import threading

KEY_BYTES = 32
BLOCK_TOKENS = KEY_BYTES // 4
_LINKS = 1 << 16
_STARTS = 1 << 12


class Chain:
    """The pages of a prompt from its start: `before` pages that precede the call's, then the call's own."""

    __slots__ = ("before", "path")

    def __init__(self, path: bytes, before: int) -> None:
        self.path = path
        self.before = before

    def __len__(self) -> int:
        return len(self.path) // KEY_BYTES

    def page(self, index: int) -> bytes:
        """The digest of a page, counted from the prompt's start."""
        return self.path[index * KEY_BYTES : (index + 1) * KEY_BYTES]

    def part(self, start: int, stop: int | None = None) -> bytes:
        """The path of pages `start` to `stop` (None: the last)."""
        return self.path[start * KEY_BYTES : None if stop is None else stop * KEY_BYTES]


class Chains:
    """Finds the pages before a call's pages: the engine names them, or they were learned from earlier calls.

    A key has one parent, so a learned link stays true. A wrong link costs hits and nothing else: the daemon compares
    the digests of all pages of a path.
    """

    def __init__(self, links: int = _LINKS) -> None:
        self._limit = links
        self._lock = threading.Lock()
        self._parents: dict[bytes, bytes] = {}

    def chain(self, digests: bytes, before: bytes = b"") -> Chain:
        """The chain of a call's pages.

        Args:
            digests: of the call's pages, one after the other.
            before: digests of the pages that precede them; empty if the engine does not name these.
        """
        with self._lock:
            before = before or self._ancestors(digests[:KEY_BYTES])
            chain = Chain(before + digests, len(before) // KEY_BYTES)
            self._learn(chain)
        return chain

    def _ancestors(self, digest: bytes) -> bytes:
        """The known part of the path before a page."""
        above: list[bytes] = []
        while (parent := self._parents.get(digest)) is not None:
            if len(above) >= self._limit:
                return b""  # a circle: the engine named keys out of order
            above.append(parent)
            digest = parent
        return b"".join(reversed(above))

    def _learn(self, chain: Chain) -> None:
        """Learns links from the last page backwards, until a link is known already."""
        for index in range(len(chain) - 1, 0, -1):
            page, parent = chain.page(index), chain.page(index - 1)
            if self._parents.get(page) == parent and index <= chain.before:
                break
            self._parents.pop(page, None)
            self._parents[page] = parent
        while len(self._parents) > self._limit:
            del self._parents[next(iter(self._parents))]


class Starts:
    """Pages at which a stored path begins although others precede them in their prompt.

    An engine hands over a page once. If the daemon has lost the pages before it (it was restarted, one was damaged on
    disk), it could not store anything behind them while the engine holds them. So the page begins a path of its own:
    its key names the whole prefix, so it is right at any position. A look-up has to know where the path begins; after a
    restart the engine computes, and stores, pages from the first one on.
    """

    def __init__(self, limit: int = _STARTS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pages: dict[bytes, None] = {}

    def add(self, page: bytes) -> None:
        """Notes that a path begins with `page`."""
        with self._lock:
            self._pages.pop(page, None)
            self._pages[page] = None
            if len(self._pages) > self._limit:
                del self._pages[next(iter(self._pages))]

    def drop(self, page: bytes) -> None:
        """Forgets that a path began with `page`."""
        with self._lock:
            self._pages.pop(page, None)

    def __contains__(self, page: bytes) -> bool:
        return page in self._pages

    def of(self, chain: Chain, page: int) -> list[int]:
        """Starts of the paths that may have page `page` of `chain`, the nearest first; 0, the prompt's start, last."""
        found = [index for index in range(page, 0, -1) if chain.page(index) in self._pages] if self._pages else []
        return [*found, 0]
