"""Finds the blocks of a prompt of any length, and the ancestors of blocks, in slices for the event loop.

If a namespace has a common one beside it, a path consists of blocks of both:

```
own rows       17   18   40   41   52     the tenant's own; 17 and 18 have no bytes and exist as ancestors of 40
common rows    60   61   62               no tenant's: k tenants have computed these blocks
path           60   61   62   41   52     the common row if it has all KV groups that the own row has
```
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import ExhaustedError
from prefixd.base.long_work.pacer import give_way
from prefixd.base.long_work.steps import in_thread
from prefixd.cache.index.keys.block_keys import HASHED_AT_ONCE, BlockChain
from prefixd.cache.index.known_path import KnownPath
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.holds import Hold
from prefixd.cache.rules import longest_stored

_WALKED_AT_ONCE = 8192  # blocks up a prompt: 3 ms
_ENTERED_AT_ONCE = 512  # blocks: a millisecond
_ORDERED_AT_ONCE = 2048  # blocks, in no order before: a millisecond; more are ordered in a thread


async def find_path(trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Rows:
    """The rows of a prompt's first blocks, own and common ones, correct when this returns (see `find_own`)."""
    own = await find_own(trie, namespace, chain, limit)
    if namespace.common is None:
        return own
    generations = trie.generation[own]
    common = await find_own(trie, namespace.common, chain, limit)
    same = trie.generation[own] == generations
    return compose(trie, own if same.all() else own[: int(same.argmin())], common)


def path_now(trie: Trie, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Rows:
    """As `find_path`, but in one turn of the event loop: some 0.5 us for each own or common block."""
    own = trie.nodes(namespace.root, chain, limit)
    if namespace.common is None:
        return own
    return compose(trie, own, trie.nodes(namespace.common.root, chain, limit))


class PromptPath:
    """`path_now` of one prompt, again and again: each search continues where the last one ended (`KnownPath`)."""

    __slots__ = ("_common", "_own")

    def __init__(self) -> None:
        self._own = KnownPath()
        self._common = KnownPath()

    def find(self, trie: Trie, namespace: Namespace, chain: BlockChain, limit: int) -> Rows:
        """As `path_now`; always the same prompt, which may have grown, in the same namespace."""
        own = self._own.find(trie, namespace.root, chain, limit)
        if namespace.common is None:
            return own
        return compose(trie, own, self._common.find(trie, namespace.common.root, chain, limit))


def compose(trie: Trie, own: Rows, common: Rows) -> Rows:
    """For each block the common row if it has bytes, and all KV groups that the own row has; else the own row."""
    both = min(len(own), len(common))
    has, others = trie.available[own[:both]], trie.available[common[:both]]
    better = ((has & ~others) == 0) & (others != 0)
    longer = own if len(own) > both else common
    return np.concatenate([np.where(better, common[:both], own[:both]), longer[both:]])


async def enter_own(hold: Hold, namespace: Namespace, chain: BlockChain, blocks: int, now_s: float) -> None:
    """Extends `hold`, which is empty, by the namespace's own rows of a prompt's first `blocks`, in slices; adds missing
    rows without bytes.

    A row's parent is in the same namespace, so blocks can be entered behind common ones only after these rows. They
    stay while they are held or have children. There are fewer rows if a key is another block's, or if the hold ends
    meanwhile.
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

    Blocks are not held: between two slices they may be removed and their rows reused. So this compares generations at
    the end, and the result is correct at that moment: it ends before the first block that was removed. Blocks that were
    added meanwhile may be found or not.
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
    """`rows` and all their ancestors, each once. The caller holds `rows`.

    A held block keeps its ancestors, so the result stays correct while others run.
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


async def by_chain(trie: Trie, rows: Rows) -> Rows:
    """`rows`, each given once, with parents before their children, and blocks that continue each other one behind the
    other: so slots that are allocated in this order are adjacent, and few reads load a prompt. The caller holds `rows`.

    A block comes right behind its parent if that is given and no sibling does. Where chains of such blocks begin at the
    same depth, the one whose first block is given first comes first. While no thread can be started, many blocks are
    ordered by depth alone.
    """
    parent, depth = trie.parent[rows], trie.depth[rows]
    if len(rows) <= _ORDERED_AT_ONCE:
        return rows[_chain_order(rows, parent, depth)]
    try:
        return rows[await in_thread(lambda: _chain_order(rows, parent, depth))]
    except ExhaustedError:
        return rows[np.argsort(depth, kind="stable")]


def _chain_order(rows: Rows, parent: npt.NDArray[np.int32], depth: npt.NDArray[np.int32]) -> Rows:
    """Positions in `rows` as `by_chain` orders them."""
    by_row = np.argsort(rows)
    at = by_row[np.minimum(np.searchsorted(rows, parent, sorter=by_row), len(rows) - 1)]
    behind = np.flatnonzero(rows[at] == parent)
    above, first = np.unique(at[behind], return_index=True)
    head = np.arange(len(rows))  # of each block's chain; until the last step only of the part above it that is known
    head[behind[first]] = above
    while (further := head[head] != head).any():
        head[further] = head[head[further]]
    # A chain that begins beside another's block begins deeper than that chain.
    return np.lexsort((depth, head, depth[head]))


def present(trie: Trie, path: Rows, parts: Sequence[int], first_block: int, level: int) -> int:
    """The length in blocks of the longest beginning of a prompt that has `parts` of every block that the rules need.

    A part counts if it is in the tier of this `level`, even if other ranks have not committed theirs yet. Bytes that
    only a shared store has do not count: the writer has them nearer. For blocks before `first_block` only groups count
    that every longer prefix needs; without such a group these blocks do not even need a row.

    Args:
        trie: the prompt's trie.
        path: the rows of the prompt's first blocks.
        parts: the parts of a block that the writer has.
        first_block: the writer has bytes from this block on.
        level: the level of the shared tier.
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
