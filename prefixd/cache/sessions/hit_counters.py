"""How many prompt tokens were asked for and found, and in which tiers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.trie import TIERS

BlockTiers = npt.NDArray[np.int8]
"""[blocks]: the tier of each block of a prompt; `NONE` for a block that no tier has."""


@dataclass(slots=True)
class HitCounters:
    """Prompt tokens asked for and found since the start, once a prompt; the rest, asked - found, was not found.

    Found is what was granted to be read: what is cached and has no room where it is read is no hit.
    """

    asked_tokens: int = 0
    hit_tokens: list[int] = field(default_factory=lambda: [0] * TIERS)  # by the tier they were found in

    def ask(self, tokens: int) -> None:
        """Counts prompt tokens that were asked for."""
        self.asked_tokens += tokens

    def find(self, tiers: BlockTiers, block_tokens: int) -> None:
        """Counts blocks that were granted and had been found in these tiers."""
        for tier, blocks in enumerate(np.bincount(tiers, minlength=TIERS)[:TIERS].tolist()):
            self.hit_tokens[tier] += blocks * block_tokens
