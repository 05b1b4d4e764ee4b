"""Counts what is stored on disk of each tenant's blocks, and how many bytes that is when it is decoded.

Kept as a count, since a scrape of the metrics would otherwise read the sizes of a million blocks; the audit compares it
with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.trie import Rows, Trie

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class DiskBytes:
    """Bytes of blocks on disk.

    Attributes:
        stored: what is written of them, without the padding of slots.
        exact: the same parts in memory.
    """

    stored: int
    exact: int


class StoredBytes:
    """The bytes on disk, by tenant."""

    def __init__(self) -> None:
        self._counted = np.zeros((1, 2), np.int64)  # by tenant: stored and exact

    def count(self, trie: Trie, rows: Rows, owners: Rows, there: Bools, sign: int) -> None:
        """Counts parts that came to disk (1), with their stored bytes in the trie already, or will leave it (-1).

        Args:
            trie: the blocks' trie.
            rows: [m] blocks.
            owners: [m] ordinals of their tenants.
            there: [m, parts]: which parts.
            sign: 1 or -1.
        """
        if not len(rows):
            return
        if (lacking := int(owners.max()) + 1 - len(self._counted)) > 0:
            self._counted = np.concatenate([self._counted, np.zeros((lacking, 2), np.int64)])
        exact = there @ np.array(trie.part_bytes, np.int64)
        stored = np.where(there, trie.stored_bytes(rows), 0).sum(axis=1) if trie.has_coded else exact
        np.add.at(self._counted, owners, sign * np.stack([stored, exact], axis=1))

    def clear(self) -> None:
        """Forgets all, before everything is counted anew."""
        self._counted[:] = 0

    def counted(self, tenants: int) -> npt.NDArray[np.int64]:
        """[tenants, 2]: stored and exact bytes of the first tenants; a copy."""
        found = np.zeros((tenants, 2), np.int64)
        known = self._counted[:tenants]
        found[: len(known)] = known
        return found

    def of_tenant(self, ordinal: int) -> DiskBytes:
        """The bytes of one tenant's blocks."""
        return DiskBytes(*self.counted(ordinal + 1)[ordinal].tolist())

    @property
    def total(self) -> DiskBytes:
        """The bytes of all blocks."""
        return DiskBytes(*self._counted.sum(axis=0).tolist())
