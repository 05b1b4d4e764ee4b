"""The back of a cached prefix, loaded towards the front while a run computes the front ("Compute Or Load KV Cache? Why
Not Both?", Cake, section 4).

```
blocks      0 .. 3  |  4 .. 9  | 10 .. 13 | 14 .. 21 | 22 .. 31 |  32 ..
            cached     filled     given      nobody's   limit      prompt's rest
            on the     computed   the run    yet        .. end     computed last
            GPU                   computes              loaded ->
                                  them                  towards the front
```

The run gets frames for a few blocks at a time, so that the meeting point is found while both go on. It is where the
frames given end and all behind is there: then the run goes on behind the loaded blocks (`worker/protocol.Arrived`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.loading.piece_load import PieceLoad, piece_blocks
from prefixd_scheduler import CostModel, Distance

_LEAST_TOKENS = 64  # that a run gets frames for at a time
_STEPS = 4  # the run gets one part in this many of what it is expected to compute
_LEAST_WAIT_S = 0.002


@dataclass(frozen=True, slots=True)
class TailPlan:
    """What is to be loaded while the blocks before it are computed, decided when the request was staged.

    Attributes:
        rows: the cached blocks behind those that the request holds.
        tiers: [len(rows)] the tier that each is in.
        share: of these blocks, the part that is expected to be computed.
    """

    rows: Rows
    tiers: npt.NDArray[np.int8]
    share: float

    def first_blocks(self, block_tokens: int) -> int:
        """Blocks that the run gets frames for at first."""
        return min(len(self.rows), _step_blocks(len(self.rows), self.share, block_tokens))


class TailLoad:
    """The load behind one run.

    It holds the nodes of all its blocks, and in the GPU tier those that have been begun. `advance` is called from one
    task.

    Args:
        cache: where the blocks are.
        budget: counts the frames of the blocks that have been begun.
        cost: says whether a piece comes before the run has computed as far.
        owner: whose it is, for people.
        trie: of the blocks.
        plan: what to load.
        first: how many blocks of the prompt come before these.
        load: moves them.
        wake: called when `advance` should be.

    Attributes:
        limit: blocks from this one on have been begun; the run gets no frames for them.
        joined: the run was told of what has arrived; it passes over it when it gets there.
        abandoned: it fell behind and was given up; what had arrived is used.
    """

    def __init__(
        self,
        cache: TieredCache,
        budget: FrameBudget,
        cost: CostModel,
        owner: str,
        trie: Trie,
        plan: TailPlan,
        first: int,
        load: PieceLoad,
        wake: Callable[[], None],
    ) -> None:
        holds = cache.holds
        self.plan = plan
        self.first = first
        self.limit = self.end_block = first + len(plan.rows)
        self.joined = self.abandoned = False
        self._budget = budget
        self._cost = cost
        self._trie = trie
        self._load = load
        self._wake = wake
        self._closed = False  # nothing more is begun
        self._block_bytes = int(np.max(trie.group_bytes))
        nbytes, distance = len(plan.rows) * self._block_bytes, Distance(int(plan.tiers.max(initial=0)))
        self._piece = piece_blocks(cost.load_s(nbytes, distance), len(plan.rows))
        self._nodes = holds.hold(owner, trie, plan.rows)
        self._hold = holds.hold(owner, trie, plan.rows[:0], cache.tiers.compute)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> Rows:
        """The blocks that have been begun, which it holds in the GPU tier."""
        return self._hold.rows

    @property
    def arrived(self) -> Rows:
        """The blocks that the run may pass over, from `limit` on; those before are all the run's."""
        return self.plan.rows[self.limit - self.first :]

    def reach(self, given: int, filled: int) -> int:
        """How many blocks of the prompt the run should have frames for, when it has them for `given` and has computed
        `filled`."""
        gap = self.limit - given
        step = gap if self._closed else _step_blocks(gap, self.plan.share, self._trie.block_tokens)
        return min(self.limit, max(given, filled + 2 * step))

    def advance(self, given: int, filled: int) -> bool:
        """Begins what comes before it would be computed, gives up what is late while the run waits for it.

        Returns whether both have met: the run has frames up to `limit`, and all behind is in the GPU tier.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._pays(given, filled):
            self._begin(max(given, self.limit - self._piece))
        waits = filled == given == self.limit and self._load.under_way
        if self._load.failed:
            self._give_up()
        elif waits and self._is_late():
            self.abandoned = True
            self._give_up()
        return given == self.limit and not self._load.under_way

    def end(self) -> None:
        """Lets go of all; what moves is given up."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True
        self._load.drop()
        self._budget.remove(self._hold.rows)
        self._hold.end()
        self._nodes.end()

    def _pays(self, given: int, filled: int) -> bool:
        """Whether the next piece would be there before the run has computed up to `limit`."""
        if self._closed or self.limit <= given:
            return False
        block_tokens, start = self._trie.block_tokens, max(given, self.limit - self._piece)
        rows = self.plan.rows[start - self.first : self.limit - self.first]
        distance = Distance(int(self._trie.nearest[rows].max()))
        if distance is Distance.NONE:  # its bytes have gone meanwhile
            self._closed = True
            return False
        nbytes = len(rows) * self._block_bytes
        load_s = self._cost.load_s(nbytes, distance, self._load.queued_bytes)
        compute_s = self._cost.compute_s((self.limit - filled) * block_tokens, filled * block_tokens)
        return load_s is None or compute_s is None or load_s <= compute_s

    def _begin(self, start: int) -> None:
        rows = self.plan.rows[start - self.first : self.limit - self.first]
        self._hold.extend(rows)
        self._budget.add(self._trie, rows)
        self.limit = start
        self._load.begin(rows)

    def _is_late(self) -> bool:
        """Whether the run waits in vain; looks again when it would."""
        block_tokens, blocks = self._trie.block_tokens, len(self.held) - len(self._load.arrived_rows())
        left_s = self._load.behind_in_s(self._cost.compute_s(blocks * block_tokens, self.limit * block_tokens))
        if left_s is not None and left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(max(left_s, _LEAST_WAIT_S), self._wake)
        return left_s is not None and left_s <= 0

    def _give_up(self) -> None:
        """What has arrived stays, from the back on; the run computes the rest."""
        self._closed = True
        self._load.drop(late=self.abandoned)
        arrived = len(self._load.arrived_rows())
        self._budget.remove(self._hold.rows[arrived:])
        self._hold.shrink(arrived)
        self.limit = self.end_block - arrived


def _step_blocks(blocks: int, share: float, block_tokens: int) -> int:
    return max(-(-_LEAST_TOKENS // block_tokens), int(blocks * share / _STEPS))
