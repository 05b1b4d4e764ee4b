"""Blocks whose bytes are as they were stored, and are wrong all the same: a model computes nothing from them.

From the moment when it is known, no prompt goes on at such a block (`Trie.refused`), and nothing is recorded behind it.
It and all that continues it, whose bytes were computed from it, leave every tier, the shared store too, as soon as
nobody holds them.
"""

from __future__ import annotations

import asyncio
import logging

from prefixd.base.long_work.pacer import SLICE_ROWS, give_way
from prefixd.cache.background.forgetting import find_subtree, forget
from prefixd.cache.index.trie import Trie
from prefixd.cache.moving.mover import Mover
from prefixd_swap import StorageError

log = logging.getLogger(__name__)

_AGAIN_S = 0.5
_AGAIN_AT_MOST_S = 60.0
NOT_FINITE = "values that are not finite"


class RefusedBlocks:
    """Refuses blocks and has them go.

    Args:
        mover: moves and forgets blocks.
    """

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self) -> None:
        """What is left stays."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def refuse(self, trie: Trie, row: int, generation: int) -> None:
        """Refuses a block, if it is still there, and what continues it. Counts those that go under `lost`."""
        if trie.generation[row] != generation or trie.refused.get(row) == generation:
            return
        log.error(
            "block %s and what continues it are dropped, to be computed again: %s", trie.key(row).hex(), NOT_FINITE
        )
        trie.refused[row] = generation
        self._mover.placement.epoch += 1
        task = asyncio.create_task(self._forget(trie, row, generation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _forget(self, trie: Trie, row: int, generation: int) -> None:
        """Forgets the block and what continues it, and what is held of these when it is held no more."""
        wait_s = _AGAIN_S
        while trie.generation[row] == generation:
            blocks = await find_subtree(trie, row)
            for start in range(0, len(blocks), SLICE_ROWS):  # nobody wants these bytes
                part = slice(start, start + SLICE_ROWS)
                rows = blocks.rows[part]
                trie.pinned[rows[trie.generation[rows] == blocks.generations[part]]] = False
                await give_way()
            try:
                async for went, _ in forget(self._mover, blocks, shared=True):
                    self._mover.lost[NOT_FINITE] += went
            except StorageError as error:
                log.error("blocks with %s could not be removed, tried again soon: %s", NOT_FINITE, error)
            if trie.generation[row] == generation:
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, _AGAIN_AT_MOST_S)
        if trie.refused.get(row) == generation:
            del trie.refused[row]
