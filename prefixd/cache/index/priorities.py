"""The priorities of blocks, and the bytes of blocks with a priority above 0."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.block_table import BlockTable
from prefixd.cache.index.keys.key_index import Rows
from prefixd.cache.index.trie_table import NO_SLOT
from prefixd.cache.rules import GroupMask, GroupRule


class PriorityColumns(BlockTable):
    """The priorities of blocks, and the bytes of those above 0. Arguments as for `BlockTable`."""

    def __init__(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule] | None = None) -> None:
        super().__init__(block_tokens, part_bytes, rules)
        self.prioritized = 0
        """Blocks with a priority, including ended ones that no sweep has removed yet."""
        self.retained_bytes: Counter[int] = Counter()
        """By namespace, bytes of blocks with a priority above 0 that a tier has, each once; ended ones as above."""
        self.on_retained: Callable[[int, int], None] = lambda namespace, change: None
        """Called with a namespace's ordinal and the change of its `retained_bytes`."""

    @property
    def has_priorities(self) -> bool:
        """Whether any block may have a priority other than 0."""
        return self.prioritized > 0

    def prioritize(
        self, rows: Rows, priority: int | npt.NDArray[np.int8], until_s: float | npt.NDArray[np.float64]
    ) -> None:
        """Gives m different blocks a priority, from -100 to 100, until a time; 0 removes the priority.

        Args:
            rows: [m] blocks.
            priority: [m], or one for all blocks.
            until_s: [m], or one for all blocks; infinity for ever.
        """
        before = int(np.count_nonzero(self.priority[rows]))
        self.priority[rows] = priority
        self.priority_until[rows] = until_s
        self.prioritized += int(np.count_nonzero(self.priority[rows])) - before
        self._count_retained(rows)

    def _count_retained(self, rows: Rows) -> None:
        """Updates `retained_bytes` after the priorities or the slots of different rows have changed."""
        rows = rows[(self.priority[rows] > 0) | (self.retained_groups[rows] != 0)]
        groups = np.where(self.priority[rows] > 0, self.groups_there(rows), np.uint8(0))
        change = self.group_bytes[groups] - self.group_bytes[self.retained_groups[rows]]
        self.retained_groups[rows] = groups
        namespaces = self.namespace[rows]
        for namespace in np.unique(namespaces[change != 0]).tolist():
            more = int(change[namespaces == namespace].sum())
            self.on_retained(namespace, more)
            self.retained_bytes[namespace] += more
            if not self.retained_bytes[namespace]:
                del self.retained_bytes[namespace]

    def groups_there(self, rows: Rows) -> GroupMask:
        """[len(rows)]: the KV groups of which a tier has at least one part."""
        has = (self.slots[rows] != NO_SLOT).any(axis=1)
        groups = np.zeros(len(rows), np.uint8)
        for group in self.groups:
            groups |= np.uint8(group.mask) * has[:, list(group.parts)].any(axis=1)
        return groups

    def priorities(self, rows: Rows | slice, now_s: float) -> npt.NDArray[np.int8]:
        """[len(rows)]: the priority of each block at `now_s`; 0 if it has none or it has ended."""
        priorities: npt.NDArray[np.int8] = np.where(self.priority_until[rows] > now_s, self.priority[rows], np.int8(0))
        return priorities
