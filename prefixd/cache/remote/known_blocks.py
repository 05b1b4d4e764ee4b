"""Blocks that are known to be in a shared store and are nowhere here: forgotten when nobody has asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.trie import LOCAL_TIERS, Rows, Trie
from prefixd.cache.placement import Placement
from prefixd.cache.scan import slices
from prefixd.pacer import give_way
from prefixd_swap.tiers import RemoteTier

_FORGOTTEN_AT_ONCE = 512


class KnownBlocks:
    """Counts them, and forgets the least recently used.

    Args:
        tier: the store's.
        placement: what is where.
        tries: all tries, by ordinal.
        clock: seconds, monotonic.
        known_s: a block that nobody has asked for so long is forgotten: others may have deleted it.
        limit: the most blocks.
    """

    def __init__(
        self,
        tier: RemoteTier,
        placement: Placement,
        tries: list[Trie],
        clock: Callable[[], float],
        *,
        known_s: float,
        limit: int,
    ) -> None:
        self._tier = tier
        self._placement = placement
        self._tries = tries
        self._clock = clock
        self._known_s = known_s
        self._limit = limit
        self.blocks = 0
        """Blocks that only the store has, as of the last look."""

    def room(self) -> int:
        """How many more may be entered now."""
        return max(self._limit - self.blocks, 0)

    async def watch(self) -> None:
        """Forgets some from time to time; runs for ever."""
        while True:
            await asyncio.sleep(self._known_s / 4)
            await self.forget_old()

    async def forget_old(self) -> int:
        """Forgets what was last used `known_s` ago, and earlier while there is more than the limit; how many went."""
        went, keep_s = 0, self._known_s
        while True:
            left = 0
            for trie in list(self._tries):
                for part in slices(trie.rows):
                    rows = part.start + np.flatnonzero(_only_remote(trie, part, self._tier.level))
                    old = rows[trie.last_used[rows] < self._clock() - keep_s]
                    left += len(rows) - len(old)
                    for start in range(0, len(old), _FORGOTTEN_AT_ONCE):
                        went += self._forget(trie, old[start : start + _FORGOTTEN_AT_ONCE])
                        await give_way()
                    await give_way()
            self.blocks = left
            if left <= self._limit or keep_s < 1:
                return went
            keep_s /= 2

    def _forget(self, trie: Trie, rows: Rows) -> int:
        # Somebody may have asked for some of them, or brought them here, in between.
        rows = rows[_only_remote(trie, rows, self._tier.level)]
        deepest_first = rows[np.argsort(-trie.depth[rows], kind="stable")]
        return self._placement.drop(trie, deepest_first, self._tier, expendable=True)


def _only_remote(trie: Trie, rows: Rows | slice, level: int) -> npt.NDArray[np.bool_]:
    any_part = trie.any_part[rows]
    only: npt.NDArray[np.bool_] = ((any_part & np.uint8(1 << level)) != 0) & ((any_part & np.uint8(LOCAL_TIERS)) == 0)
    return only
