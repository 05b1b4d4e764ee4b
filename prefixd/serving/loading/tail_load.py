"""The back of a cached prefix, loaded towards the front while a run computes the front ("Compute Or Load KV Cache? Why
Not Both?", Cake, section 4).

```
blocks      0 .. 3  |  4 .. 9  | 10 .. 13 | 14 .. 21 | 22 .. 31 |  32 ..
            cached     filled     given      not        limit      prompt's rest
            on the     computed   the run    begun      .. end     computed last
            GPU                   computes              loaded ->
                                  them                  towards the front
```

The run gets frames for a few blocks at a time, so that the meeting point is found while both go on. They meet where the
given frames end at `limit` and all blocks behind it are in the GPU tier: then the run goes on behind the loaded blocks
(`worker_protocol.protocol.Arrived`).
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
from prefixd.serving.loading.load_bytes import LoadBytes, bytes_to_load
from prefixd.serving.loading.piece_load import PieceLoad, piece_blocks
from prefixd_scheduler import CostModel, Distance

_LEAST_TOKENS = 64  # the run gets frames for at least this many tokens at a time
_STEPS = 4  # it gets a quarter of the blocks that it is expected to compute at a time
_LEAST_WAIT_S = 0.002


@dataclass(frozen=True, slots=True)
class TailPlan:
    """The blocks to load while the blocks before them are computed, decided when the request was staged.

    Attributes:
        rows: the cached blocks behind those that the request holds.
        tiers: [len(rows)] the tier that each is in.
        share: the share of these blocks that the run is expected to compute.
    """

    rows: Rows
    tiers: npt.NDArray[np.int8]
    share: float

    def first_blocks(self, block_tokens: int) -> int:
        """Blocks that the run gets frames for at first."""
        return min(len(self.rows), _step_blocks(len(self.rows), self.share, block_tokens))


class TailLoad:
    """The load behind one run.

    It holds the nodes of all its blocks, and in the GPU tier the blocks whose load has begun. `advance` is called from
    one task.

    Args:
        cache: where the blocks are.
        budget: counts the frames of the blocks whose load has begun.
        cost: estimates whether a piece arrives before the run has computed as far.
        owner: the request, for logs.
        trie: of the blocks.
        plan: the blocks to load.
        first: number of the prompt's blocks before these.
        load: moves the blocks.
        wake: called when `advance` should be called.

    Attributes:
        limit: the load of the blocks from this one on has begun; the run gets no frames for them.
        joined: the worker was told which blocks have arrived; its run skips them when it gets there.
        abandoned: the load fell behind and was given up; the blocks that had arrived are used.
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
        load_s = self._bytes_of(plan.rows).load_s(cost, Distance(int(plan.tiers.max(initial=0))))
        self._piece = piece_blocks(load_s, len(plan.rows))
        self._nodes = holds.hold(owner, trie, plan.rows)
        self._hold = holds.hold(owner, trie, plan.rows[:0], cache.tiers.compute)
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> Rows:
        """The blocks whose load has begun; it holds them in the GPU tier."""
        return self._hold.rows

    @property
    def arrived(self) -> Rows:
        """The blocks from `limit` on, which the run may skip."""
        return self.plan.rows[self.limit - self.first :]

    def reach(self, given: int, filled: int) -> int:
        """How many blocks of the prompt the run should have frames for. It has frames for `given` blocks and has
        computed `filled`."""
        gap = self.limit - given
        step = gap if self._closed else _step_blocks(gap, self.plan.share, self._trie.block_tokens)
        return min(self.limit, max(given, filled + 2 * step))

    def advance(self, given: int, filled: int) -> bool:
        """Begins the pieces that arrive before the run could compute them; gives up a late load that the run waits for.

        Returns whether both have met: the run has frames up to `limit`, and all blocks behind it are in the GPU tier.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._is_faster(given, filled):
            self._begin(max(given, self.limit - self._piece))
        waits = filled == given == self.limit and self._load.under_way
        if self._load.failed:
            self._give_up()
        elif waits and self._is_late():
            self.abandoned = True
            self._give_up()
        return given == self.limit and not self._load.under_way

    def end(self) -> None:
        """Ends the holds, and gives up the pieces under way."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True
        self._load.drop()
        self._budget.remove(self._hold.rows)
        self._hold.end()
        self._nodes.end()

    def _is_faster(self, given: int, filled: int) -> bool:
        """Whether the next piece would arrive before the run has computed up to `limit`."""
        if self._closed or self.limit <= given:
            return False
        block_tokens, start = self._trie.block_tokens, max(given, self.limit - self._piece)
        rows = self.plan.rows[start - self.first : self.limit - self.first]
        distance = Distance(int(self._trie.nearest[rows].max()))
        if distance is Distance.NONE:  # its bytes were evicted meanwhile
            self._closed = True
            return False
        load_s = self._bytes_of(rows).load_s(self._cost, distance, self._load.queued_bytes())
        compute_s = self._cost.compute_s((self.limit - filled) * block_tokens, filled * block_tokens)
        return load_s is None or compute_s is None or load_s <= compute_s

    def _bytes_of(self, rows: Rows) -> LoadBytes:
        return bytes_to_load(self._trie, rows, np.full(len(rows), self._trie.all_groups, np.uint8))

    def _begin(self, start: int) -> None:
        rows = self.plan.rows[start - self.first : self.limit - self.first]
        self._hold.extend(rows)
        self._budget.add(self._trie, rows)
        self.limit = start
        self._load.begin(rows)

    def _is_late(self) -> bool:
        """Whether computing is faster than waiting on. If not, sets a timer for when it may be."""
        block_tokens, blocks = self._trie.block_tokens, len(self.held) - len(self._load.arrived_rows())
        left_s = self._load.behind_in_s(self._cost.compute_s(blocks * block_tokens, self.limit * block_tokens))
        if left_s is not None and left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(max(left_s, _LEAST_WAIT_S), self._wake)
        return left_s is not None and left_s <= 0

    def _give_up(self) -> None:
        """Gives up the load. The blocks that have arrived, from the back on, stay; the run computes the others."""
        self._closed = True
        self._load.drop(late=self.abandoned)
        arrived = len(self._load.arrived_rows())
        self._budget.remove(self._hold.rows[arrived:])
        self._hold.shrink(arrived)
        self.limit = self.end_block - arrived


def _step_blocks(blocks: int, share: float, block_tokens: int) -> int:
    return max(-(-_LEAST_TOKENS // block_tokens), int(blocks * share / _STEPS))
