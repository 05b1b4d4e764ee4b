"""A hash table of rows with linear probing: an entry is at the first free place from its home on.

There are no tombstones: a removal moves the entries behind it up, so lookups stay fast after years of insertions and
removals. Homes are ordered as the hashes, whatever the size of the table. So a run of places of a small table becomes a
run of places of a larger one, and a table can move into a larger one piece by piece.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.columns import zeros
from prefixd.cache.index.keys.key_hash import HASH_BITS, Hashes

Rows = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class ProbeTable:
    """Rows by the hash of their key. The caller compares keys; the table only knows hashes.

    Args:
        places: a power of two; the table is meant to be at most half full.
    """

    __slots__ = ("entries", "mask", "shift", "view")

    def __init__(self, places: int) -> None:
        self.entries: npt.NDArray[np.int32] = zeros(places, np.int32)
        """[places]: a row + 1, or 0 for a free place, as is memory that was never written."""
        self.view: memoryview[int] = self.entries.data
        """The same, several times faster for one value."""
        self.mask = places - 1
        self.shift = HASH_BITS + 1 - places.bit_length()
        """A search begins at the hash >> shift, and goes on to the next place & mask."""

    def __len__(self) -> int:
        """Places."""
        return self.mask + 1

    def homes(self, hashes: Hashes) -> Rows:
        """The places where the searches begin."""
        return (hashes >> np.uint32(self.shift)).astype(np.int64)

    def enter(self, rows: Rows, hashes: Hashes) -> None:
        """Enters rows that are not in the table; if several meet at a free place, one stays and the others go on."""
        entries, at = rows.astype(np.int32) + np.int32(1), self.homes(hashes)
        while len(entries):
            free = self.entries[at] == 0
            self.entries[at[free]] = entries[free]
            left = self.entries[at] != entries
            entries, at = entries[left], at[left] + 1 & self.mask

    def find_rows(self, rows: Rows, hashes: Hashes) -> Rows:
        """The places of rows, -1 for rows that are not in the table."""
        places = self.homes(hashes)
        searching = np.arange(len(rows))
        while len(searching):
            at = places[searching]
            there = self.entries[at]
            places[searching[there == 0]] = -1
            searching = searching[(there != 0) & (there != rows[searching] + 1)]
            places[searching] = places[searching] + 1 & self.mask
        return places

    def behind(self, places: Rows) -> Rows:
        """The places of entries between each of `places` and the next free place, each once.

        `places` were freed just now: searches for the entries behind them may have passed there.
        """
        found = [np.zeros(0, np.int64)]
        at = places + 1 & self.mask
        while len(at := at[self.entries[at] != 0]):
            found.append(at)
            at = at + 1 & self.mask
        return np.concatenate(found)
