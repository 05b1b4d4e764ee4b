"""The path of a prompt in a trie, remembered between searches."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import Rows, Trie


class KnownPath:
    """The rows of a prompt's first blocks; each search continues where the last one ended.

    ```
    last search  17  18  40  52        the row of 52 has the same generation: all four are unchanged
    this search                  | 53   finds only the keys behind them
    ```

    The trie is node-closed and a block keeps its row: as long as the last block is there, so are those before it.
    """

    __slots__ = ("_generations", "_rows")

    def __init__(self) -> None:
        self._rows: Rows = np.empty(0, np.int64)
        self._generations: npt.NDArray[np.int32] = np.empty(0, np.int32)

    def find(self, trie: Trie, root: int, chain: BlockChain, limit: int) -> Rows:
        """As `Trie.nodes`; always the same prompt, which may have grown, in the same trie."""
        rows = self._rows
        if len(rows) and trie.generation[rows[-1]] != self._generations[-1]:
            rows = rows[: int((trie.generation[rows] != self._generations).argmax())]
        path = trie.nodes(root, chain, limit, rows[:limit])
        if path is not self._rows:
            self._rows, self._generations = path, trie.generation[path]
        return path
