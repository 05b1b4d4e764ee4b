"""Counts the uses of blocks, also of blocks that have left."""

from __future__ import annotations

import secrets

import numpy as np
import numpy.typing as npt

from prefixd_swap.eviction.policy import BlockTable, EvictionPolicy, Rows

MOST_USES = 255
REMEMBERED = 1 << 20
"""The most blocks that are remembered: 9 MiB."""
_SAME_USE_S = 1.0
"""Accesses within this time are one use: a request is looked up when it arrives, when it starts, and after preemption
(the correlated references of O'Neil et al., "The LRU-K page replacement algorithm", SIGMOD '93)."""


class UseHistory:
    """Counts `BlockTable.uses`, calls the policy, and remembers blocks that have left, by a hash of their keys.

    A block is remembered until another one takes its place in a table of fixed size; the system allocates only the
    pages of the table that are used. The remembered uses are a hint: a block with the same 52 bits gets them by
    mistake; a block of another namespace only by chance.

    Args:
        policy: the policy to call.
        remembered: the most blocks, a power of two; 0: blocks that have left are forgotten.
    """

    def __init__(self, policy: EvictionPolicy, remembered: int = REMEMBERED) -> None:
        self._policy = policy
        self._mask = np.uint64(max(remembered - 1, 0))
        self._marks = np.zeros(remembered, np.uint32)  # 0: nothing there
        self._times = np.zeros(remembered, np.float32)  # of last use, seconds since `_since_s`
        self._counts = np.zeros(remembered, np.uint8)
        self._since_s: float | None = None
        self._mix = np.uint64(secrets.randbits(64))  # so no client can choose keys that collide with another namespace

    @property
    def nbytes(self) -> int:
        """The most memory that it takes."""
        return self._marks.nbytes + self._times.nbytes + self._counts.nbytes

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        """A prompt uses blocks that are there, ancestors first. `last_used` does not include this use yet.

        A use that counts for a block counts for its ancestors too, so no block has uses that its parent has not.
        """
        counts = now_s - table.last_used[rows] >= _SAME_USE_S
        again = rows[: len(rows) - int(counts[::-1].argmax())] if counts.any() else rows[:0]
        if len(again):
            self._policy.accessed(table, again, now_s)
            table.uses[again] += table.uses[again] < MOST_USES

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks entered `tier`; their `entered`, `last_used` and `any_part` are set already."""
        fresh = rows[table.any_part[rows] == np.uint8(1 << tier)]
        if self._since_s is not None and len(fresh):
            self._recall(table, fresh, self._since_s, now_s)
        self._policy.admitted(table, rows, tier, now_s)

    def restored(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Blocks that were in `tier` when the daemon ended are there again; called before all other methods."""
        self._policy.restored(table, rows, tier, now_s)

    def removed(self, table: BlockTable, rows: Rows, tier: int, *, evicted: bool = True) -> None:
        """Blocks have left `tier`; their `any_part` is changed already. `evicted` as in `EvictionPolicy.removed`."""
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
        """Restore the uses of remembered blocks, and count the use that brought them back."""
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
        """The place of each block in the table of blocks that have left, and its mark there."""
        halves = np.ascontiguousarray(table.keys(rows)).view(np.uint64)
        mixed = halves[:, 0] ^ (halves[:, 1] >> np.uint64(7)) ^ (table.namespace[rows].astype(np.uint64) * self._mix)
        hashes = mixed * np.uint64(0x9E3779B97F4A7C15)
        places = ((hashes >> np.uint64(32)) & self._mask).astype(np.int64)
        return places, (hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32) | np.uint32(1)


def _with_parents(table: BlockTable, rows: Rows, known: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[len(rows)]: the `known` blocks whose parent is known too, or was used before.

    The rows of each prefix are side by side, ancestors first.
    """
    at, parents = np.arange(len(rows)), table.parent[rows]
    first = np.ones(len(rows), np.bool_)  # the first row of each prefix
    first[1:] = parents[1:] != rows[:-1]
    known = known & (~first | (parents < 0) | (table.uses[np.maximum(parents, 0)] > 0))
    begin = np.maximum.accumulate(np.where(first, at, 0))
    unknown = np.maximum.accumulate(np.where(known, -1, at))
    found: npt.NDArray[np.bool_] = unknown < begin
    return found
