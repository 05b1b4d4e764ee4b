"""Chunked window: a token attends to its own chunk only (Llama 4's chunked local attention)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixd.cache.rules.rule import Bools, GroupRule, Int64s, all_there


@dataclass(frozen=True, slots=True)
class ChunkedWindow(GroupRule):
    """The blocks of a prefix that hold tokens of the next token's chunk are needed.

    The token at position `p` attends to the positions from `p // c * c` to `p`, with chunks of `c` tokens. Where a
    chunk ends with a block, the next token attends to itself only, and nothing is needed. Example, chunks of 3
    blocks:

        block         0 1 2 | 3 4 5 | 6
        there         x . . | x x . | .     possible: 0 1 3 4 5 6
        needed by 5           r r
        needed by 6                         nothing
        expires at 5  e e e
        expires at 6  e e e                 the last chunk stays, see below

    A block that lies in two chunks, because a chunk's size is no multiple of the block's, is needed by both.

    - A prefix needs: the blocks of its last chunk, if that is not full.
    - First to go: all blocks before the chunk of the prompt's last token. The last chunk stays even if it is full:
      a second request with the same prompt computes its last token again, so it continues inside that chunk.
    - Possible lengths: where the unfinished chunk before the end is there, and at all ends of chunks.

    Attributes:
        chunk_tokens: tokens of a chunk, at least 1.
        block_tokens: tokens of a block.
    """

    chunk_tokens: int
    block_tokens: int

    def needed_range(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """The chunk of the next token, as far as it is before that token."""
        return self._chunk_of(blocks * self.block_tokens), blocks

    def stored_prefixes(self, there: Bools) -> Bools:
        """The lengths whose last token's chunk is there.

        At the end of a chunk a prompt continues without that chunk, but shorter lengths need it.
        """
        blocks = np.arange(len(there) + 1)
        return all_there(there, self._last_chunk(blocks), blocks)

    def expires(self, blocks: int) -> Bools:
        """All blocks before the chunk of the last token."""
        expires: Bools = np.arange(blocks) < self._last_chunk(np.array(blocks))
        return expires

    def _last_chunk(self, blocks: Int64s) -> Int64s:
        """The block in which the chunk of the last token begins."""
        return self._chunk_of(np.maximum(blocks * self.block_tokens - 1, 0))

    def _chunk_of(self, positions: Int64s) -> Int64s:
        """The blocks in which the chunks of these positions begin."""
        first: Int64s = positions // self.chunk_tokens * self.chunk_tokens // self.block_tokens
        return first
