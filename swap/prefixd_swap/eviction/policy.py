"""What an eviction policy is told, and what it is asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

ComputeTime = Callable[[int], float | None]
"""Seconds to compute so many tokens of a prompt from its first on; None where that is not known."""


class BlockTable(Protocol):
    """The blocks of one geometry, a row each: what policies read and write of a trie.

    Attributes:
        ordinal: the table's number among those that share the tiers.
        block_tokens, block_bytes: sizes of a block.
        last_used: [rows] when a block was asked for last, seconds.
        entered: [rows, tiers] when it came to a tier, seconds.
        parent: [rows] the block before it in its prefix; below 0: none.
        depth: [rows] how many blocks are before it in its prefix.
        namespace: [rows] whose it is, 0 or more; below 0 in a row that has no block any more.
        any_part: [rows] the tiers that have something of it, a bit each.
        uses: [rows] uint8, how often it was asked for again; 255 stands for more. Kept by `UseHistory`.
        rank: [rows, tiers] a number of the policy's own; 0 in a tier that the block never came to.
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

    def keys(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: what tells blocks of a namespace apart, also after they have left."""


class EvictionPolicy(ABC):
    """Gives every block in a tier a score; the lowest goes first.

    The scores are those of the moment of the last call that told the time. A call takes time in proportion to the rows
    that it names, whatever the tables hold.
    """

    name: str
    remembers = False
    """Whether it needs what `UseHistory` remembers of blocks that have left."""
    last_tier: int | None = None
    """The level of the tier below which there is none; None: each is the last one."""

    def observe_compute_time(self, table: BlockTable, compute_s: ComputeTime) -> None:
        """What computing takes for the blocks of a table; asked whenever blocks are scored."""
        return

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks came to `tier`, from outside or from another tier. Their `uses` count what is remembered of them."""
        return

    def restored(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks were in `tier` when the daemon ended, and are there again."""
        self.admitted(table, rows, tier, now_s)

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        """Prompts asked for blocks again, whose `uses` and `last_used` are still those from before.

        They are there, or come back: of what was forgotten and is remembered, `last_used` says when that was.
        """
        return

    def removed(self, table: BlockTable, rows: Rows, tier: int, *, evicted: bool = True) -> None:
        """Blocks have left `tier`: `evicted` to make room, else because they were damaged or nobody wants them."""
        return

    @abstractmethod
    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        """[len(rows)]: the scores of blocks that are in `tier`."""

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        """The score of one block, as `scores` gives it but for rounding."""
        return float(self.scores(table, np.array([row]), tier)[0])
