"""Follows a movement that brings the first layers of its blocks before the last ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefixd.cache.tiers import Slots
from prefixd_swap.block_layers import BlockLayers


class LayerWatch(Protocol):
    """Has a run read blocks whose later layers are still being copied, before they are in the trie.

    ```
    copy            slots allocated | layers 0-7 | 8-15 | 16-23 | 24-31 | in the trie
    calls           begun(slots)    arrived(8)   (16)   (24)    (32)    over(True, ...)
    ```

    Attributes:
        blocks: how many blocks the movement has. It calls nothing unless it copies all of them at once, from memory.
        layers: how the layers lie in a block, which is one part.
        slabs: see `MemoryCopies.submit_layers`.
    """

    blocks: int
    layers: BlockLayers
    slabs: Sequence[tuple[int, int]]

    def begun(self, slots: Slots) -> None:
        """The blocks come into these slots, [blocks, 1], which stay in flight until `over`."""

    def arrived(self, layers: int) -> None:
        """The first `layers` layers of all blocks are there. They may all be: `over` is called soon then."""

    def over(self, come: bool, spare: Slots) -> bool:
        """Nothing is written into the slots any more. Called once after `begun`.

        Args:
            come: all blocks have come, and are in the trie when the caller has gone on.
            spare: the slots that do not enter the trie: of blocks that have not come, or that it has in other slots.

        Returns:
            Whether a run still has the spare slots, and frees them when it ends; else the caller frees them.
        """
