"""Replays a trace against one tier, which evicts blocks by an eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from prefixd.cache.ghosts.miniature import Miniature
from prefixd_swap import EvictionPolicy


def replay(
    paths: Sequence[npt.NDArray[np.int32]],
    at_s: Sequence[float],
    blocks: int,
    capacity: int,
    policy: EvictionPolicy,
    progress: Callable[[], None] = lambda: None,
    *,
    block_tokens: int = 512,
    block_bytes: int = 1 << 20,
) -> int:
    """Counts the blocks that a tier of `capacity` blocks finds, under a policy without history.

    Each request holds the blocks that it finds, and then stores the missing ones, as far as there is room.

    Args:
        paths: for each request the numbers of its blocks, first to last; a number stands for a whole prefix.
        at_s: arrival of each request.
        blocks: how many different numbers there are, from 0 on.
        capacity: of the tier, in blocks.
        policy: chooses the blocks to evict.
        progress: called after each request.
        block_tokens, block_bytes: sizes of a block.
    """
    tier = Miniature(blocks, capacity, policy, block_tokens=block_tokens, block_bytes=block_bytes)
    hits = 0
    for path, now_s in zip(paths, at_s, strict=True):
        hits += tier.use(path.astype(np.int64), now_s)
        progress()
    return hits
