"""Keys of pages as prompts of prefixd.

The engine names a page by a hash over (the key of the page before it, the page's tokens), so a key names the whole
prefix. prefixd's blocks have token ids, which it compares. So the 32 bytes of a key, its digest, are the 8 token ids of
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
    """The pages of a prompt from its start: `before` pages that lead up to a call's, then the call's own."""

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
    """Where in their prompts pages lie: by what the engine says, or else by what it has said before.

    A key has one parent, so a link that was learned once stays true. What is wrong here costs hits and no more: the
    daemon compares the digests of all pages of a path.
    """

    def __init__(self, links: int = _LINKS) -> None:
        self._limit = links
        self._lock = threading.Lock()
        self._parents: dict[bytes, bytes] = {}

    def chain(self, digests: bytes, before: bytes = b"") -> Chain:
        """The chain of a call's pages.

        Args:
            digests: the pages' own, one after the other.
            before: those of the pages that lead up to them; none where the engine does not say which these are.
        """
        with self._lock:
            before = before or self._ancestors(digests[:KEY_BYTES])
            chain = Chain(before + digests, len(before) // KEY_BYTES)
            self._learn(chain)
        return chain

    def _ancestors(self, digest: bytes) -> bytes:
        """The path that leads up to a page, as far as it is known."""
        above: list[bytes] = []
        while (parent := self._parents.get(digest)) is not None:
            if len(above) >= self._limit:
                return b""  # a circle: somebody gave keys in no order
            above.append(parent)
            digest = parent
        return b"".join(reversed(above))

    def _learn(self, chain: Chain) -> None:
        """From the last page back to the first whose link is known."""
        for index in range(len(chain) - 1, 0, -1):
            page, parent = chain.page(index), chain.page(index - 1)
            if self._parents.get(page) == parent and index <= chain.before:
                break
            self._parents.pop(page, None)
            self._parents[page] = parent
        while len(self._parents) > self._limit:
            del self._parents[next(iter(self._parents))]


class Starts:
    """Pages at which a stored path begins though others precede them in their prompt.

    An engine hands over a page once. When the daemon has lost the pages before it (it was restarted, one was damaged on
    disk), nothing could ever be stored behind them while the engine holds them itself. So the page begins a path of its
    own: its key names the whole prefix, so it is right wherever it lies. Who looks for it has to know where its path
    begins; after a restart of the engine the pages are computed, and stored, from the first one on.
    """

    def __init__(self, limit: int = _STARTS) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._pages: dict[bytes, None] = {}

    def add(self, page: bytes) -> None:
        """A path begins with `page`."""
        with self._lock:
            self._pages.pop(page, None)
            self._pages[page] = None
            if len(self._pages) > self._limit:
                del self._pages[next(iter(self._pages))]

    def drop(self, page: bytes) -> None:
        """No path begins with `page` any more."""
        with self._lock:
            self._pages.pop(page, None)

    def __contains__(self, page: bytes) -> bool:
        return page in self._pages

    def of(self, chain: Chain, page: int) -> list[int]:
        """Where paths that have page `page` of `chain` may begin, the nearest first; 0, the prompt's start, is last."""
        found = [index for index in range(page, 0, -1) if chain.page(index) in self._pages] if self._pages else []
        return [*found, 0]
