"""Refuses blocks whose bytes are unchanged since they were stored, but wrong: a model cannot compute with them.

As soon as a block is refused, no prompt matches it (`Trie.refused`), and no block is recorded behind it. The block and
its descendants, whose bytes were computed from it, leave every tier and the shared store when they are not held.
"""

from __future__ import annotations

import asyncio
import logging

from prefixd.base.long_work.pacer import SLICE_ROWS, give_way
from prefixd.cache.background.forgetting import find_subtree, forget
from prefixd.cache.index.trie import Trie
from prefixd.cache.moving.mover import Mover
from prefixd.observability.eviction_journal import Reason
from prefixd_swap import StorageError

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_AGAIN_AT_MOST_S = 60.0
NOT_FINITE = "values that are not finite"


class RefusedBlocks:
    """Refuses blocks and forgets them.

    Args:
        mover: moves and forgets blocks.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """Ends the tasks; blocks that are not forgotten yet stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def refuse(self, trie: Trie, row: int, generation: int) -> None:
        """Refuses a block, if it still exists, and its descendants. Counts the forgotten blocks under `lost`."""
        if trie.generation[row] != generation or trie.refused.get(row) == generation:
            return
        log.error("block %s and its descendants are dropped, to be computed again: %s", trie.key(row).hex(), NOT_FINITE)
        trie.refused[row] = generation
        self._mover.placement.epoch += 1
        task = asyncio.create_task(self._forget(trie, row, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, trie: Trie, row: int, generation: int) -> None:
        """Forgets the block and its descendants; tries again until none of them is held."""
        wait_s = _AGAIN_S
        while trie.generation[row] == generation:
            blocks = await find_subtree(trie, row)
            for start in range(0, len(blocks), SLICE_ROWS):  # pins do not keep wrong bytes
                part = slice(start, start + SLICE_ROWS)
                rows = blocks.rows[part]
                trie.pinned[rows[trie.generation[rows] == blocks.generations[part]]] = False
                await give_way()
            try:
                async for went, _ in forget(self._mover, blocks, shared=True, reason=Reason.REFUSED):
                    self._mover.lost[NOT_FINITE] += went
            except StorageError as error:
                log.error("blocks with %s could not be removed, tried again soon: %s", NOT_FINITE, error)
            if trie.generation[row] == generation:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _AGAIN_AT_MOST_S)
        if trie.refused.get(row) == generation:
            del trie.refused[row]
