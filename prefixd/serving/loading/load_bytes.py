"""The bytes of a load, as the cost model counts them: what a tier reads, and what is decoded from that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache import Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.rules import GroupMask
from prefixd_scheduler import CostModel, Distance


@dataclass(frozen=True, slots=True)
class LoadBytes:
    """Bytes of a load.

    Attributes:
        moved: as the tiers keep them: of a coded block its stored bytes.
        decoded: the bytes that are made of the coded ones among these blocks.
    """

    moved: int = 0
    decoded: int = 0

    def __add__(self, other: LoadBytes) -> LoadBytes:
        return LoadBytes(self.moved + other.moved, self.decoded + other.decoded)

    def __bool__(self) -> bool:
        return self.moved > 0

    def load_s(self, cost: CostModel, distance: Distance, queued_bytes: int = 0) -> float | None:
        """Estimated seconds to load them, as `CostModel.load_s`."""
        return cost.load_s(self.moved, distance, queued_bytes, self.decoded)


class BlockLoads:
    """The bytes of a load by block.

    Args:
        trie: the blocks' trie.
        rows: [m] the blocks, which are loaded from the nearest tier that has them.
        groups: [m] the KV groups to load of each.
    """

    def __init__(self, trie: Trie, rows: Rows, groups: GroupMask) -> None:
        self._moved: npt.NDArray[np.int64] = trie.group_bytes[groups]
        self._decoded: npt.NDArray[np.int64] | None = None
        if trie.has_coded and (read := trie.nearest[rows] == Distance.DISK).any():
            parts = (groups[:, None] & trie.part_mask) != 0
            parts &= read[:, None]
            coded = parts & (trie.coded_bytes[rows] > 0)
            exact = np.array(trie.part_bytes, np.int64)
            self._decoded = coded @ exact
            self._moved = self._moved - self._decoded + np.where(coded, trie.coded_bytes[rows], 0).sum(axis=1)

    def total(self, of: npt.NDArray[np.bool_] | slice = slice(None)) -> LoadBytes:
        """The bytes of some of the blocks, by default of all."""
        decoded = 0 if self._decoded is None else int(self._decoded[of].sum())
        return LoadBytes(int(self._moved[of].sum()), decoded)


def bytes_to_load(trie: Trie, rows: Rows, groups: GroupMask) -> LoadBytes:
    """The bytes of a load; arguments as of `BlockLoads`."""
    if not trie.has_coded:
        return LoadBytes(int(np.bincount(groups, minlength=len(trie.group_bytes)) @ trie.group_bytes))
    return BlockLoads(trie, rows, groups).total()
