"""Forgets many blocks in slices: a prefix with its descendants, a namespace, or everything.

The blocks are found first and then forgotten, children before parents. Others change the trie meanwhile, so a block is
identified by its row and generation: a row that has another block by then is skipped.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import SLICE_ROWS, Pacer, give_way
from prefixd.base.long_work.steps import in_thread
from prefixd.cache.disk.records import Identity
from prefixd.cache.index.children import Descendants, MovedError
from prefixd.cache.index.scan import slices
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.index.trie_table import NOWHERE
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespaces import Namespace, NamespaceRegistry
from prefixd.observability.eviction_journal import Reason, because

_WALK_STEPS = 1 << 11
_FORGOTTEN_AT_ONCE = 256
_DURABLE_AT_ONCE = 4096  # removals of one transaction of the disk's index


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """m blocks of a trie, children before parents."""

    trie: Trie
    rows: Rows
    generations: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.rows)

    async def of(self, namespaces: Collection[int]) -> FoundBlocks:
        """The blocks of some namespaces, by ordinal."""
        wanted, rows, generations = np.array(sorted(namespaces), np.int64), [self.rows[:0]], [self.generations[:0]]
        for part in slices(len(self)):
            mine = np.isin(self.trie.namespace[self.rows[part]], wanted)
            rows.append(self.rows[part][mine])
            generations.append(self.generations[part][mine])
            await give_way()
        return FoundBlocks(self.trie, np.concatenate(rows), np.concatenate(generations))


async def find_subtree(trie: Trie, root: int) -> FoundBlocks:
    """Finds a block and its descendants; empty if the block is removed meanwhile."""
    generation = trie.generation[root]
    while trie.generation[root] == generation:
        rows, generations = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
        walk = Descendants(trie, np.array([root]))
        try:
            while not walk.done:
                found = np.array(walk.take(_WALK_STEPS), np.int64)
                rows.append(found)
                generations.append(trie.generation[found])
                await give_way()
        except MovedError:  # the result may lack descendants of the removed block
            continue
        return FoundBlocks(trie, np.concatenate(rows)[::-1], np.concatenate(generations)[::-1])
    return FoundBlocks(trie, np.empty(0, np.int64), np.empty(0, np.int32))


async def find_namespaces(trie: Trie, ordinals: Collection[int] | None) -> FoundBlocks:
    """Finds all blocks of some namespaces, or of all namespaces of a trie, in one scan."""
    wanted = None if ordinals is None else np.array(sorted(ordinals), np.int64)
    rows, generations, depths = [np.empty(0, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    for start in range(0, trie.rows, SLICE_ROWS):
        namespaces = trie.namespace[start : min(start + SLICE_ROWS, trie.rows)]
        found = start + np.flatnonzero(namespaces != NOWHERE if wanted is None else np.isin(namespaces, wanted))
        rows.append(found)
        generations.append(trie.generation[found])
        depths.append(trie.depth[found])
        await give_way()

    def deepest_first() -> FoundBlocks:
        order = np.argsort(np.concatenate(depths), kind="stable")[::-1]
        return FoundBlocks(trie, np.concatenate(rows)[order], np.concatenate(generations)[order])

    return await in_thread(deepest_first)


async def with_images(namespaces: NamespaceRegistry, namespace: Namespace) -> list[Namespace]:
    """A namespace, and those for the images that its prompts show: one for each shape of block that they have had."""
    found, pacer = [namespace], Pacer()
    for other in namespaces if namespace.spec.worker else ():
        if namespace.spec.shows(other.spec):
            found.append(other)
        await pacer.worked(1)
    return found


async def forget(
    mover: Mover, blocks: FoundBlocks, *, shared: bool = False, reason: Reason = Reason.OTHER
) -> AsyncGenerator[tuple[int, int], None]:
    """Forgets blocks that are not held, kept or pinned and have no other children, some thousand at a time.

    Yields after each part, once it is durable, how many of its blocks were forgotten and how many stay. If it is
    cancelled, blocks that have left the trie are still removed from disk. With `shared` they are also deleted from the
    shared store, if there is one. The journal of evictions gets `reason`.

    Raises:
        StorageError: the last part is gone from memory, but the disk failed and it comes back at the next start.
    """
    trie = blocks.trie
    for start in range(0, len(blocks), _DURABLE_AT_ONCE):
        await mover.checksums.wait_for_all()
        went = there = 0
        on_disk: list[Identity] = []
        end = min(start + _DURABLE_AT_ONCE, len(blocks))
        with mover.disk.removals.leave(on_disk):
            try:
                for first in range(start, end, _FORGOTTEN_AT_ONCE):
                    part = slice(first, min(first + _FORGOTTEN_AT_ONCE, end))
                    rows = blocks.rows[part]
                    same = rows[trie.generation[rows] == blocks.generations[part]]
                    if shared and mover.remote is not None:
                        # From the store first, since a block that left the trie has no name. It may be used meanwhile.
                        await mover.remote.copies.delete(trie, trie.all_removable(same.tolist()))
                        same = rows[trie.generation[rows] == blocks.generations[part]]
                    with because(reason):
                        count, identities = mover.disk.removals.forget_in_memory(trie, same.tolist())
                    if mover.tiers.durable is not None and len(identities) < count:
                        mover.lost["removed before it was written"] += count - len(identities)
                    went, there = went + count, there + len(same)
                    on_disk += identities
                    await give_way()
            finally:
                await mover.disk.removals.remove(trie, on_disk)
        yield went, there - went
