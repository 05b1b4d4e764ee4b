"""Full attention: every token attends to every token before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from prefixd.cache.rules.rule import Bools, GroupRule, Int64s


@dataclass(frozen=True, slots=True)
class FullAttention(GroupRule):
    """All blocks of a prefix are needed.

        block         0 1 2 3 4 5
        there         x x x . x x     possible: 0 1 2 3
        needed by 3   r r r           nothing expires

    - A prefix needs: all its blocks.
    - First to go: nothing in particular. Blocks go from the end of a prompt.
    - Possible lengths: up to the first block that is missing.
    """

    lasting: ClassVar[bool] = True

    def needed_range(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """From the first block of all."""
        return np.zeros_like(blocks), blocks

    def possible_prefixes(self, there: Bools) -> Bools:
        """Every length up to the first block that is missing."""
        possible = np.ones(len(there) + 1, np.bool_)
        np.logical_and.accumulate(there, out=possible[1:])
        return possible
