"""Finding the blocks of a prompt of any length, and those before a block, without holding the event loop."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys import HASHED_AT_ONCE, BlockChain
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.pacer import give_way

_WALKED_AT_ONCE = 8192  # blocks up a prompt: 3 ms


async def find_path(trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Rows:
    """`Trie.nodes` in slices of some 2,048 blocks, about 1 ms each; shorter prompts are found in one turn.

    Nothing is held: blocks may go, and their rows be given to others, between two slices. So the rows' generations are
    compared at the end, and what is returned is true at that moment. It ends before the first block that has gone.
    Blocks that came meanwhile may be found or not.
    """
    slices: list[Rows] = []
    generations: list[npt.NDArray[np.int32]] = []
    for rows in trie.walk(namespace.root, chain, limit):
        slices.append(rows)
        if len(rows) < HASHED_AT_ONCE:  # the last one
            break
        generations.append(trie.generation[rows])
        await give_way()
    if len(slices) == 1:
        return slices[0]
    path = np.concatenate(slices)
    earlier = path[: len(path) - len(slices[-1])]
    same = trie.generation[earlier] == np.concatenate(generations)
    return path if same.all() else path[: int(same.argmin())]


async def find_ancestry(trie: Trie, rows: Rows) -> Rows:
    """`rows`, which somebody holds, and every block that they continue, each once.

    What is held keeps its ancestors, so nothing of this changes while others run.
    """
    seen: set[int] = set()
    turn = _WALKED_AT_ONCE
    parent = trie.parent
    for row in rows.tolist():
        while row >= 0 and row not in seen:
            seen.add(row)
            row = int(parent[row])
            turn -= 1
            if not turn:
                turn = _WALKED_AT_ONCE
                await give_way()
                parent = trie.parent  # the table may have grown
    return np.fromiter(seen, np.int64, len(seen))
