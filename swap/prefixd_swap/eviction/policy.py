"""The interface of an eviction policy, and the columns of blocks that it reads and writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

ComputeTime = Callable[[int], float | None]
"""Seconds to compute the first n tokens of a prompt; None where that is not known."""


class BlockTable(Protocol):
    """The blocks of one geometry, a row each: the columns of a trie that policies read and write.

    Attributes:
        ordinal: the table's number among the tables that share the tiers.
        block_tokens, block_bytes: sizes of a block.
        last_used: [rows] time of the last use, seconds.
        entered: [rows, tiers] time when the block entered a tier, seconds.
        parent: [rows] the block before it in its prefix; below 0: none.
        depth: [rows] number of blocks before it in its prefix.
        namespace: [rows] its namespace, 0 or more; below 0 in a row without a block.
        any_part: [rows] the tiers that have a part of it, a bit each.
        uses: [rows] uint8, number of uses after the first; 255 means 255 or more. Counted by `UseHistory`.
        rank: [rows, tiers] a number for the policy's own use; 0 in a tier that the block never entered.
    """

    ordinal: int
    block_tokens: int
    block_bytes: int
    last_used: npt.NDArray[Any]
    entered: npt.NDArray[Any]
    parent: npt.NDArray[Any]
    depth: npt.NDArray[Any]
    namespace: npt.NDArray[Any]
    any_part: npt.NDArray[Any]
    uses: npt.NDArray[Any]
    rank: npt.NDArray[Any]

    def compression(self, rows: Rows, tier: int) -> Scores | float:
        """[len(rows)]: how many times fewer bytes a tier keeps of each block than it has: 2.0 if a codec halves them. A
        number if it is the same for all."""

    def keys(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: the blocks' keys in their namespace, which they keep after they have left and come back."""


class EvictionPolicy(ABC):
    """Gives every block in a tier a score; the block with the lowest score is evicted first.

    Scores hold for the `now_s` of the last call. A call takes time in proportion to its rows, however many blocks the
    tables have.
    """

    name: str
    remembers = False
    """Whether it needs `UseHistory` to remember blocks that have left."""
    last_tier: int | None = None
    """The level of the lowest tier; None: every tier counts as the lowest."""

    def observe_compute_time(self, table: BlockTable, compute_s: ComputeTime) -> None:
        """Set the function that tells the compute time of a table's blocks; called whenever blocks are scored."""
        return

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks entered `tier`, from outside or from another tier. Their `uses` include remembered uses."""
        return

    def restored(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks were in `tier` when the daemon ended, and are there again."""
        self.admitted(table, rows, tier, now_s)

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        """Prompts used blocks again; `uses` and `last_used` do not include this use yet.

        A block may be one that had left and comes back now; its `last_used` is then its remembered last use.
        """
        return

    def removed(self, table: BlockTable, rows: Rows, tier: int, *, evicted: bool = True) -> None:
        """Blocks have left `tier`: `evicted` to make room, or else damaged, expired or deleted."""
        return

    @abstractmethod
    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        """[len(rows)]: the scores of blocks that are in `tier`."""

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        """The score of one block: as by `scores`, except for rounding."""
        return float(self.scores(table, np.array([row]), tier)[0])
