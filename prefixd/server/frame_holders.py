"""Who holds the GPU tier's frames, for people: what to end, unpin or enlarge when no frame becomes free."""

from __future__ import annotations

import numpy as np

from prefixd.cache import TieredCache

_NAMED = 3


def name_holders(cache: TieredCache, *, owners: bool = True) -> str:
    """How many of the tier's frames are held, how many of those are pinned, and, for an operator, who holds most."""
    pool, tier = cache.tiers.frames, cache.tiers.compute
    bit = np.uint8(1 << tier.level)
    text = f"{tier.used_bytes // pool.frame_bytes} of {pool.capacity} frames of the gpu tier are held"
    pinned = sum(
        int(np.count_nonzero(trie.pinned[: trie.rows] & ((trie.any_part[: trie.rows] & bit) != 0)))
        for trie in cache.tries
    )
    if pinned:
        text += f", {pinned} blocks are pinned"
    holders = cache.mover.placement.holds.blocks_by_owner().most_common(_NAMED)
    if holders and owners:
        text += "; most by " + ", ".join(f"{owner} ({blocks} blocks)" for owner, blocks in holders)
    return text
