"""The footprint: the blocks that a request holds in the GPU tier, and its own frames."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from prefixd.cache import BlockChain, Namespace, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.cache.placement.holds import Hold
from prefixd.cache.placement.paths import enter_own
from prefixd.cache.rules import GroupMask
from prefixd.serving.frame_budget import FrameBudget
from prefixd.serving.images.image_kv import ImageHolds
from prefixd.serving.loading.layer_load import LayerLoad
from prefixd.serving.loading.tail_load import TailLoad


class Footprint:
    """The cached blocks that a request holds in the GPU tier, and the frames that only it has.

    ```
    block      0    1    2  |  3    4  |  5    6
    rows     [ 17   18   40 |  52   53 ]               held: found when the request was staged | recorded by its run
    own                                [ 902  903 ]    in flight: in no trie yet
    ```

    It holds those bytes of the found blocks that the rules of the KV groups need. While the request runs, it releases
    the blocks that its windows have passed.

    While it runs, `tail` may bring further blocks of its prefix to the tier, from the back on, and holds them. Until
    then these blocks stay in the trie, even if all their bytes are evicted.

    A frame here is a slot of the tier. With block tables a slot is the first of several frames (`KvShape`); the budget
    counts them all.

    The hold begins here, when the request is staged, and ends with `end` in any case. The frames count in the budget
    unless the request can be made to give them up (`yield_frames`).

    Args:
        cache: where the blocks are.
        budget: counts the frames.
        owner: the request, for logs.
        trie: of the blocks.
        rows: blocks from the prompt's first on; their needed bytes are in the GPU tier or will be brought there.
        images: the holds of its images, if these are not in the prompt's blocks.
        behind: the blocks that `tail` will load.

    Attributes:
        hold: holds in the GPU tier the bytes of the `wanted` KV groups of each cached block.
        own: the frames in flight.
        tail: the load beside the run, if any.
        by_layers: the load layer by layer, if any; it ends with the footprint.
    """

    def __init__(
        self,
        cache: TieredCache,
        budget: FrameBudget,
        owner: str,
        trie: Trie,
        rows: Rows,
        images: ImageHolds | None = None,
        behind: Rows | None = None,
    ) -> None:
        self.images = images
        self.tail: TailLoad | None = None
        self.by_layers: LayerLoad | None = None
        self._own_rows: Hold | None = None
        self._tail_nodes = None if behind is None else cache.holds.hold(owner, trie, behind)
        self._cache = cache
        self._budget = budget
        self._owner = owner
        self._trie = trie
        self._counted = True
        self.own: set[int] = set()
        self._hold_rows(rows)

    def _hold_rows(self, rows: Rows) -> None:
        wanted = self._trie.needed(len(rows)) if self._trie.has_rules else None
        compute = self._cache.tiers.compute
        self.hold = self._cache.holds.hold(self._owner, self._trie, rows, compute, wanted, counted=compute)
        if self._counted:
            self._budget.add(self._trie, rows, wanted)

    async def make_own_rows(self, namespace: Namespace, chain: BlockChain) -> None:
        """Makes rows of the request's own namespace for its common blocks: recorded blocks are entered behind them; see
        `enter_own`. The footprint may have ended when this returns."""
        if self._own_rows is not None:
            return
        path = self.hold.rows if self._tail_nodes is None else np.concatenate([self.hold.rows, self._tail_nodes.rows])
        others = np.flatnonzero(self._trie.namespace[path] != namespace.ordinal)
        if len(others):
            holds = self._cache.holds
            self._own_rows = holds.hold(self._owner, self._trie, path[:0])
            await enter_own(self._own_rows, namespace, chain, int(others[-1]) + 1, self._cache.clock())

    def own_row(self, block: int) -> int | None:
        """The row that `make_own_rows` made for a block; None if it made none."""
        rows = () if self._own_rows is None else self._own_rows.rows
        return int(rows[block]) if block < len(rows) else None

    def yield_frames(self) -> None:
        """From now on the request can be made to give its frames up, so they do not count in the budget."""
        self._budget.remove(self.hold.rows, self.hold.wanted)
        self._counted = False
        if self.images is not None:
            self.images.yield_frames()

    def claim_frames(self, own: Iterable[int]) -> None:
        """From now on the request keeps its frames, and gets `own` frames, which are in flight."""
        self.own.update(own)
        self._budget.add(self._trie, self.hold.rows, self.hold.wanted, self._frames(self.own))
        self._counted = True

    def extend(self, own: list[int]) -> None:
        """Adds frames in flight to those of a request that keeps its frames."""
        self.own.update(own)
        self._budget.taken += self._frames(own)

    def record(self, rows: Rows, given: Iterable[int], wanted: GroupMask | None = None) -> None:
        """Holds blocks that were entered into the trie, with their `wanted` groups; the `given` frames, which they lie
        in, are no longer the request's own."""
        gone = self.own.intersection(given)
        self.own -= gone
        self.hold.extend(rows, wanted)
        self._budget.add(self._trie, rows, wanted, -self._frames(gone))

    def begin_tail(self, tail: TailLoad) -> None:
        """The request runs, and from now on `tail` holds the blocks behind it."""
        self.tail = tail
        self._end_tail_nodes()

    def end_tail(self) -> None:
        """Ends the load beside the run. The footprint takes over the hold of the blocks that the run has skipped."""
        if self.tail is not None:
            passed = self.tail.arrived
            if self.tail.joined and len(self.hold.rows) == self.tail.limit:
                self.record(passed, ())
            self.tail.end()
            self.tail = None

    def release(self, blocks: slice, groups: int, frames: Sequence[int] = ()) -> None:
        """Releases the bytes of some KV groups (`groups`, a mask) of some blocks, and frees the own ones among
        `frames`."""
        released = self.hold.release(blocks, groups)
        if self._counted:
            self._budget.remove(self.hold.rows[blocks], released)
        self.free(self.own.intersection(frames))

    def give_to_trie(self, frames: Sequence[int]) -> None:
        """Gives some of the own frames to the trie. They are not held."""
        self.own.difference_update(frames)
        if self._counted:
            self._budget.taken -= self._frames(frames)

    def free(self, frames: Iterable[int]) -> None:
        """Frees some of the own frames."""
        gone = list(frames)
        self.give_to_trie(gone)
        self._cache.tiers.compute.free(gone)

    def shorten(self, blocks: int) -> None:
        """Shortens the hold to the longest usable prefix of the first `blocks` blocks whose needed bytes are in the GPU
        tier. For a request that does not run."""
        trie, longer, wanted = self._trie, self.hold, self.hold.wanted
        here = trie.there[self.hold.rows[:blocks], self._cache.tiers.compute.level]
        if self._counted:
            self._budget.remove(longer.rows, wanted)
        self._hold_rows(trie.usable(longer.rows[:blocks], here))
        longer.end()

    def end(self) -> None:
        """Ends the hold and frees the own frames."""
        if self.by_layers is not None:
            self.by_layers.end()
        if self._counted:
            self._budget.remove(self.hold.rows, self.hold.wanted, self._frames(self.own))
        self._cache.tiers.compute.free(self.own)
        self.hold.end()
        self._end_tail_nodes()
        if self.tail is not None:
            self.tail.end()
        if self.images is not None:
            self.images.end()
        if self._own_rows is not None:
            self._own_rows.end()

    def _end_tail_nodes(self) -> None:
        if self._tail_nodes is not None:
            self._tail_nodes.end()

    def _frames(self, slots: Collection[int]) -> int:
        """How many frames some slots in flight have. Without slots 0, since there may be no tier."""
        return self._cache.tiers.gpu.frames_of(slots) if slots else 0
