"""The hashes by which routers know blocks: 64 bits, one for each of the engine's blocks.

    tokens                        |  16  |  16  |  16  |  16  |
    hash (n: the namespace's id)  |  of n, the hash of the block before, |  of n and the block's key
                                  |  and the tokens up to here           |

The same tokens behind the same block have the same hashes in every block of the cache, as in an engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from prefixd.cache import Namespace, Trie
from prefixd.cache.index.keys.key_index import KEY_BYTES
from prefixd.cache.index.trie import Rows
from prefixd.server.kv_events.announced_rows import Hashes

_INNER = b"inner"  # BLAKE2's personalization: the hash of an engine's block inside a block equals no whole block's hash


def block_hash(namespace_id: bytes, key: bytes) -> int:
    """Returns the hash of a whole block; takes 1 us.

    Clients can choose keys, but cannot choose one with the hash of a block in another namespace.
    """
    return int.from_bytes(hashlib.blake2b(namespace_id + key, digest_size=8).digest(), "big")


def salt_keys(namespace: Namespace) -> tuple[str | bytes] | None:
    """Returns the `extra_keys` of a prefix's first block: the salt, as text if it is UTF-8, like vLLM."""
    salt = namespace.spec.salt
    if not salt:
        return None
    try:
        return (salt.decode(),)
    except UnicodeDecodeError:
        return (salt,)


class BlockHashes:
    """Computes the hashes of a trie's rows.

    Args:
        namespace_at: returns the namespace with an ordinal.
    """

    def __init__(self, namespace_at: Callable[[int], Namespace]) -> None:
        self._namespace_at = namespace_at

    def whole(self, trie: Trie, rows: Rows) -> list[int]:
        """Returns the hashes of whole blocks."""
        ids = {ordinal: self._namespace_at(ordinal).id for ordinal in np.unique(trie.namespace[rows]).tolist()}
        keys, width = trie.keys(rows).tobytes(), KEY_BYTES
        return [
            block_hash(ids[ordinal], keys[at * width : (at + 1) * width])
            for at, ordinal in enumerate(trie.namespace[rows].tolist())
        ]

    def inner(self, trie: Trie, rows: Rows, hashes: Hashes, pieces: int) -> Hashes:
        """Returns [len(rows), pieces - 1] hashes of the engine's blocks in each block, except the last of them.

        Args:
            trie: the blocks' trie.
            rows: the blocks.
            hashes: [len(rows)] hashes of the whole blocks.
            pieces: engine's blocks in one block.
        """
        above = dict(zip(rows.tolist(), hashes.tolist(), strict=True))
        parents = trie.parent[rows].tolist()
        others = sorted({parent for parent in parents if parent >= 0} - above.keys())
        above.update(zip(others, self.whole(trie, np.array(others, np.int64)), strict=True))
        tokens, nbytes = trie.tokens[rows].astype("<u4", copy=False).tobytes(), 4 * trie.block_tokens
        digests = bytearray()
        for at, (ordinal, parent) in enumerate(zip(trie.namespace[rows].tolist(), parents, strict=True)):
            before = above[parent].to_bytes(8, "big") if parent >= 0 else b""
            state = hashlib.blake2b(self._namespace_at(ordinal).id + before, digest_size=8, person=_INNER)
            block = memoryview(tokens)[nbytes * at : nbytes * (at + 1)]
            for start in range(0, nbytes - nbytes // pieces, nbytes // pieces):
                state.update(block[start : start + nbytes // pieces])
                digests += state.digest()
        return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(len(rows), pieces - 1)
