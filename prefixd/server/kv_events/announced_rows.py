"""The rows of a trie that were announced, and which rows an announcer reads next."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd.cache import Trie
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.trie import LOCAL_TIERS, Rows

_WINDOW = 4096  # rows of a trie among which one turn looks for rows to store

Bits = npt.NDArray[np.uint8]
"""A bit for each tier: 0b101 is the GPU tier and the disk tier."""
Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]


class AnnouncedRows:
    """Records what was announced of each row of one trie, in one column for each fact.

    Args:
        pieces: engine's blocks in one block of the cache.
    """

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self._memory = ColumnMemory()
        self.tiers: Bits = np.zeros(0, np.uint8)  # tiers in which the block was announced
        self.hashes: Hashes = np.zeros(0, np.uint64)
        # [rows, pieces - 1]: ids of the engine's blocks but the last, which has the hash of the whole block.
        self.inner: npt.NDArray[np.int32] = np.zeros((0, pieces - 1), np.int32)
        self.generation: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # of the block that was announced
        self.topic: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # number of the topic
        self.changed: Flags = np.zeros(0, np.bool_)  # the trie's row changed, and no turn has read it since
        self.to_store: Flags = np.zeros(0, np.bool_)  # the block is in a tier in which it was not announced

    def grow(self, rows: int) -> None:
        """Makes room for `rows` rows."""
        if rows > len(self.changed):
            for name in ("tiers", "hashes", "inner", "generation", "topic", "changed", "to_store"):
                setattr(self, name, self._memory.grown(name, getattr(self, name), rows))


def tiers_with_block(trie: Trie, rows: Rows | slice) -> Bits:
    """Returns for each block the tiers that have all parts that every prefix through it needs; 0 for a row without a
    block.

    A prefix needs only the end of windows and states: these come and go while the block still serves longer prefixes,
    so they do not count. If a model has no other KV groups, a block counts as being in every tier that has any part of
    it; the blocks before it may then be in no tier.
    """
    lasting = np.uint8(trie.all_groups & ~trie.partial_groups)
    there = trie.there[rows]
    has = (there & lasting) == lasting if lasting else there != 0
    tiers: Bits = np.packbits(has, axis=1, bitorder="little").ravel() & np.uint8(trie.offered & LOCAL_TIERS)
    return tiers


def choose_rows_to_store(trie: Trie, to_store: Flags, most: int) -> Rows:
    """Returns up to `most` of the rows flagged in `to_store`, each parent before its children.

    Blocks of one prefix follow each other as far as possible: one event can then announce all of them.
    """
    start = int(to_store.argmax())
    found = start + np.flatnonzero(to_store[start : start + _WINDOW])[:most]
    chosen: list[int] = []
    seen: set[int] = set()
    for row in found.tolist():
        path = []
        while row >= 0 and to_store[row] and row not in seen:
            seen.add(row)
            path.append(row)
            row = int(trie.parent[row])
        chosen += path[::-1]
        if len(chosen) >= most:
            break
    return np.array(chosen[:most], np.int64)
