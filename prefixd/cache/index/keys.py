"""Block keys: one 128-bit XXH3 a block, chained, so that a key names a whole prefix."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash

from prefixd.cache.index.key_index import Rows

_BATCH_GROWTH = 16
_LARGEST_BATCH = 4096

Digest = Callable[[bytes, int], bytes]
"""`(parent's key + the block's token ids as little-endian uint32, seed) -> 16 bytes`."""


def xxh3_digest(data: bytes, seed: int) -> bytes:
    """The block key function (0.15 us for a block of 16 tokens)."""
    return xxhash.xxh3_128_digest(data, seed)


class BlockChain:
    """The full blocks of one prompt and their keys, hashed as far as somebody asked.

    Most prompts that miss, miss early: keys are computed on demand, so a miss does not pay for the rest of the prompt.

    Args:
        token_ids: little-endian uint32, 4 bytes a token.
        block_tokens: tokens a block.
        seed: the namespace's seed.
        digest: replaced in tests to make keys collide.
    """

    __slots__ = ("_digest", "_seed", "_tokens", "keys", "width")

    def __init__(self, token_ids: bytes, block_tokens: int, seed: int, digest: Digest = xxh3_digest) -> None:
        self._tokens = bytearray(token_ids)
        self._seed = seed
        self._digest = digest
        self.width = 4 * block_tokens
        self.keys: list[bytes] = []

    def __len__(self) -> int:
        """Full blocks."""
        return len(self._tokens) // self.width

    @property
    def token_ids(self) -> bytes:
        """All token ids, the incomplete last block included."""
        return bytes(self._tokens)

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return len(self._tokens) // 4

    def append(self, token_ids: bytes) -> None:
        """Adds tokens at the end (the ones a request generates)."""
        self._tokens += token_ids

    def block(self, index: int) -> bytes:
        """Token ids of one full block, little-endian uint32."""
        return bytes(self._tokens[index * self.width : (index + 1) * self.width])

    def blocks(self, count: int) -> bytes:
        """Token ids of the first `count` blocks."""
        return bytes(self._tokens[: count * self.width])

    def walk(self, find_all: Callable[[bytes], Rows], limit: int) -> Rows:
        """The rows of the first blocks, at most `limit`, up to the first that has none.

        `find_all` takes keys one behind the other and gives their rows, -1 for none (`KeyIndex.find_all`). It is asked
        for one key, then for ever more at a time: many are found faster together, but what is hashed behind the first
        miss is for nothing.
        """
        end = min(limit, len(self))
        found: list[Rows] = [np.zeros(0, np.int64)]
        start, batch = 0, 1
        while start < end:
            stop = min(start + batch, end)
            self._hash(stop)
            rows = find_all(b"".join(self.keys[start:stop]))
            missing = rows < 0
            if missing.any():
                found.append(rows[: int(missing.argmax())])
                break
            found.append(rows)
            start, batch = stop, min(batch * _BATCH_GROWTH, _LARGEST_BATCH)
        return np.concatenate(found)

    def key(self, index: int) -> bytes:
        """Key of block `index`, 16 bytes; hashes what has not been hashed yet."""
        self._hash(index + 1)
        return self.keys[index]

    def _hash(self, blocks: int) -> None:
        """Computes the keys of the first `blocks`. One loop with local names: half of a match's time is here."""
        keys, tokens, width, seed, digest = self.keys, self._tokens, self.width, self._seed, self._digest
        key = keys[-1] if keys else b""
        for start in range(len(keys) * width, blocks * width, width):
            key = digest(key + tokens[start : start + width], seed)
            keys.append(key)
