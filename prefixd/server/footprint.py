"""What a request has of the GPU tier."""

from __future__ import annotations

from collections.abc import Iterable

from prefixd.cache import TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.server.frame_budget import FrameBudget


class Footprint:
    """The cached blocks that a request holds in the GPU tier, and the frames that only it has.

    ```
    block      0    1    2  |  3    4  |  5    6
    rows     [ 17   18   40 |  52   53 ]               held: found when the request was staged | recorded by its run
    own                                [ 902  903 ]    in flight: in no trie yet
    ```

    The hold is taken here, when the request is staged, and ended by `end`, whatever happened in between. The frames
    count in the budget unless the request can be made to give them up (`yield_frames`).

    Args:
        cache: where the blocks are.
        budget: counts the frames.
        owner: whose footprint it is, for people.
        trie: of the blocks.
        rows: blocks from the prompt's first on; they are in the GPU tier or will be brought there.
    """

    def __init__(self, cache: TieredCache, budget: FrameBudget, owner: str, trie: Trie, rows: Rows) -> None:
        self._cache = cache
        self._budget = budget
        self._trie = trie
        self._hold = cache.mover.placement.holds.hold(owner, trie, rows, cache.tiers.compute)
        self._counted = True
        self.own: set[int] = set()
        budget.add(trie, rows)

    @property
    def rows(self) -> Rows:
        """The blocks held."""
        return self._hold.rows

    def yield_frames(self) -> None:
        """The request can give its frames up from now on."""
        self._budget.remove(self.rows)
        self._counted = False

    def claim_frames(self, own: Iterable[int]) -> None:
        """The request keeps its frames from now on, and gets these, in flight, for itself."""
        self.own.update(own)
        self._budget.add(self._trie, self.rows, len(self.own))
        self._counted = True

    def extend(self, own: list[int]) -> None:
        """Adds frames in flight to those of a request that keeps its frames."""
        self.own.update(own)
        self._budget.taken += len(own)

    def record(self, rows: Rows, given: Iterable[int]) -> None:
        """Adds blocks that the worker has filled and the trie has now, and with them the `given` frames."""
        before = len(self.own)
        self.own.difference_update(given)
        self._hold.extend(rows)
        self._budget.add(self._trie, rows, len(self.own) - before)

    def shorten(self, blocks: int) -> None:
        """Ends the hold on all but the first `blocks` blocks."""
        if self._counted:
            self._budget.remove(self.rows[blocks:])
        self._hold.shrink(blocks)

    def end(self) -> None:
        """Ends the hold and frees the own frames."""
        if self._counted:
            self._budget.remove(self.rows, len(self.own))
        self._cache.tiers.compute.free(self.own)
        self._hold.end()
