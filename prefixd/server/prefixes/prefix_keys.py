"""Prefixes by the keys that operators write: hex digits of the last block's key.

Other tasks change the trie between two slices of work. So a block is known by its row and by the row's generation.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import Rows

_KEY_DIGITS = 32
_SHORTEST_KEY = 4
_SHOWN = 8
_SLICE_ROWS = 1 << 14
_PATH_ROWS = 1 << 12


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix, named by its last block: the row in a trie and the row's generation."""

    trie: Trie
    row: int
    generation: int

    @classmethod
    def of(cls, trie: Trie, row: int) -> Prefix:
        """Returns the prefix that ends with the block that is in `row` now."""
        return cls(trie, row, int(trie.generation[row]))

    @property
    def there(self) -> bool:
        """True if the block still exists; the blocks before it then exist too."""
        return int(self.trie.generation[self.row]) == self.generation

    async def upwards(self, pacer: Pacer) -> AsyncGenerator[Rows, None]:
        """Yields the rows of its blocks from the last to the first, 4096 at a time.

        Raises:
            NotFoundError: the prefix was evicted meanwhile.
        """
        at = self.row
        while at >= 0:
            parent = self.trie.parent.data
            rows: list[int] = []
            while at >= 0 and len(rows) < _PATH_ROWS:
                rows.append(at)
                at = parent[at]
            yield np.array(rows, np.int64)
            await pacer.worked(1 + len(rows) // 8)
            if not self.there:
                raise NotFoundError("the prefix was evicted while it was looked at; `prefixd ls` shows what there is")

    async def path(self, pacer: Pacer) -> Rows:
        """Returns the rows of its blocks, from the first on. Raises NotFoundError as `upwards` does."""
        parts: list[Rows] = []
        async with aclosing(self.upwards(pacer)) as steps:
            async for rows in steps:
                parts.append(rows)
        return np.concatenate(parts)[::-1]


async def find_prefix(cache: TieredCache, key: str) -> Prefix:
    """Returns the prefix that a key names: the first hex digits of its last block's key, or all of them.

    Before a slash may stand the id of a namespace; without one, all namespaces are searched. Examples: "9f86d081",
    "0badc0de12345678/9f86d081". Blocks of two namespaces may have the same key, since clients can choose keys by
    choosing tokens.

    Raises:
        InvalidArgumentError: these are no hex digits, or several keys begin with them.
        NotFoundError: no key begins with them, or there is no such namespace.
    """
    namespace_id, slash, digits = key.lower().rpartition("/")
    only = cache.namespaces.get(_from_hex(namespace_id)) if slash else None
    if len(digits) < _SHORTEST_KEY or len(digits) > _KEY_DIGITS or digits.strip("0123456789abcdef"):
        raise InvalidArgumentError(
            f"key {key!r} is not {_SHORTEST_KEY} to {_KEY_DIGITS} hex digits; `prefixd ls` shows the keys"
        )
    found: list[Prefix] = []
    for trie in list(cache.tries) if only is None else [cache.trie(only)]:
        for start in range(0, trie.rows, _SLICE_ROWS):
            rows = trie.find_by_digits(digits, start, start + _SLICE_ROWS)
            if only is not None:
                rows = rows[trie.namespace[rows] == only.ordinal]
            found += [Prefix.of(trie, row) for row in rows.tolist()]
            if len(found) > _SLICE_ROWS:  # enough to refuse it
                break
            await give_way()
    found = [prefix for prefix in found if prefix.there]
    if not found:
        raise NotFoundError(f"no prefix has the key {key}; `prefixd ls` shows what there is")
    if len(found) > 1 and len(digits) < _KEY_DIGITS:
        raise InvalidArgumentError(f"{len(found)} prefixes have keys that begin with {key}; give more digits")
    if len(found) > 1:
        ids = [cache.namespaces.at(int(prefix.trie.namespace[prefix.row])).id.hex() for prefix in found[:_SHOWN]]
        raise InvalidArgumentError(
            f"{len(found)} namespaces have a block with the key {key}; write the id of one before it: "
            + ", ".join(f"{namespace_id}/{digits}" for namespace_id in ids)
        )
    return found[0]


def _from_hex(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise InvalidArgumentError(f"{digits[:32]!r} is no namespace's id in hex; `prefixd ls` shows them") from None
