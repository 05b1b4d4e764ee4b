"""Blocks entered into a trie as the product enters them: those of a prompt, one behind the other, in one call."""

from __future__ import annotations

import numpy as np

from prefixd.cache import BlockChain, Trie
from prefixd.cache.index.trie import Rows


def enter_chain(
    trie: Trie, chain: BlockChain, parent: int = -1, namespace: int = 0, start: int = 0, now_s: float = 0.0
) -> Rows:
    """The rows of the blocks of `chain` from `start` on behind `parent`; fewer where a key is another block's."""
    keys, tokens = chain.key_rows(start, len(chain)), chain.token_rows[start:]
    return trie.insert_path(parent, namespace, keys, tokens, now_s)[0]


def enter_block(trie: Trie, key: bytes, token_ids: bytes, parent: int = -1, namespace: int = 0) -> int | None:
    """The row of the block with this key behind `parent`; None where the key is another block's."""
    keys, tokens = np.frombuffer(key, np.uint8)[None], np.frombuffer(token_ids, np.uint32)[None]
    rows, _ = trie.insert_path(parent, namespace, keys, tokens, 0.0)
    return int(rows[0]) if len(rows) else None
