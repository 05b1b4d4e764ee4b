"""Writes the tiers of a prefix's blocks into the contract's messages, run-length encoded."""

from __future__ import annotations

import numpy as np

from prefixd.base.long_work.pacer import give_way
from prefixd.base.tiers import Tier
from prefixd.cache import Trie
from prefixd.cache.index.trie import Rows
from prefixd.v1 import cache_pb2 as pb

_RUNS_AT_ONCE = 256  # listed in one turn


async def tier_runs(trie: Trie, path: Rows) -> list[pb.TierRun]:
    """Returns the present tiers of the blocks of a usable prefix, run-length encoded."""
    tiers = trie.distances(path)
    starts = np.flatnonzero(np.diff(tiers, prepend=-1))
    lengths = np.diff(starts, append=len(tiers))
    runs = []
    for tier, blocks in zip(tiers[starts].tolist(), lengths.tolist(), strict=True):
        runs.append(pb.TierRun(tier=Tier(tier).wire, blocks=blocks))
        if not len(runs) % _RUNS_AT_ONCE:
            await give_way()
    return runs
