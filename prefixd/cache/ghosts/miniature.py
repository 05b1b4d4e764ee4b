"""A tier in miniature: blocks without bytes, evicted by a policy of the daemon's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixd_swap import EvictionPolicy, UseHistory, choose_victims
from prefixd_swap.eviction.use_history import REMEMBERED

_TIER = 0
_HASHED = np.uint64(0x9E3779B97F4A7C15)


class Miniature:
    """A tier that has room for a number of blocks. A policy sees what it sees in the daemon; leaves go first.

    Args:
        blocks: blocks have numbers below this one; a number stands for a whole prefix.
        rows: the most blocks in the tier at a time.
        policy: chooses the blocks to evict; of its own.
        block_tokens, block_bytes: sizes of a block.
        remembered: the most evicted blocks that a policy with a memory remembers.
    """

    def __init__(
        self,
        blocks: int,
        rows: int,
        policy: EvictionPolicy,
        *,
        block_tokens: int = 512,
        block_bytes: int = 1 << 20,
        remembered: int = REMEMBERED,
    ) -> None:
        self.capacity = rows
        """Blocks that it has room for."""
        self._table = BlockRows(blocks, rows, block_tokens, block_bytes)
        self._policy = policy
        self._uses = UseHistory(policy, remembered if policy.remembers else 0)

    def resize(self, capacity: int) -> None:
        """Makes it a tier of this many blocks: at least one, at most `rows`."""
        self.capacity = min(max(1, capacity), len(self._table.any_part))

    def use(self, path: npt.NDArray[np.int64], now_s: float) -> int:
        """Uses the blocks of a prompt and stores the missing ones as far as there is room; returns how many it found.

        The blocks that it finds are held meanwhile.
        """
        table, uses = self._table, self._uses
        rows = table.find(path)
        uses.accessed(table, rows, now_s)
        table.last_used[rows] = now_s
        table.held[rows] = True
        lacking = path[len(rows) : self.capacity]
        if (more := len(lacking) + table.blocks - self.capacity) > 0:
            victims = table.victims(more, self._policy)
            table.remove(victims)
            uses.removed(table, np.array(victims, np.int64), _TIER)
            lacking = lacking[: max(self.capacity - table.blocks, 0)]
        if len(lacking):
            parent = int(rows[-1]) if len(rows) else -1
            fresh = table.insert(lacking, len(rows), parent, now_s)
            uses.admitted(table, fresh, _TIER, now_s)
        table.held[rows] = False
        return len(rows)

    def remove(self, numbers: npt.NDArray[np.int64]) -> None:
        """Removes blocks, which did not leave by eviction. What continues them continues their nearest ancestor."""
        table = self._table
        gone = table.row_of[numbers].astype(np.int64)
        gone = gone[gone >= 0]
        table.remove_between(gone)
        self._uses.removed(table, gone, _TIER, evicted=False)


class BlockRows:
    """The blocks of a tier, as eviction policies see a trie (`prefixd_swap.eviction.BlockTable`).

    Args:
        blocks: blocks have numbers below this one.
        capacity: most blocks in the tier at a time.
        block_tokens, block_bytes: sizes of a block.
    """

    ordinal = 0

    def __init__(self, blocks: int, capacity: int, block_tokens: int, block_bytes: int) -> None:
        self.block_tokens = block_tokens
        self.block_bytes = block_bytes
        self.last_used = np.zeros(capacity)
        self.entered = np.zeros((capacity, 1))
        self.rank = np.zeros((capacity, 1))
        self.uses = np.zeros(capacity, np.uint8)
        self.any_part = np.zeros(capacity, np.uint8)
        self.parent = np.full(capacity, -1)
        self.depth = np.zeros(capacity, np.int64)
        self.namespace = np.zeros(capacity, np.int32)
        self.children = np.zeros(capacity, np.int64)
        self.held = np.zeros(capacity, np.bool_)
        self.block = np.zeros(capacity, np.int64)
        self.free = list(range(capacity))[::-1]
        self.row_of = np.full(blocks, -1, np.int32)

    def find(self, path: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of the longest prefix of `path` in the tier."""
        rows = self.row_of[path].astype(np.int64)
        found: npt.NDArray[np.int64] = rows if (rows >= 0).all() else rows[: int((rows < 0).argmax())]
        return found

    def insert(self, path: npt.NDArray[np.int64], first: int, parent: int, now_s: float) -> npt.NDArray[np.int64]:
        """Inserts blocks from position `first` of their prefix on, as children of row `parent`; there must be room."""
        rows = np.array([self.free.pop() for _ in path], np.int64)
        parents = np.concatenate([[parent], rows[:-1]])
        self.parent[rows], self.depth[rows], self.block[rows] = parents, np.arange(first, first + len(rows)), path
        self.last_used[rows] = self.entered[rows, _TIER] = now_s
        self.uses[rows], self.any_part[rows], self.children[rows] = 0, 1 << _TIER, 0
        self.children[parents[parents >= 0]] += 1
        self.row_of[path] = rows
        return rows

    @property
    def blocks(self) -> int:
        """Blocks in the tier."""
        return len(self.any_part) - len(self.free)

    def remove_between(self, gone: npt.NDArray[np.int64]) -> None:
        """Removes blocks that others may continue; those continue the nearest ancestor that stays."""
        self.any_part[gone] = 0
        self.row_of[self.block[gone]] = -1
        here = np.flatnonzero(self.any_part)
        parents = self.parent[here]
        while len(orphans := np.flatnonzero((parents >= 0) & (self.any_part[parents] == 0))):
            parents[orphans] = self.parent[parents[orphans]]
        self.parent[here] = parents
        self.children = np.bincount(parents[parents >= 0], minlength=len(self.children))
        self.free.extend(gone.tolist())

    def remove(self, rows: Sequence[int]) -> None:
        """Removes blocks, children before parents."""
        gone = np.array(rows, np.int64)
        self.any_part[gone] = 0
        self.row_of[self.block[gone]] = -1
        parents = self.parent[gone]
        np.subtract.at(self.children, parents[parents >= 0], 1)
        self.free.extend(rows)

    def victims(self, count: int, policy: EvictionPolicy) -> list[int]:
        """Up to `count` blocks that are not held, in the policy's order, leaves before their parents."""
        leaves = np.flatnonzero((self.any_part != 0) & (self.children == 0) & ~self.held)
        gone: dict[int, int] = {}

        def reveal(row: int) -> tuple[int, float] | None:
            parent = int(self.parent[row])
            gone[parent] = gone.get(parent, 0) + 1
            if parent < 0 or gone[parent] < self.children[parent] or self.held[parent]:
                return None
            return parent, policy.score(self, parent, _TIER)

        return choose_victims(count, leaves, policy.scores(self, leaves, _TIER), reveal)

    def compression(self, rows: npt.NDArray[np.int64], tier: int) -> float:
        """Every block has as many bytes."""
        return 1.0

    def keys(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: hashes of the blocks' numbers."""
        hashes = (self.block[rows].astype(np.uint64) + np.uint64(1)) * _HASHED
        return np.stack([hashes, hashes ^ (hashes >> np.uint64(29))], axis=1).view(np.uint8)
