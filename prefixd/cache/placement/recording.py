"""Enters blocks into the trie that the daemon's own worker has computed in the compute tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.placement import Placement


class Recording:
    """Enters blocks that the worker has computed.

    Args:
        placement: records where blocks are.
        trie_of: the trie of a namespace.
        stored: called with the blocks that got bytes.
    """

    def __init__(
        self,
        placement: Placement,
        trie_of: Callable[[Namespace], Trie],
        stored: Callable[[Trie, Rows], None] | None,
    ) -> None:
        self._placement = placement
        self._trie_of = trie_of
        self._stored = stored

    def record(
        self,
        namespace: Namespace,
        parent: int,
        chain: BlockChain,
        first_block: int,
        frames: Sequence[int],
        blocks: int | None = None,
    ) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Enters consecutive blocks that the worker has filled in `frames`.

        They are not held yet: the caller must hold them before it awaits anything.

        Args:
            namespace: the blocks' namespace.
            parent: the row before the first block, or the namespace's root.
            chain: the blocks' prompt.
            first_block: index of the first block in the prompt.
            frames: [m * parts] frames in flight, block by block: the block's parts from the first on.
            blocks: m; by default all parts of a block are in frames.

        Returns:
            The blocks' rows, and for each frame whether the trie owns it now (it does not if the part was there
            already). Fewer than m blocks if a key is another block's, or a block is refused.
        """
        trie, placement, compute = self._trie_of(namespace), self._placement, self._placement.tiers.compute
        now_s = placement.clock()
        count = len(frames) // len(trie.part_bytes) if blocks is None else blocks
        parts = len(frames) // count if count else 0
        end = first_block + count
        keys, tokens = chain.key_rows(first_block, end), chain.token_rows[first_block:end]
        if trie.refused:
            accepted = trie.unrefused(trie.find_all(namespace.ordinal, keys), first_block)
            keys, tokens = keys[:accepted], tokens[:accepted]
        rows, _ = trie.insert_path(parent, namespace.ordinal, keys, tokens, now_s)
        if len(rows) < len(keys):
            placement.lost["key collision"] += 1
        slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
        slots[:, :parts] = np.array(frames, np.int64).reshape(count, parts)[: len(rows)]
        taken = (trie.slots[rows, compute.level] == NO_SLOT) & (slots != NO_SLOT)
        some = taken.any(axis=1)
        if some.any():
            slots[~taken] = NO_SLOT
            placement.put(trie, rows[some], compute, slots[some])
            placement.changed.set()
            if self._stored is not None:
                self._stored(trie, rows[some])
        trie.touch(rows, now_s)
        return rows, taken[:, :parts].ravel()

    def record_state(self, trie: Trie, path: Rows, frames: Sequence[int], ends: Sequence[int] = ()) -> bool:
        """Enters the state after the last block of `path`, which begins with a prompt's first block.

        `frames`, in flight, hold the block's last parts; `ends` is for `Trie.expire`. Returns whether the trie owns the
        frames now; it does not if the state was there already.
        """
        placement, compute, last = self._placement, self._placement.tiers.compute, path[-1:]
        slots = np.full((1, len(trie.part_bytes)), NO_SLOT, np.int64)
        slots[0, -len(frames) :] = frames
        if (trie.slots[last, compute.level][slots != NO_SLOT] != NO_SLOT).any():
            return False
        placement.put(trie, last, compute, slots)
        if self._stored is not None:
            self._stored(trie, last)
        placement.extend(trie, path, int(trie.part_mask[-1]), ends)
        placement.changed.set()
        return True
