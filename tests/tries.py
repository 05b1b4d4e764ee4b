"""A trie's rows as tests look at them: in one turn of the event loop, and one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd.cache.index.children import Descendants
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.index.trie_table import NOWHERE
from prefixd.cache.moving.mover import Mover


def used_rows(trie: Trie) -> Rows:
    """All rows that hold a block."""
    return np.flatnonzero(trie.namespace[: trie.rows] != NOWHERE)


def subtree_rows(trie: Trie, roots: Rows) -> list[int]:
    """`roots`, different rows, and their descendants: each row once, parents before children."""
    walk = Descendants(trie, roots)
    found: list[int] = []
    while not walk.done:
        found += walk.take(1 << 20)
    return found


def match_rows(trie: Trie, root: int, chain: BlockChain, limit: int | None = None) -> Rows:
    """The rows of the longest prefix of `chain` that every KV group's rule allows."""
    return trie.usable(trie.nodes(root, chain, limit))


def is_removable(trie: Trie, row: int) -> bool:
    """Whether the block exists and nothing continues, keeps or pins it."""
    return len(trie.all_removable([row])) == 1


def remove_row(trie: Trie, row: int) -> None:
    """Removes a removable block without copies, and the ancestors that stayed only for it."""
    assert trie.remove_bare([row]), f"row {row} is not removable"


async def forget_blocks(mover: Mover, trie: Trie, rows: Sequence[int]) -> int:
    """Drops removable blocks, children before parents, from every tier; returns how many, once that is durable."""
    await mover.checksums.wait_for_all()
    going, on_disk = mover.disk.removals.forget_in_memory(trie, rows)
    await mover.disk.removals.remove(trie, on_disk)
    return going
