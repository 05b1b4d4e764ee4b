"""SGLang's page keys as prompts of prefixd.

SGLang names a page by SHA-256 over (the key of the page before it, the page's tokens): 64 hexadecimal digits that name
the whole prefix. prefixd's blocks have token ids, which it compares. So the 32 bytes of a key are the 8 token ids of
the page's block, and a prompt is the keys of its pages one after the other:

    keys        k0         k1         k2          of SGLang, each 64 hexadecimal digits
    path        8 tokens   8 tokens   8 tokens    as little-endian uint32: the digests themselves
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence

KEY_BYTES = 32
BLOCK_TOKENS = KEY_BYTES // 4
_HEX = 2 * KEY_BYTES
_LINKS = 1 << 16
_STARTS = 1 << 12


def digests_of(keys: Sequence[str]) -> bytes:
    """The digests of `keys`, 32 bytes each, one after the other.

    A key that is no SHA-256 in hexadecimal digits is hashed: it names a page all the same. Raises TypeError for one
    that is no string.
    """
    text = "".join(keys)
    if len(text) == _HEX * len(keys) and all(len(key) == _HEX for key in keys):
        try:
            # The digits alone: `fromhex` skips spaces, and another spelling of a key is another key.
            if (digests := bytes.fromhex(text)).hex() == text:
                return digests
        except ValueError:
            pass
    return b"".join(_digest(key) for key in keys)


def _digest(key: str) -> bytes:
    if len(key) == _HEX:
        try:
            if (digest := bytes.fromhex(key)).hex() == key:
                return digest
        except ValueError:
            pass
    return hashlib.sha256(b"prefixd key " + key.encode("utf-8", "surrogatepass")).digest()


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
    """Where in their prompts pages lie: by what SGLang says (`prefix_keys`), or else by what it has said before.

    A key has one parent, so a link that was learned once stays true. What is wrong here costs hits and no more: the
    daemon compares the digests of all pages of a path.
    """

    def __init__(self, links: int = _LINKS) -> None:
        self._limit = links
        self._lock = threading.Lock()
        self._parents: dict[bytes, bytes] = {}

    def chain(self, keys: Sequence[str], prefix_keys: Sequence[str] | None) -> Chain:
        """The chain of a call's keys. None: SGLang says nothing of the pages before them."""
        own = digests_of(keys)
        with self._lock:
            before = digests_of(prefix_keys) if prefix_keys else self._ancestors(own[:KEY_BYTES])
            chain = Chain(before + own, len(before) // KEY_BYTES)
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

    SGLang hands over a page once. When the daemon has lost the pages before it (it was restarted, one was damaged on
    disk), nothing could ever be stored behind them while SGLang holds them itself. So the page begins a path of its
    own: its key names the whole prefix, so it is right wherever it lies. Who looks for it has to know where its path
    begins; after a restart of SGLang the pages are computed, and stored, from the first one on.
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
