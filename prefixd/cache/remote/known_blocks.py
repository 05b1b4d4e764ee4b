"""Tracks blocks that a shared store is known to have. Knowledge expires: others may delete, and a store may lose all.

A block with no local copy is forgotten when it was not used for a while. Of a local block the mark that the store has
it expires, so that the store is asked again and gets a block that it lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.base.long_work.steps import in_thread
from prefixd.cache.index.scan import slices
from prefixd.cache.index.trie import LOCAL_TIERS, Rows, Trie
from prefixd.cache.placement.placement import Placement
from prefixd.observability.eviction_journal import Reason, because
from prefixd_swap.tiers import RemoteTier

_FORGOTTEN_AT_ONCE = 512
_LEAST_PAUSE_S = 0.5


class KnownBlocks:
    """Forgets blocks of the store.

    Args:
        tier: the store's tier.
        placement: records where blocks are.
        tries: all tries, by ordinal.
        clock: seconds, monotonic.
        known_s: forget a block that only the store has after this time without use.
        recheck_s: forget after this time that the store has a local block.
        limit: the most blocks that only the store has.
    """

    def __init__(
        self,
        tier: RemoteTier,
        placement: Placement,
        tries: list[Trie],
        clock: Callable[[], float],
        *,
        known_s: float,
        recheck_s: float,
        limit: int,
    ) -> None:
        self._tier = tier
        self._placement = placement
        self._tries = tries
        self._clock = clock
        self._known_s = known_s
        self._recheck_s = recheck_s
        self._limit = limit
        self.blocks = 0
        """Blocks that only the store has, as of the last scan."""

    def room(self) -> int:
        """How many more such blocks may be entered now."""
        return max(self._limit - self.blocks, 0)

    async def watch(self) -> None:
        """Forgets old blocks periodically; runs for ever."""
        while True:
            await asyncio.sleep(max(min(self._known_s, self._recheck_s) / 4, _LEAST_PAUSE_S))
            await self.forget_old()
            await self._forget_marks(self._clock() - self._recheck_s)

    async def forget_old(self, keep_s: float | None = None) -> int:
        """Forgets blocks that only the store has and that were last used `keep_s` ago (`known_s` by default), and
        younger ones while there are more than the limit; returns the number forgotten."""
        went, keep_s = 0, self._known_s if keep_s is None else keep_s
        while True:
            self.blocks = left = 0  # blocks entered meanwhile add to it
            for trie in list(self._tries):
                old, others = await self._old(trie, self._clock() - keep_s)
                gone = 0
                for start in range(0, len(old), _FORGOTTEN_AT_ONCE):
                    gone += self._forget(trie, old[start : start + _FORGOTTEN_AT_ONCE])
                    await give_way()
                went, left = went + gone, left + others + len(old) - gone
            self.blocks += left
            if self.blocks <= self._limit or keep_s < 1:
                return went
            keep_s /= 2

    async def _old(self, trie: Trie, before_s: float) -> tuple[Rows, int]:
        """The trie's blocks that only the store has and that were last used before that time, deepest first (a block
        leaves after its children); the number of other such blocks."""
        found, others = [np.empty(0, np.int64)], 0
        for part in slices(trie.rows):
            rows = part.start + np.flatnonzero(_only_remote(trie, part, self._tier.level))
            old = rows[trie.last_used[rows] <= before_s]
            others += len(rows) - len(old)
            found.append(old)
            await give_way()
        rows = np.concatenate(found)
        depth = trie.depth[rows]
        deepest_first: Rows = rows[await in_thread(lambda: np.argsort(-depth, kind="stable"))]
        return deepest_first, others

    async def forget_all(self) -> None:
        """Forgets everything except blocks that are being read."""
        await self._forget_marks(float("inf"))
        await self.forget_old(0.0)

    async def _forget_marks(self, before_s: float) -> None:
        """Forgets that the store has blocks of this host which entered it before that time."""
        level = self._tier.level
        for trie in list(self._tries):
            for part in slices(trie.rows):
                marked = (trie.any_part[part] & np.uint8(1 << level)) != 0
                marked &= (trie.any_part[part] & np.uint8(LOCAL_TIERS)) != 0
                rows = part.start + np.flatnonzero(marked & (trie.entered[part, level] < before_s))
                for start in range(0, len(rows), _FORGOTTEN_AT_ONCE):
                    some = rows[start : start + _FORGOTTEN_AT_ONCE]
                    here = (trie.any_part[some] & np.uint8(LOCAL_TIERS)) != 0
                    self._placement.drop(trie, some[here], self._tier, expendable=True)
                    await give_way()
                await give_way()

    def _forget(self, trie: Trie, rows: Rows) -> int:
        # They may have been used or read meanwhile.
        only = rows[_only_remote(trie, rows, self._tier.level)]
        with because(Reason.SHARED):
            return self._placement.drop(trie, only, self._tier, expendable=True)


def _only_remote(trie: Trie, rows: Rows | slice, level: int) -> npt.NDArray[np.bool_]:
    any_part = trie.any_part[rows]
    only: npt.NDArray[np.bool_] = ((any_part & np.uint8(1 << level)) != 0) & ((any_part & np.uint8(LOCAL_TIERS)) == 0)
    return only
