"""Replays a trace against one tier, which evicts blocks by an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd_swap import EvictionPolicy, UseHistory, choose_victims

_TIER = 0
_HASHED = np.uint64(0x9E3779B97F4A7C15)


class BlockRows:
    """The blocks of a tier, as eviction policies see a trie (`prefixd_swap.eviction.BlockTable`).

    Args:
        blocks: how many different blocks the trace has.
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
        self._row_of = np.full(blocks, -1)

    def find(self, path: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows of the longest prefix of `path` in the tier."""
        rows = self._row_of[path]
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
        self._row_of[path] = rows
        return rows

    def remove(self, rows: Sequence[int]) -> None:
        """Removes blocks, children before parents."""
        gone = np.array(rows, np.int64)
        self.any_part[gone] = 0
        self._row_of[self.block[gone]] = -1
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

    def keys(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: hashes of the blocks' numbers."""
        hashes = (self.block[rows].astype(np.uint64) + np.uint64(1)) * _HASHED
        return np.stack([hashes, hashes ^ (hashes >> np.uint64(29))], axis=1).view(np.uint8)


def replay(
    paths: Sequence[npt.NDArray[np.int32]],
    at_s: Sequence[float],
    blocks: int,
    capacity: int,
    policy: EvictionPolicy,
    progress: Callable[[], None] = lambda: None,
    *,
    block_tokens: int = 512,
    block_bytes: int = 1 << 20,
) -> int:
    """Counts the blocks that a tier of `capacity` blocks finds, under a policy without history.

    Each request holds the blocks that it finds, and then stores the missing ones, as far as there is room.

    Args:
        paths: for each request the numbers of its blocks, first to last; a number stands for a whole prefix.
        at_s: arrival of each request.
        blocks: how many different numbers there are, from 0 on.
        capacity: of the tier, in blocks.
        policy: chooses the blocks to evict.
        progress: called after each request.
        block_tokens, block_bytes: sizes of a block.
    """
    table = BlockRows(blocks, capacity, block_tokens, block_bytes)
    uses = UseHistory(policy) if policy.remembers else UseHistory(policy, 0)
    hits = 0
    for path, now_s in zip(paths, at_s, strict=True):
        rows = table.find(path.astype(np.int64))
        hits += len(rows)
        uses.accessed(table, rows, now_s)
        table.last_used[rows] = now_s
        table.held[rows] = True
        lacking = path[len(rows) : capacity].astype(np.int64)
        if len(lacking) > len(table.free):
            victims = table.victims(len(lacking) - len(table.free), policy)
            table.remove(victims)
            uses.removed(table, np.array(victims, np.int64), _TIER)
            lacking = lacking[: len(table.free)]
        if len(lacking):
            parent = int(rows[-1]) if len(rows) else -1
            fresh = table.insert(lacking, len(rows), parent, now_s)
            uses.admitted(table, fresh, _TIER, now_s)
        table.held[rows] = False
        progress()
    return hits
