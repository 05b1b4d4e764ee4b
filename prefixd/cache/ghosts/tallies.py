"""What ghosts have found, by size of the tier: sums over a sample, and the hit rates that follow.

With the correction for a sample that has more or fewer references than its share (Waldspurger et al., "Efficient MRC
Construction with SHARDS", FAST '15, section 3.4): the difference is blocks that very many prompts have, or lack, and
counts as found at every size.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

GROUPS = 8
"""Parts of the sample, by hash; how much their hit rates differ says how sure the estimate is."""
_STUDENT_T = 2.36  # 95%, for the mean of GROUPS values


class Tally:
    """Sums of one tenant, or of all, in tokens of the whole traffic: a sampled block stands for 1 / rate blocks.

    Args:
        sizes: how many sizes of the tier are estimated.
    """

    def __init__(self, sizes: int) -> None:
        self.asked_tokens = 0.0
        """Prompt tokens that were asked for, sampled or not."""
        self.references = 0
        """Sampled blocks that were asked for."""
        self.seen = np.zeros(GROUPS)
        """[groups]: tokens that the sampled blocks stand for."""
        self.found = np.zeros((GROUPS, sizes))
        """[groups, sizes]: tokens of them that are found."""

    def add(
        self, groups: npt.NDArray[np.int64], found: npt.NDArray[np.bool_], asked_tokens: int, weight: float
    ) -> None:
        """Counts a prompt.

        Args:
            groups: [sampled blocks] the group of each.
            found: [sampled blocks, sizes] whether a tier of the size has it.
            asked_tokens: of all its blocks.
            weight: tokens that a sampled block stands for.
        """
        self.asked_tokens += asked_tokens
        self.references += len(groups)
        if len(groups):
            self.seen += weight * np.bincount(groups, minlength=GROUPS)
            np.add.at(self.found, groups, weight * found)

    def age(self) -> None:
        """Halves all sums, so that what comes next counts more than what was."""
        self.asked_tokens /= 2
        self.references //= 2
        self.seen /= 2
        self.found /= 2

    def hit_rates(self) -> npt.NDArray[np.float64]:
        """[sizes]: the share of the asked tokens that a tier of each size finds."""
        if not self.asked_tokens:
            return np.zeros(self.found.shape[1])
        more = self.asked_tokens - self.seen.sum()
        return np.clip((self.found.sum(axis=0) + more) / self.asked_tokens, 0.0, 1.0)

    def margins(self) -> npt.NDArray[np.float64]:
        """[sizes]: the hit rates are this near to the true ones with a probability of 95%, as far as the sample tells."""
        if not self.asked_tokens:
            return np.ones(self.found.shape[1])
        more = self.asked_tokens / GROUPS - self.seen
        of_groups = GROUPS * (self.found + more[:, None]) / self.asked_tokens
        return np.minimum(_STUDENT_T * of_groups.std(axis=0, ddof=1) / math.sqrt(GROUPS), 1.0)
