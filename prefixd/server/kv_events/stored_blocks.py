"""Blocks of one trie that are announced as stored, in as few events as possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefixd.cache import Trie
from prefixd.cache.index.trie import Rows
from prefixd.server.kv_events.announced_rows import Bits, Hashes
from prefixd.server.kv_events.event_messages import LOCALITY, BlockStored


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Blocks of one trie, parents before children.

    Attributes:
        trie: the blocks' trie.
        rows: [n] the blocks.
        tiers: [n] the tiers in which each is announced now.
        known: [n, tiers] how many of its engine's blocks each tier had already.
        hashes: [n, pieces] hashes of the engine's blocks, the last of which is the block's own.
    """

    trie: Trie
    rows: Rows
    tiers: Bits
    known: npt.NDArray[np.int64]
    hashes: Hashes

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yields (start, end) of the blocks that one event of each tier announces: each continues the one before it in
        the same tiers, and no tier has a part of a block after the first."""
        parents = self.trie.parent[self.rows]
        ends = (parents[1:] != self.rows[:-1]) | (self.tiers[1:] != self.tiers[:-1]) | self.known[1:].any(axis=1)
        yield from pairwise([0, *(1 + np.flatnonzero(ends)).tolist(), len(self.rows)])

    def event(
        self, start: int, end: int, tier: int, medium: str, parent: int | None, salt: tuple[str | bytes] | None
    ) -> BlockStored:
        """Returns the event of one run in a tier, without the engine's blocks that the tier had already.

        Args:
            start: where the run begins in `rows`.
            end: where it ends.
            tier: level of the tier.
            medium: vLLM's name of the tier.
            parent: hash of the block before the run, None for a prefix's first block.
            salt: extra keys of a prefix's first block.
        """
        pieces = self.hashes.shape[1]
        skipped = int(self.known[start, tier])
        hashes = self.hashes[start:end].ravel()
        tokens = self.trie.tokens[self.rows[start:end]].ravel()
        width = self.trie.block_tokens // pieces
        return BlockStored(
            block_hashes=hashes[skipped:].tolist(),
            parent_block_hash=int(hashes[skipped - 1]) if skipped else parent,
            token_ids=tokens[width * skipped :].tolist(),
            block_size=width,
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[None if skipped else salt, *[None] * (len(hashes) - skipped - 1)],
            locality=LOCALITY,
        )
