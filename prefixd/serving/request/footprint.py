"""What a request has of the GPU tier."""

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
from prefixd.serving.loading.tail_load import TailLoad


class Footprint:
    """The cached blocks that a request holds in the GPU tier, and the frames that only it has.

    ```
    block      0    1    2  |  3    4  |  5    6
    rows     [ 17   18   40 |  52   53 ]               held: found when the request was staged | recorded by its run
    own                                [ 902  903 ]    in flight: in no trie yet
    ```

    Of the blocks that were found, the bytes are held that the rules of the KV groups need; while the request runs, it
    lets go of what its windows have passed.

    While it runs, `tail` may bring further blocks of its prefix to the tier, from the back on, and holds them. Until
    then these blocks stay in the trie, wherever their bytes are, or are not any more.

    A frame here is a slot of the tier, which with block tables is the first of several (`KvShape`); the budget counts
    them all.

    The hold is taken here, when the request is staged, and ended by `end`, whatever happened in between. The frames
    count in the budget unless the request can be made to give them up (`yield_frames`).

    Args:
        cache: where the blocks are.
        budget: counts the frames.
        owner: whose footprint it is, for people.
        trie: of the blocks.
        rows: blocks from the prompt's first on; what they need is in the GPU tier or will be brought there.
        images: what it has of its images, if they are not in the prompt's blocks.
        behind: the blocks that `tail` will be about.

    Attributes:
        hold: of the cached blocks, in the GPU tier: of each the bytes of its `wanted` KV groups.
        own: the frames in flight.
        tail: what is loaded beside the run, if anything.
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
        self._beneath: Hold | None = None
        self._behind = None if behind is None else cache.holds.hold(owner, trie, behind)
        self._cache = cache
        self._budget = budget
        self._owner = owner
        self._trie = trie
        self._counted = True
        self.own: set[int] = set()
        self._begin(rows)

    def _begin(self, rows: Rows) -> None:
        wanted = self._trie.needed(len(rows)) if self._trie.has_rules else None
        compute = self._cache.tiers.compute
        self.hold = self._cache.holds.hold(self._owner, self._trie, rows, compute, wanted, counted=compute)
        if self._counted:
            self._budget.add(self._trie, rows, wanted)

    async def make_own_rows(self, namespace: Namespace, chain: BlockChain) -> None:
        """Makes the rows that blocks recorded behind common ones will continue; see `enter_own`. The footprint may have
        ended when this returns."""
        if self._beneath is not None:
            return
        path = self.hold.rows if self._behind is None else np.concatenate([self.hold.rows, self._behind.rows])
        others = np.flatnonzero(self._trie.namespace[path] != namespace.ordinal)
        if len(others):
            holds = self._cache.holds
            self._beneath = holds.hold(self._owner, self._trie, path[:0])
            await enter_own(self._beneath, namespace, chain, int(others[-1]) + 1, self._cache.clock())

    def own_row(self, block: int) -> int | None:
        """The row of the request's own namespace for a block that `make_own_rows` was about."""
        rows = () if self._beneath is None else self._beneath.rows
        return int(rows[block]) if block < len(rows) else None

    def yield_frames(self) -> None:
        """The request can give its frames up from now on."""
        self._budget.remove(self.hold.rows, self.hold.wanted)
        self._counted = False
        if self.images is not None:
            self.images.yield_frames()

    def claim_frames(self, own: Iterable[int]) -> None:
        """The request keeps its frames from now on, and gets these, in flight, for itself."""
        self.own.update(own)
        self._budget.add(self._trie, self.hold.rows, self.hold.wanted, self._frames(self.own))
        self._counted = True

    def extend(self, own: list[int]) -> None:
        """Adds frames in flight to those of a request that keeps its frames."""
        self.own.update(own)
        self._budget.taken += self._frames(own)

    def record(self, rows: Rows, given: Iterable[int], wanted: GroupMask | None = None) -> None:
        """Adds blocks that the worker has filled and the trie has now, with their `wanted` groups, and with them the
        `given` frames."""
        gone = self.own.intersection(given)
        self.own -= gone
        self.hold.extend(rows, wanted)
        self._budget.add(self._trie, rows, wanted, -self._frames(gone))

    def begin_tail(self, tail: TailLoad) -> None:
        """The request runs, and from now on `tail` has the blocks behind it."""
        self.tail = tail
        self._end_behind()

    def end_tail(self) -> None:
        """Nothing is loaded any more beside the run. What the run has passed over, it holds from now on."""
        if self.tail is not None:
            passed = self.tail.arrived
            if self.tail.joined and len(self.hold.rows) == self.tail.limit:
                self.record(passed, ())
            self.tail.end()
            self.tail = None

    def release(self, blocks: slice, groups: int, frames: Sequence[int] = ()) -> None:
        """Lets go of what some KV groups, a mask, have of some blocks, and frees those of the `frames` that are its
        own."""
        released = self.hold.release(blocks, groups)
        if self._counted:
            self._budget.remove(self.hold.rows[blocks], released)
        self.free(self.own.intersection(frames))

    def give_to_trie(self, frames: Sequence[int]) -> None:
        """These of the own frames are the trie's now, and not held."""
        self.own.difference_update(frames)
        if self._counted:
            self._budget.taken -= self._frames(frames)

    def free(self, frames: Iterable[int]) -> None:
        """Frees some of the own frames."""
        gone = list(frames)
        self.give_to_trie(gone)
        self._cache.tiers.compute.free(gone)

    def shorten(self, blocks: int) -> None:
        """Holds the longest usable prefix of the first `blocks` blocks, of which the bytes needed are in the GPU tier.

        For a request that does not run.
        """
        trie, longer, wanted = self._trie, self.hold, self.hold.wanted
        here = trie.there[self.hold.rows[:blocks], self._cache.tiers.compute.level]
        if self._counted:
            self._budget.remove(longer.rows, wanted)
        self._begin(trie.usable(longer.rows[:blocks], here))
        longer.end()

    def end(self) -> None:
        """Ends the hold and frees the own frames."""
        if self._counted:
            self._budget.remove(self.hold.rows, self.hold.wanted, self._frames(self.own))
        self._cache.tiers.compute.free(self.own)
        self.hold.end()
        self._end_behind()
        if self.tail is not None:
            self.tail.end()
        if self.images is not None:
            self.images.end()

        if self._beneath is not None:
            self._beneath.end()

    def _end_behind(self) -> None:
        if self._behind is not None:
            self._behind.end()

    def _frames(self, slots: Collection[int]) -> int:
        """How many frames slots in flight have; none where there are no slots, and maybe no tier."""
        return self._cache.tiers.gpu.frames_of(slots) if slots else 0
