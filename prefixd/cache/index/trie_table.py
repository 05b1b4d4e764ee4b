"""The memory of a trie: a row a block, a column a numpy array, and the table of keys."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.columns import ColumnMemory, Reserve, reserve_addresses
from prefixd.cache.index.keys.key_index import KeyIndex, Rows, process_masks

GPU, CPU, DISK, REMOTE, NONE = 0, 1, 2, 3, 4
TIERS = 4
NO_SLOT = -1
NOWHERE = -1  # namespace of a row whose block was removed


class TrieTable:
    """Columns, valid below `rows`, and the free rows among them, which are used again.

    Args:
        block_tokens: tokens a block.
        parts: parts of a block.
        groups: KV groups of a block.
        reserve: where memory comes from.
    """

    def __init__(self, block_tokens: int, parts: int, groups: int = 1, reserve: Reserve = reserve_addresses) -> None:
        self.rows = 0  # rows ever used
        self.free = array("i")
        self._blocks_of = np.zeros(0, np.int64)  # rows that hold a block, by namespace
        self._capacity = 0
        self._keys = KeyIndex(reserve=reserve)
        self._masks = process_masks()
        self._memory = ColumnMemory(reserve)
        self._set_widths(block_tokens, parts, groups)
        self.parent = np.empty(0, np.int32)
        self.namespace = np.empty(0, np.int32)
        self.depth = np.empty(0, np.int32)
        self.children = np.empty(0, np.int32)
        self.first_child = np.empty(0, np.int32)
        self.next_sibling = np.empty(0, np.int32)
        self.previous_sibling = np.empty(0, np.int32)
        self.generation = np.empty(0, np.int32)
        self.keep = np.empty(0, np.int32)
        self.pinned = np.empty(0, np.bool_)
        self.last_used = np.empty(0, np.float64)
        self.uses = np.empty(0, np.uint8)  # uses after the first; 255 means 255 or more
        self.hits = np.empty(0, np.uint32)  # prompts whose cached prefix ended with this block
        self.any_part = np.empty(0, np.uint8)  # tiers that have any part, a bit each
        self.available = np.empty(0, np.uint8)  # KV groups that some tier offers, a bit each
        self.expired = np.empty(0, np.uint8)  # KV groups that only shorter prefixes need
        self.nearest = np.empty(0, np.int8)
        self.priority = np.empty(0, np.int8)  # given by a caller, valid until `priority_until`
        self.priority_until = np.empty(0, np.float64)  # seconds of the cache's clock
        self.retained_groups = np.empty(0, np.uint8)  # groups with bytes, if the priority is above 0
        self.decoded = np.empty(0, np.uint8)  # KV groups of which memory has bytes from a lossy copy, a bit each
        self.errors = np.empty((0, 2), np.float32)  # largest and RMS error of lossy copies
        self.there = _by_tier(0, (), np.uint8)  # KV groups of which the tier has every part
        self.tier_children = _by_tier(0, (), np.int32)
        self.entered = _by_tier(0, (), np.float64)
        self.rank = _by_tier(0, (), np.float64)  # the eviction policy's own number

    def _set_widths(self, block_tokens: int, parts: int, groups: int) -> None:
        """Makes the columns anew whose width is the tokens, parts or groups of a block; no row has a block.

        The other columns stay, so that a row and generation of a removed block never match another block.
        """
        self.tokens = np.empty((0, block_tokens), np.uint32)
        self.slots = _by_tier(0, (parts,), np.int64)
        self.checksums = np.empty((0, parts), np.uint64)
        self.checksummed = np.empty((0, parts), np.bool_)  # the CPU copy's bytes are those of the checksums
        self.coded_bytes = np.empty((0, parts), np.uint32)  # stored bytes of the coded copy on disk; 0: raw, or none
        self.coded_checksums = np.empty((0, parts), np.uint64)  # of what is stored
        self.holds = _by_tier(0, (groups,), np.int32)
        for name in _PART_COLUMNS if self._capacity else ():
            self._memory.forget(name)
            grown = self._memory.grown(name, getattr(self, name), self._capacity, planes=name in _TIER_COLUMNS)
            setattr(self, name, grown)
        self.slots[: self.rows] = NO_SLOT

    def blocks_of(self, namespace: int) -> int:
        """The number of blocks of a namespace."""
        return int(self._blocks_of[namespace]) if namespace < len(self._blocks_of) else 0

    def blocks_by_namespace(self) -> npt.NDArray[np.int64]:
        """The number of blocks of each namespace, by ordinal; a copy."""
        return self._blocks_of.copy()

    def _count_blocks(self, namespaces: npt.NDArray[Any], change: int) -> None:
        """Counts added (1) or removed (-1) blocks, given the namespace of each."""
        if (most := int(namespaces.max(initial=-1)) + 1) > len(self._blocks_of):
            more = np.zeros(most + 64 - len(self._blocks_of), np.int64)
            self._blocks_of = np.concatenate([self._blocks_of, more])
        self._blocks_of[:most] += change * np.bincount(namespaces, minlength=most)

    def reserve(self, rows: int) -> None:
        """Makes room for `rows` more blocks."""
        needed = self.rows + rows - len(self.free)
        if needed > self._capacity:
            self._grow(max(1024, needed + needed // 2))

    def take_rows(self, count: int) -> Rows:
        """Rows for new blocks: free rows with old values first, then new rows with all columns 0."""
        self.reserve(count)
        kept = max(len(self.free) - count, 0)
        old = np.array(self.free[kept:], np.int64)[::-1]
        del self.free[kept:]
        new = np.arange(self.rows, self.rows + count - len(old))
        self.rows += len(new)
        return np.concatenate([old, new])

    def _write_ahead(self, first: int, tier: int) -> None:
        """Prepares columns for rows from `first` on that are all about to be written, with copies in `tier`."""
        for name in (*_WRITTEN, "checksums"):
            self._memory.write_ahead(name, first, self.rows)
        for name in _WRITTEN_BY_TIER:
            self._memory.write_ahead(name, first, self.rows, tier)

    def _grow(self, capacity: int) -> None:
        self._keys.reserve(capacity)
        for name in _COLUMNS:
            setattr(self, name, self._memory.grown(name, getattr(self, name), capacity))
        for name in _TIER_COLUMNS:
            setattr(self, name, self._memory.grown(name, getattr(self, name), capacity, planes=True))
        self._capacity = capacity


def add_each(column: npt.NDArray[Any], rows: npt.NDArray[np.integer[Any]], change: int) -> None:
    """`column[rows] += change`, for each time that a row occurs in `rows`."""
    if (rows[1:] > rows[:-1]).all():
        column[rows] += change
    else:
        np.add.at(column, rows, change)


def _by_tier(rows: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros, [rows, TIERS, *shape]; a tier that is never written takes no memory."""
    return np.zeros((TIERS, rows, *shape), dtype).swapaxes(0, 1)


_COLUMNS = (
    "tokens",
    "parent",
    "namespace",
    "depth",
    "children",
    "first_child",
    "next_sibling",
    "previous_sibling",
    "generation",
    "keep",
    "pinned",
    "last_used",
    "uses",
    "hits",
    "any_part",
    "available",
    "expired",
    "nearest",
    "priority",
    "priority_until",
    "retained_groups",
    "checksums",
    "checksummed",
    "coded_bytes",
    "coded_checksums",
    "decoded",
    "errors",
)
_WRITTEN = ("tokens", "parent", "namespace", "depth", "first_child", "last_used")
"""Columns of some bytes that `insert_all` writes in every new row."""
_WRITTEN_BY_TIER = ("slots", "entered")
"""The same of `put_copies`."""
_TIER_COLUMNS = ("slots", "there", "holds", "tier_children", "entered", "rank")
_PART_COLUMNS = ("tokens", "slots", "checksums", "checksummed", "coded_bytes", "coded_checksums", "holds")
"""Those whose width is the tokens, parts or groups of a block."""
