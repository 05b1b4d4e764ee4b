"""How often blocks were asked for, also those that have left."""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from prefixd_swap.eviction.policy import BlockTable, EvictionPolicy, Rows

MOST_USES = 255
REMEMBERED = 1 << 20
"""Blocks that are remembered, at most: 9 MiB."""
_SAME_USE_S = 1.0
"""What is asked for again so soon is one use: a request is looked up when it comes, when it is its turn, and when it
was preempted (the correlated references of O'Neil et al., "The LRU-K page replacement algorithm", SIGMOD '93)."""


class UseHistory:
    """Counts `BlockTable.uses`, tells the policy of them, and remembers blocks that have left, by a hash of their keys.

    A block is remembered until another one takes its place in a table of fixed size, which takes memory only as far as
    it is used. What is remembered of a block is a hint: another block with the same 52 bits is taken for it, but one of
    another namespace only by chance.

    Args:
        policy: is told.
        remembered: how many blocks at most, a power of two; 0: those that have left are forgotten.
    """

    def __init__(self, policy: EvictionPolicy, remembered: int = REMEMBERED) -> None:
        self._policy = policy
        self._mask = np.uint64(max(remembered - 1, 0))
        self._marks = np.zeros(remembered, np.uint32)  # 0: nothing there
        self._times = np.zeros(remembered, np.float32)  # of last use, seconds since `_since_s`
        self._counts = np.zeros(remembered, np.uint8)
        self._since_s: float | None = None
        self._mix = np.uint64(secrets.randbits(64))  # nobody can choose keys that stand for another namespace's block

    @property
    def nbytes(self) -> int:
        """The most memory that it takes."""
        return self._marks.nbytes + self._times.nbytes + self._counts.nbytes

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        """A prompt asks for blocks that are there, ancestors first. `last_used` is still from before.

        Where a use counts for a block it counts for its ancestors, so none has been used that its parent has not.
        """
        counts = now_s - table.last_used[rows] >= _SAME_USE_S
        again = rows[: len(rows) - int(counts[::-1].argmax())] if counts.any() else rows[:0]
        if len(again):
            self._policy.accessed(table, again, now_s)
            table.uses[again] += table.uses[again] < MOST_USES

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks came to `tier`, and their `entered`, `last_used` and `any_part` say so."""
        fresh = rows[table.any_part[rows] == np.uint8(1 << tier)]
        if self._since_s is not None and len(fresh):
            self._recall(table, fresh, self._since_s, now_s)
        self._policy.admitted(table, rows, tier, now_s)

    def restored(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks that were in `tier` when the daemon ended are there again, before anything else is."""
        self._policy.restored(table, rows, tier, now_s)

    def removed(self, table: BlockTable, rows: Rows, tier: int, *, evicted: bool = True) -> None:
        """Blocks have left `tier`, to make room or else not `evicted`, and their `any_part` says so."""
        self._policy.removed(table, rows, tier, evicted=evicted)
        if not len(self._marks):
            return
        gone = rows[table.any_part[rows] == 0]
        if len(gone):
            if self._since_s is None:
                self._since_s = float(table.last_used[gone].min())
            places, marks = self._places(table, gone)
            self._marks[places] = marks
            self._times[places] = table.last_used[gone] - self._since_s
            self._counts[places] = table.uses[gone]

    def _recall(self, table: BlockTable, rows: Rows, since_s: float, now_s: float) -> None:
        """Of those that are remembered, the use that brought them back is one more."""
        places, marks = self._places(table, rows)
        known = (self._marks[places] == marks) & (table.uses[rows] == 0)
        known = _with_parents(table, rows, known)
        rows, places = rows[known], places[known]
        if len(rows):
            self._marks[places] = 0
            table.uses[rows] = self._counts[places]
            used = table.last_used[rows]
            table.last_used[rows] = since_s + self._times[places].astype(np.float64)
            self.accessed(table, rows, now_s)
            table.last_used[rows] = used

    def _places(self, table: BlockTable, rows: Rows) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Of each block its place in the table of those that have left, and its mark there."""
        halves = np.ascontiguousarray(table.keys(rows)).view(np.uint64)
        mixed = halves[:, 0] ^ (halves[:, 1] >> np.uint64(7)) ^ (table.namespace[rows].astype(np.uint64) * self._mix)
        hashes = mixed * np.uint64(0x9E3779B97F4A7C15)
        places = ((hashes >> np.uint64(32)) & self._mask).astype(np.int64)
        return places, (hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32) | np.uint32(1)


def _with_parents(table: BlockTable, rows: Rows, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[len(rows)]: which of the `known` blocks, each prefix's ancestors first and one after the other, have a parent
    that is known, too, or was used before."""
    at, parents = np.arange(len(rows)), table.parent[rows]
    first = np.ones(len(rows), np.bool_)  # of those that continue each other
    first[1:] = parents[1:] != rows[:-1]
    known = known & (~first | (parents < 0) | (table.uses[np.maximum(parents, 0)] > 0))
    begin = np.maximum.accumulate(np.where(first, at, 0))
    unknown = np.maximum.accumulate(np.where(known, -1, at))
    found: npt.NDArray[np.bool_] = unknown < begin
    return found
