"""Sliding window: a token attends to the last tokens only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixd.cache.rules.rule import GroupRule, Int64s


@dataclass(frozen=True, slots=True)
class SlidingWindow(GroupRule):
    """The last `blocks_in_window` blocks of a prefix are needed.

    Example, a window of 2 blocks:

        block         0 1 2 3 4 5
        there         . . x x . x     possible: 0 4
        needed by 4       r r
        expires at 6  e e e e         only shorter prefixes need them

    - A prefix needs: the blocks of the window before its end.
    - First to go: all blocks before that window.
    - Possible lengths: where the window before the end is there, so a longer prefix may be possible where a shorter one
      is not.

    Attributes:
        blocks_in_window: blocks that hold the tokens which the next token attends to, at least 1.
    """

    blocks_in_window: int

    def needed_range(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """The window."""
        return np.maximum(blocks - self.blocks_in_window, 0), blocks
