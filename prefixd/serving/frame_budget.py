"""Counts the GPU frames of requests that cannot be made to give them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.trie import Rows
from prefixd.cache.rules import GroupMask


class FrameBudget:
    """Counts frames as they are taken and given back, so that a dispatch need not look at the running requests' blocks.

    A KV group's bytes of a cached block take the same frames however many requests hold them, so they are counted by
    row and group. All requests of a worker have blocks of one geometry, hence of one trie. Blocks are given with the
    mask of their groups that count, [m]; None for all groups.

    Args:
        frames: number of frames that parts of these sizes in bytes take.

    Attributes:
        taken: frames of the blocks counted, each once, and of the requests' own frames.
    """

    def __init__(self, frames: Callable[[Sequence[int]], int] = len) -> None:
        self.taken = 0
        self._memory = ColumnMemory()  # a table of a million rows grows without copying
        self._holders: list[Rows] = []  # by group and row: how many counted requests hold its bytes of the block
        self._frames = frames
        self._groups: list[tuple[np.uint8, int]] = []  # by group: its mask, and its frames of a block
        self._round = 1
        self._weighed_in: list[Rows] = []  # by group and row: the last round in which they were weighed

    def add(self, trie: Trie, rows: Rows, wanted: GroupMask | None = None, own: int = 0) -> None:
        """Counts `rows`, which are distinct, for one more request, and `own` more frames."""
        self._fit(trie)
        self.taken += own
        for (mask, width), holders in zip(self._groups, self._holders, strict=True):
            chosen = _of_group(rows, wanted, mask)
            holders[chosen] += 1
            self.taken += int(np.count_nonzero(holders[chosen] == 1)) * width

    def remove(self, rows: Rows, wanted: GroupMask | None = None, own: int = 0) -> None:
        """Undoes `add`."""
        self.taken -= own
        for (mask, width), holders in zip(self._groups, self._holders, strict=True):
            chosen = _of_group(rows, wanted, mask)
            holders[chosen] -= 1
            self.taken -= int(np.count_nonzero(holders[chosen] == 0)) * width

    def begin_round(self) -> None:
        """Begins a round: `weigh` counts each block once per round."""
        self._round += 1

    def weigh(self, trie: Trie, rows: Rows, wanted: GroupMask | None = None) -> int:
        """The frames that a request with these blocks takes beyond those taken, or weighed in this round."""
        self._fit(trie)
        frames = 0
        for (mask, width), holders, weighed_in in zip(self._groups, self._holders, self._weighed_in, strict=True):
            chosen = _of_group(rows, wanted, mask)
            more = (holders[chosen] == 0) & (weighed_in[chosen] != self._round)
            weighed_in[chosen] = self._round
            frames += int(np.count_nonzero(more)) * width
        return frames

    def _fit(self, trie: Trie) -> None:
        if not self._holders:
            self._holders = [np.zeros(0, np.int64) for _ in trie.groups]
            self._weighed_in = [np.zeros(0, np.int64) for _ in trie.groups]
            self._groups = [
                (np.uint8(group.mask), self._frames([trie.part_bytes[part] for part in group.parts]))
                for group in trie.groups
            ]
        if trie.rows > len(self._holders[0]):
            for bit in range(len(self._groups)):
                for name, columns in (("holders", self._holders), ("weighed in", self._weighed_in)):
                    columns[bit] = self._memory.grown(f"{name} {bit}", columns[bit], 2 * trie.rows)


def _of_group(rows: Rows, wanted: GroupMask | None, mask: np.uint8) -> Rows:
    chosen: Rows = rows if wanted is None else rows[(wanted & mask) != 0]
    return chosen


_NAMED = 3


def name_holders(cache: TieredCache, *, owners: bool = True) -> str:
    """A text: how many of the tier's frames are held, how many blocks are pinned, and, with `owners`, the three owners
    with most blocks."""
    pool, tier = cache.tiers.frames, cache.tiers.compute
    bit = np.uint8(1 << tier.level)
    text = f"{tier.used_bytes // pool.frame_bytes} of {pool.capacity} frames of the gpu tier are held"
    pinned = sum(
        int(np.count_nonzero(trie.pinned[: trie.rows] & ((trie.any_part[: trie.rows] & bit) != 0)))
        for trie in cache.tries
    )
    if pinned:
        text += f", {pinned} blocks are pinned"
    holders = cache.holds.blocks_by_owner().most_common(_NAMED)
    if holders and owners:
        text += "; most by " + ", ".join(f"{owner} ({blocks} blocks)" for owner, blocks in holders)
    return text
