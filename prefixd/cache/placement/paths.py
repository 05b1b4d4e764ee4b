"""Finding the blocks of a prompt of any length, and those before a block, without holding the event loop.

Where a namespace has a common one beside it, a path is composed of both, block by block:

```
own rows       17   18   40   41   52     the tenant's own; 17 and 18 have no bytes, they are there for 40's sake
common rows    60   61   62               no tenant's: k tenants have computed these blocks
path           60   61   62   41   52     common where that has all that the own one has
```
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.cache.index.keys.block_keys import HASHED_AT_ONCE, BlockChain
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.holds import Hold
from prefixd.cache.rules import longest_stored

_WALKED_AT_ONCE = 8192  # blocks up a prompt: 3 ms
_ENTERED_AT_ONCE = 512  # blocks: a millisecond


async def find_path(trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Rows:
    """The rows of a prompt's first blocks, its own and common ones; see `find_own` for what may change meanwhile."""
    own = await find_own(trie, namespace, chain, limit)
    if namespace.common is None:
        return own
    generations = trie.generation[own]
    common = await find_own(trie, namespace.common, chain, limit)
    same = trie.generation[own] == generations
    return compose(trie, own if same.all() else own[: int(same.argmin())], common)


def path_now(trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Rows:
    """As `find_path`, in one turn: it holds the event loop for some 0.5 us a block of each of both."""
    own = trie.nodes(namespace.root, chain, limit)
    if namespace.common is None:
        return own
    return compose(trie, own, trie.nodes(namespace.common.root, chain, limit))


def compose(trie: Trie, own: Rows, common: Rows) -> Rows:
    """Of each block the common row where that has all KV groups that the own one has, and any; else the own one."""
    both = min(len(own), len(common))
    has, others = trie.available[own[:both]], trie.available[common[:both]]
    better = ((has & ~others) == 0) & (others != 0)
    longer = own if len(own) > both else common
    return np.concatenate([np.where(better, common[:both], own[:both]), longer[both:]])


async def enter_own(hold: Hold, namespace: Namespace, chain: BlockChain, blocks: int, now_s: float) -> None:
    """Extends `hold`, which has none, by the namespace's own rows of a prompt's first `blocks`, in slices; makes those
    that are not there, without bytes.

    A block's row continues one of its own namespace, so who enters blocks behind common ones needs these first. They
    stay while they are held, or a block continues them. There are fewer where a key is another block's, and when the
    hold ends meanwhile.
    """
    while not hold.ended and (start := len(hold.rows)) < blocks:
        end = min(start + _ENTERED_AT_ONCE, blocks)
        parent = int(hold.rows[-1]) if start else namespace.root
        keys, tokens = chain.key_rows(start, end), chain.token_rows[start:end]
        rows, _ = hold.trie.insert_path(parent, namespace.ordinal, keys, tokens, now_s)
        hold.extend(rows)
        if len(rows) < end - start:
            break
        await give_way()


async def find_own(trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Rows:
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


def present(trie: Trie, path: Rows, parts: Sequence[int], first_block: int, level: int) -> int:
    """The longest beginning of a prompt, in blocks, that has at least `parts` of every block that the rules need.

    A part counts that is in the tier of that `level` already, though other ranks have yet to commit theirs. What only a
    shared store has does not count: it is farther away than what the writer has at hand. Of the
    blocks before `first_block` only those groups count that every longer prefix needs; where there is no such group,
    neither do they need a row.

    Args:
        trie: the prompt's trie.
        path: rows of the prompt's first blocks, as far as there are any.
        parts: the parts that are asked about.
        first_block: the writer has bytes from this block on.
        level: the shared tier's.
    """
    lasting = any(group.rule.lasting for group in trie.groups)
    available = np.zeros(len(path) if lasting else max(len(path), first_block), np.uint8)
    available[: len(path)] = trie.available_here(path)
    for group in trie.groups:
        if not group.rule.lasting:
            available[:first_block] |= np.uint8(group.mask)
    if len(parts) < len(trie.part_bytes):
        has = trie.slots[path, level] != NO_SLOT
        has[:, [part for part in range(len(trie.part_bytes)) if part not in parts]] = True
        for group in trie.groups:
            available[: len(path)] |= np.uint8(group.mask) * has[:, list(group.parts)].all(axis=1)
    return longest_stored(trie.groups, available)
