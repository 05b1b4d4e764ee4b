"""Weighs the time that a block saves against the bytes that it takes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prefixd_swap.eviction.policy import BlockTable, ComputeTime, EvictionPolicy, Rows, Scores
from prefixd_swap.eviction.reuse_times import ReuseTimes

_CLASSES = 6  # by uses; the last class has all blocks with more uses
_FAR = 256  # blocks; compute time grows with depth, and is linear up to here
_TOKEN_S = 1e-4  # until a computation was observed; matters only if several models share a tier


class Weighing(EvictionPolicy):
    """Evicts first the block that saves the fewest seconds for its bytes:

        score = expected uses a second * seconds that each use saves / bytes that the tier keeps of it

    Expected uses are learned from the number of a block's uses and the time since the last one (`ReuseTimes`). In the
    last tier a use saves computing the block; deeper blocks attend to more tokens and take longer. In the other tiers
    it saves a load from the next tier, which takes time in proportion to the bytes.
    """

    name = "weighing"
    remembers = True

    def __init__(self) -> None:
        self._reuse = ReuseTimes(_CLASSES)
        self._now_s = 0.0
        self._compute: dict[int, ComputeTime] = {}  # by the table's ordinal

    def observe_compute_time(self, table: BlockTable, compute_s: ComputeTime) -> None:
        self._compute[table.ordinal] = compute_s

    def admitted(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        self._now_s = now_s
        fresh = rows[(table.any_part[rows] == np.uint8(1 << tier)) & (table.uses[rows] == 0)]
        self._reuse.began(np.zeros(len(fresh), np.int64))

    def restored(self, table: BlockTable, rows: Rows, tier: int, now_s: float) -> None:
        """Learns nothing: the times of their last uses are not known."""
        self._now_s = now_s

    def accessed(self, table: BlockTable, rows: Rows, now_s: float) -> None:
        self._now_s = now_s
        uses = table.uses[rows].astype(np.int64)
        self._reuse.ended(_class(uses), now_s - table.last_used[rows])
        self._reuse.began(_class(uses + 1))

    def scores(self, table: BlockTable, rows: Rows, tier: int) -> Scores:
        """Seconds saved per second and GiB."""
        values = self._reuse.values(_class(table.uses[rows].astype(np.int64)), self._now_s - table.last_used[rows])
        first, more = self._saved(table, tier)
        scores: Scores = values * (first + more * table.depth[rows])
        return scores * table.compression(rows, tier) if self._is_last(tier) else scores

    def score(self, table: BlockTable, row: int, tier: int) -> float:
        uses, idle_s = min(int(table.uses[row]), _CLASSES - 1), self._now_s - float(table.last_used[row])
        first, more = self._saved(table, tier)
        score = self._reuse.value(uses, idle_s) * (first + more * float(table.depth[row]))
        return score * float(np.max(table.compression(np.array([row]), tier))) if self._is_last(tier) else score

    def _is_last(self, tier: int) -> bool:
        return self.last_tier is None or tier == self.last_tier

    def _saved(self, table: BlockTable, tier: int) -> tuple[float, float]:
        """Seconds per GiB of blocks as they are that a use of a prompt's first block saves, and the increase per block
        of depth."""
        if not self._is_last(tier):
            return 1.0, 0.0
        tokens, gib = table.block_tokens, table.block_bytes / (1 << 30)
        compute_s = self._compute.get(table.ordinal)
        if compute_s is not None:
            # Differences, since every pass has a part that does not depend on its number of tokens.
            times = [compute_s(tokens * blocks) for blocks in (1, 2, _FAR, _FAR + 1)]
            if None not in times:
                near_1, near_2, far_1, far_2 = (float(time) for time in times if time is not None)
                first, last = max(near_2 - near_1, 1e-9), max(far_2 - far_1, 1e-9)
                return first / gib, max(last - first, 0.0) / (_FAR - 1) / gib
        return _TOKEN_S * tokens / gib, 0.0


def _class(uses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.minimum(uses, _CLASSES - 1)
