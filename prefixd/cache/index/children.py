"""The children of each block, as a list of siblings in three columns of the trie's table.

    row                1     2     3     4      prompts 1-2, 1-3-4
    first_child        2     .     4     .
    next_sibling       .    ~3     .     .
    previous_sibling   .     .    ~2     .      the first sibling has none

Siblings are stored as `~row`, so that none is 0: most blocks have no sibling, and memory that is never written costs
nothing. A walk over descendants takes time by their number, not by the size of the table. The parent of a prompt's
first block is the namespace's root, which has no list of children.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.key_index import Rows

NO_ROW = -1

Int32s = npt.NDArray[np.int32]


class Linked(Protocol):
    """A table with these columns."""

    rows: int
    parent: Int32s
    depth: Int32s
    generation: Int32s
    first_child: Int32s
    next_sibling: Int32s
    previous_sibling: Int32s


class MovedError(RuntimeError):
    """The block at which a walk had stopped was removed; begin again."""


def link(table: Linked, rows: Rows, parents: Rows) -> None:
    """Adds m new blocks, whose siblings are 0, to their parents' lists of children; negative parents are roots."""
    table.first_child[rows] = NO_ROW
    inner = parents >= 0
    rows, parents = rows[inner], parents[inner]
    if not len(rows):
        return
    order = np.argsort(parents, kind="stable")
    rows, parents = rows[order], parents[order]
    same = parents[1:] == parents[:-1]  # neighbours here are siblings
    table.next_sibling[rows[:-1][same]] = ~rows[1:][same]
    table.previous_sibling[rows[1:][same]] = ~rows[:-1][same]
    eldest = np.concatenate([[True], ~same])
    youngest = np.concatenate([~same, [True]])
    behind = table.first_child[parents[youngest]]
    there = behind >= 0
    table.next_sibling[rows[youngest][there]] = ~behind[there]
    table.previous_sibling[behind[there]] = ~rows[youngest][there]
    table.first_child[parents[eldest]] = rows[eldest]


def unlink_all(table: Linked, rows: Rows, parents: Rows) -> None:
    """Removes m blocks from their parents' lists; their children, if any, come before them in `rows`."""
    first_child, next_sibling, previous_sibling = (
        column.data for column in (table.first_child, table.next_sibling, table.previous_sibling)
    )
    for row, parent in zip(rows.tolist(), parents.tolist(), strict=True):
        if parent < 0:
            continue
        before, behind = ~previous_sibling[row], ~next_sibling[row]
        if before >= 0:
            next_sibling[before] = ~behind
        else:
            first_child[parent] = behind
        if behind >= 0:
            previous_sibling[behind] = ~before


class Descendants:
    """Walks over blocks and their descendants: each once, parents before children.

    Others may change the trie between two calls of `take`. The walk may or may not meet blocks that are added or
    removed meanwhile.

    Args:
        table: the trie.
        roots: different rows.
    """

    def __init__(self, table: Linked, roots: Rows) -> None:
        self.done = not len(roots)
        """Whether the walk has ended."""
        self._table = table
        self._roots = iter(roots[np.argsort(table.depth[roots], kind="stable")].tolist())
        self._met = np.zeros(table.rows, np.bool_)
        self._root = self._at = NO_ROW
        self._generation = 0

    def take(self, steps: int) -> list[int]:
        """Continues the walk for about `steps` steps, forwards and backwards; returns the blocks that it met.

        Raises:
            MovedError: the block at which the last call stopped was removed.
        """
        table = self._table
        if self._at != NO_ROW and table.generation[self._at] != self._generation:
            raise MovedError("the block at which the walk had stopped was removed")
        if len(self._met) < table.rows:
            self._met = np.concatenate([self._met, np.zeros(table.rows - len(self._met), np.bool_)])
        # Memoryviews are several times faster than numpy for one value; they end with this call, since columns grow.
        first_child, next_sibling, parent = table.first_child.data, table.next_sibling.data, table.parent.data
        met = self._met.data
        found: list[int] = []
        at, root = self._at, self._root
        while steps > 0 and not self.done:
            steps -= 1
            if at == NO_ROW:
                row = root = next(self._roots, NO_ROW)
                if root == NO_ROW:
                    self.done = True
                elif met[root]:  # it is a descendant of an earlier root
                    row = NO_ROW
            else:
                row = first_child[at]
                while row == NO_ROW and at != root:
                    steps -= 1
                    row = ~next_sibling[at]
                    at = parent[at]
            at = row
            if at != NO_ROW:
                met[at] = True
                found.append(at)
        self._at, self._root = at, root
        if at != NO_ROW:
            self._generation = int(table.generation[at])
        return found
