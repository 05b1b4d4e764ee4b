"""Loads a prefix layer by layer: a request computes its first layers while the last ones are on their way.

Paper `prefix_cache_long_term_memory`, V.C.

```
CPU to GPU     | layers 0-7  | 8-15        | 16-23       | 24-31       |
                     of all blocks
worker                       | 0-7 |-wait- | 8-15 |-wait-| 16-23 |-wait| 24-31 | first token
whole blocks                                                           | 0-31                    | first token
```

The blocks enter the trie when all their layers are there. Until then they are in flight: nobody else finds them, and if
the load fails, the run is taken back before it has computed anything that counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.trie import Rows
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots
from prefixd_swap.block_layers import BlockLayers


class LayerLoad:
    """The load of the blocks that one request lacks in the GPU tier. It follows their copy (`LayerWatch`).

    ```
    state     waits --begun--> under way --over--> in the trie, or failed
    frames    none             `slots`             the trie's; spare ones are the run's own, or free
    ```

    Args:
        rows: [m] all cached blocks of the request.
        lacking: [m] the KV groups that the GPU tier lacks of each.
        layers: how the layers lie in a block.
        slabs: the first layer of each slab, and the one behind its last.
        ready: called when the blocks have slots: the request may be handed over.

    Attributes:
        changed: set when it has ended.
        failed: some blocks have not come.
        ended: no request needs it any more.
    """

    def __init__(
        self,
        rows: Rows,
        lacking: GroupMask,
        layers: BlockLayers,
        slabs: Sequence[tuple[int, int]],
        ready: Callable[[], None],
    ) -> None:
        self.layers = layers
        self.slabs = slabs
        self.changed = asyncio.Event()
        self.failed = self.ended = False
        self._places: npt.NDArray[np.bool_] = lacking != 0
        self.rows: Rows = rows[self._places]
        self.wanted: GroupMask = lacking[self._places]
        self.blocks = len(self.rows)
        self._ready = ready
        self._slots: Slots | None = None
        self._come = 0  # layers of all blocks
        self._tell: Callable[[int], None] | None = None
        self._keep: Callable[[list[int]], None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether its blocks have slots, and are not in the trie yet."""
        return self._slots is not None

    def place(self, frames: npt.NDArray[np.int64]) -> None:
        """Puts the frames of its blocks into those of all blocks, [m, slots of a block], while it is under way."""
        if self._slots is not None:
            frames[self._places] = self._slots

    # -- the run ----------------------------------------------------------------------------------------------------

    def run(self, tell: Callable[[int], None], keep: Callable[[list[int]], None]) -> None:
        """A run has the frames from now on, while this is under way.

        Args:
            tell: called with the number of layers that the run may read: now, and whenever there are more.
            keep: takes over frames that the run has and that do not enter the trie.
        """
        self._tell, self._keep = tell, keep
        if self._come:
            tell(self._come)

    def end(self) -> None:
        """No request needs it any more: the run has let go of the frames, or there will be none."""
        self.ended, self._tell, self._keep = True, None, None
        self.changed.set()

    def complete(self) -> None:
        """All blocks are in the trie."""
        if self._tell is not None:
            self._tell(self.layers.layers)

    # -- the copy (`LayerWatch`) ------------------------------------------------------------------------------------

    def begun(self, slots: Slots) -> None:
        """As `LayerWatch.begun`."""
        self._slots = slots
        if not self.ended:
            self._ready()

    def arrived(self, layers: int) -> None:
        """As `LayerWatch.arrived`. Of the last layers the run is told by `complete`: what it computes then is entered
        behind these blocks, which must be in the trie before."""
        if layers < self.layers.layers:
            self._come = layers
            if self._tell is not None:
                self._tell(layers)

    def over(self, come: bool, spare: Slots) -> bool:
        """As `LayerWatch.over`."""
        self._slots, self.failed = None, not come
        if self._keep is None:
            return False
        self._keep(spare.ravel().tolist())
        return True
