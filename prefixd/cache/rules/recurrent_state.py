"""Recurrent state: one state instead of KV for each token (Mamba, gated delta nets, short convolutions)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixd.cache.rules.rule import Bools, GroupRule, Int64s


@dataclass(frozen=True, slots=True)
class RecurrentState(GroupRule):
    """The state after the last block of a prefix is needed, and nothing else.

    The bytes of block `b` are the state *after* block `b`. A state is large, so most blocks have none: the writer of a
    prompt decides where (Jenga: every 512 tokens; Marconi: at ends of prompts and at branches). Example with
    `checkpoint_blocks=2`:

        block         0 1 2 3 4 5
        there         . x . x . x     possible: 0 2 4 6
        needed by 4         r
        expires at 6  e   e   e       of the states before the last, those that are no checkpoints

    - A prefix needs: the state after its last block.
    - First to go: all states before the last one, but for the checkpoints. The states where prompts branch stay as well
      (`expired_groups`).
    - Possible lengths: 0, and behind each block whose state is there.

    Attributes:
        checkpoint_blocks: states after every multiple of this number do not expire; 0: none.
    """

    checkpoint_blocks: int = 0

    def needed_range(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """The last block."""
        return np.maximum(blocks - 1, 0), blocks

    def possible_prefixes(self, there: Bools) -> Bools:
        """Every length behind a block that is there."""
        return np.concatenate([np.ones(1, np.bool_), there])

    def expires(self, blocks: int) -> Bools:
        """All but the last block and the checkpoints."""
        expires = np.ones(blocks, np.bool_)
        expires[-1:] = False
        if self.checkpoint_blocks:
            expires[self.checkpoint_blocks - 1 :: self.checkpoint_blocks] = False
        return expires
