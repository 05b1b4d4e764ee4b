"""The queue of blocks in a tier that wait to be written to disk: tenants take turns, each in the order in which its
blocks entered the tier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import Pacer
from prefixd.cache.index.scan import SCANNED_AT_ONCE, LowestRows, slices
from prefixd.cache.index.trie import Rows, Trie

_FOUND_AT_ONCE = 8192  # blocks that one scan of the table finds
_TURN = 16
"""Blocks of a tenant in turn. So many may be coded while those before them are written."""


class UnwrittenBlocks:
    """The blocks of a trie with a KV group that the tier has, the disk lacks and a prefix needs.

    The queue of each tenant is first in, first out; blocks that entered the tier together are ordered parents before
    children. Tenants take turns, so that one with many blocks, or with a slow codec, does not keep others waiting. The
    tenant whose first block has waited longest comes first, so that each gets its turn however many tenants there are.

    A scan of the table in slices finds some thousand blocks. Others change the trie between two slices, and between the
    scan and `next`, so `next` checks again that a block waits. A block that entered after a scan had begun is left to
    the next scan, since this one may have passed its parent's row.

    Args:
        trie: the blocks' trie.
        source: the level of the tier.
        target: the level of the disk tier.
        clock: seconds, as for the times when blocks entered tiers.
        admit_uses: blocks with fewer uses do not wait to be written.
        may_go: returns which of m blocks `next` may return now, [m]; all by default.
        owners: returns the ordinal of the tenant of each of m blocks, [m]; one tenant by default.
    """

    def __init__(
        self,
        trie: Trie,
        source: int,
        target: int,
        clock: Callable[[], float],
        admit_uses: int = 0,
        may_go: Callable[[Rows], npt.NDArray[np.bool_]] | None = None,
        owners: Callable[[Rows], Rows] | None = None,
    ) -> None:
        self._trie = trie
        self._source = source
        self._target = target
        self._clock = clock
        self._admit_uses = admit_uses
        self._may_go = may_go or (lambda rows: np.ones(len(rows), np.bool_))
        self._owners = owners or (lambda rows: np.zeros(len(rows), np.int64))
        self._found: Rows = np.empty(0, np.int64)

    async def next(self, count: int) -> Rows:
        """Takes up to `count` blocks from the beginning of the queue; empty if none waits."""
        rows = self._take(count)
        if not len(rows):
            await self._scan()
            rows = self._take(count)
        return rows

    def begin_again(self) -> None:
        """Has `next` scan again from the start, after a block that it returned could not be written."""
        self._found = self._found[:0]

    def _take(self, count: int) -> Rows:
        while len(self._found):
            rows, self._found = self._found[:count], self._found[count:]
            waiting: Rows = rows[self._trie.unwritten(rows, self._source, self._target, self._admit_uses) != 0]
            if len(waiting := waiting[self._may_go(waiting)]):
                return waiting
        return self._found

    async def _scan(self) -> None:
        trie, begun_s, pacer = self._trie, self._clock(), Pacer(SCANNED_AT_ONCE)
        lowest: defaultdict[int, LowestRows] = defaultdict(lambda: LowestRows(_FOUND_AT_ONCE))  # by owner
        for part in slices(trie.rows):
            waiting = trie.unwritten(part, self._source, self._target, self._admit_uses)
            rows = part.start + np.flatnonzero(waiting)
            rows = rows[self._may_go(rows)]
            if part.start:
                rows = rows[trie.entered[rows, self._source] < begun_s]
            order = np.argsort(owners := self._owners(rows), kind="stable")
            rows, owners = rows[order], owners[order]
            entered, depth = trie.entered[rows, self._source], trie.depth[rows]
            bounds = [*np.flatnonzero(np.diff(owners, prepend=-1)).tolist(), len(rows)]
            for start, end in pairwise(bounds):
                lowest[owners.item(start)].offer(rows[start:end], entered[start:end], depth[start:end])
            await pacer.worked(part.stop - part.start)
        queues: list[Rows] = []
        for each in lowest.values():
            if queues:
                await pacer.worked(_FOUND_AT_ONCE)
            queues.append(each.ascending())
        queues.sort(key=lambda queue: float(trie.entered[queue[0], self._source]))
        self._found = _in_turn(queues, _FOUND_AT_ONCE)


def _in_turn(queues: Sequence[Rows], count: int) -> Rows:
    """The first `count` rows: `_TURN` of each queue, then the next ones of each."""
    found, taken = [np.empty(0, np.int64)], 0
    for start in range(0, count, _TURN):
        queues = [queue for queue in queues if len(queue) > start]
        if not queues or taken >= count:
            break
        found += [queue[start : start + _TURN] for queue in queues]
        taken += sum(map(len, found[-len(queues) :]))
    return np.concatenate(found)[:count]
