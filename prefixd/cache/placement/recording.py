"""Blocks that the daemon's own worker has computed: born in the compute tier, entered into the trie in their frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.placement import Placement


class Recording:
    """Enters what the worker has computed.

    Args:
        placement: keeps tries and tiers in step.
        stored: told of blocks that have got bytes.
    """

    def __init__(self, placement: Placement, stored: Callable[[Trie, Rows], None] | None) -> None:
        self._placement = placement
        self._stored = stored

    def record(
        self,
        namespace: Namespace,
        trie: Trie,
        parent: int,
        chain: BlockChain,
        first_block: int,
        frames: Sequence[int],
        blocks: int | None,
    ) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Enters blocks one after the other; arguments and answer are those of `TieredCache.record`."""
        placement, compute = self._placement, self._placement.tiers.compute
        now_s = placement.clock()
        count = len(frames) // len(trie.part_bytes) if blocks is None else blocks
        parts = len(frames) // count if count else 0
        end = first_block + count
        keys, tokens = chain.key_rows(first_block, end), chain.token_rows(first_block, end)
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

    def record_state(self, trie: Trie, path: Rows, frames: Sequence[int], ends: Sequence[int]) -> bool:
        """Enters the state after the last block of `path`; whether the frames are the trie's now."""
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
