"""Notes what a prompt lacks of the cache, for its record."""

from __future__ import annotations

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.namespaces import Namespace
from prefixd.observability.missing_blocks import MOST_KEYS, MOST_TOKENS, MissingBlocks


def note_missing(namespace: Namespace, chain: BlockChain, found: int, blocks: int) -> MissingBlocks | None:
    """Notes that of a prompt's first `blocks` blocks only `found` are cached; None if all are. Hashes 32 blocks at
    most: 4 us."""
    if found >= blocks:
        return None
    end = min(found + MOST_KEYS, blocks)
    return MissingBlocks(
        namespace=namespace.id,
        block_tokens=chain.block_tokens,
        found=found,
        blocks=blocks,
        parent_key=chain.key(found - 1) if found else b"",
        tokens=chain.token_rows[found][:MOST_TOKENS].tobytes(),
        keys=chain.key_rows(found, end).tobytes(),
    )
