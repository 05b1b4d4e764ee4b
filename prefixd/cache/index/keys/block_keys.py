"""Block keys: one 128-bit XXH3 a block, chained, so that a key names a whole prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import xxhash

from prefixd.cache.index.keys.key_index import KEY_BYTES, Rows

HASHED_AT_ONCE = 2048  # blocks: hashed in 0.4 ms, hashed and found in 1 ms

_BATCH_GROWTH = 16
_LARGEST_BATCH = HASHED_AT_ONCE

Digest = Callable[[bytes, int], bytes]
"""`(parent's key + the block's token ids as little-endian uint32, seed) -> 16 bytes`."""

xxh3_digest: Digest = xxhash.xxh3_128_digest
"""The block key function (0.1 us for a block of 16 tokens)."""


class BlockChain:
    """The full blocks of one prompt and their keys, which are hashed on demand.

    Most prompts that miss, miss early, so a miss does not pay for hashing the rest of the prompt. Hashing takes 0.2 ms
    for 1,000 blocks of 16 tokens; `walk_batches` hashes a long prompt in slices.

    Args:
        token_ids: little-endian uint32, 4 bytes a token.
        block_tokens: tokens a block.
        seed: the namespace's seed.
        digest: replaced in tests to make keys collide.
    """

    __slots__ = ("_capacity", "_digest", "_keys", "_seed", "block_tokens", "token_rows", "tokens")

    def __init__(self, token_ids: bytes, block_tokens: int, seed: int, digest: Digest = xxh3_digest) -> None:
        self._capacity = np.frombuffer(token_ids, "<u4")  # the tokens, and room for more after the first `append`
        self._keys = bytearray()
        self._seed = seed
        self._digest = digest
        self.block_tokens = block_tokens
        self.tokens = len(self._capacity)
        """The number of tokens."""
        self._view_rows()

    def __len__(self) -> int:
        """The number of full blocks."""
        return self.tokens // self.block_tokens

    @property
    def token_ids(self) -> bytes:
        """All token ids, the incomplete last block included."""
        return self._capacity[: self.tokens].tobytes()

    def first_tokens(self, tokens: int) -> bytes:
        """Ids of the first tokens, little-endian uint32; of all if there are fewer."""
        return self._capacity[: min(tokens, self.tokens)].tobytes()

    @property
    def hashed(self) -> int:
        """The number of blocks whose keys are known."""
        return len(self._keys) // KEY_BYTES

    def append(self, token_ids: bytes) -> None:
        """Adds tokens at the end (the ones a request generates)."""
        if not token_ids:
            return
        tokens = self.tokens + len(token_ids) // 4
        if tokens > len(self._capacity):
            larger = np.empty(tokens + tokens // 2, "<u4")
            larger[: self.tokens] = self._capacity[: self.tokens]
            self._capacity = larger
        self._capacity[self.tokens : tokens] = np.frombuffer(token_ids, "<u4")
        self.tokens = tokens
        self._view_rows()

    def rewrite(self, index: int, token_ids: bytes) -> None:
        """Replaces the ids of a full block that is not hashed yet: they may depend on the block's last token."""
        if not self.hashed <= index < len(self):
            raise ValueError(f"block {index} of {len(self)}, of which {self.hashed} are hashed")
        first = index * self.block_tokens
        if not self._capacity.flags.writeable:
            self._capacity = self._capacity.copy()
            self._view_rows()
        self._capacity[first : first + self.block_tokens] = np.frombuffer(token_ids, "<u4")

    def block(self, index: int) -> bytes:
        """Token ids of one full block, little-endian uint32."""
        return self._capacity[index * self.block_tokens : (index + 1) * self.block_tokens].tobytes()

    def blocks(self, count: int) -> bytes:
        """Token ids of the first `count` blocks."""
        return self._capacity[: count * self.block_tokens].tobytes()

    def key(self, index: int) -> bytes:
        """Key of block `index`, 16 bytes; hashes up to it if necessary."""
        if index >= self.hashed:
            self._hash(index + 1)
        return bytes(self._keys[index * KEY_BYTES : (index + 1) * KEY_BYTES])

    def key_rows(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """[stop - start, 16]: keys of blocks; hashes up to them if necessary."""
        return np.frombuffer(self._key_bytes(start, stop), np.uint8).reshape(-1, KEY_BYTES)

    def walk_batches(self, find_all: Callable[[bytes], Rows], limit: int, first: int = 0) -> Iterator[Rows]:
        """The rows of the blocks from `first` to `limit`, up to the first without a row, in batches.

        `find_all` takes keys one behind the other and returns their rows, -1 for none (`Trie.find_all`). The first
        batch is one key, later ones grow to 2,048: many keys are found faster together, but hashing behind the first
        miss is wasted. A batch takes about 1 ms; the caller may let others run between two.
        """
        start, batch = first, 1
        while start < (end := min(limit, len(self))):
            stop = min(start + batch, end)
            rows = find_all(self._key_bytes(start, stop))
            missing = rows < 0
            if missing.any():
                yield rows[: int(missing.argmax())]
                return
            yield rows
            start, batch = stop, min(batch * _BATCH_GROWTH, _LARGEST_BATCH)

    def _view_rows(self) -> None:
        full = self.tokens // self.block_tokens
        ids = self._capacity[: full * self.block_tokens]
        self.token_rows: npt.NDArray[np.uint32] = ids.reshape(full, self.block_tokens)
        """[blocks, block_tokens]: token ids of the full blocks; a view, which stays valid when tokens are added."""

    def _key_bytes(self, start: int, stop: int) -> bytes:
        if stop > self.hashed:
            self._hash(stop)
        return bytes(memoryview(self._keys)[start * KEY_BYTES : stop * KEY_BYTES])

    def _hash(self, blocks: int) -> None:
        """Computes the keys of the first `blocks`. One loop with local names, since it takes half of a match's time."""
        seed, digest = self._seed, self._digest
        key = bytes(self._keys[-KEY_BYTES:])
        for start in range(self.hashed, blocks, _LARGEST_BATCH):
            tokens = self.token_rows[start : min(start + _LARGEST_BATCH, blocks)]
            one_by_one = tokens.view(f"V{4 * self.block_tokens}").ravel().tolist()
            self._keys += b"".join([key := digest(key + block, seed) for block in one_by_one])
