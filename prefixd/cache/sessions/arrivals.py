"""Where the blocks of a session's prompts lay before a hint (Prefetch) had them brought up, until they are asked for.

The hit rates go by where a prompt's blocks lay when its request arrived. An engine says that by its hint: when it asks
for the lease, the blocks are in the CPU tier.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.namespaces import Namespace

MOST = 256
"""Prompts of a session; the oldest is forgotten for another."""
KEPT_S = 600.0
"""A prompt that is asked for later counts by where its blocks are then."""
_RUNS = 64
_NOTHING = np.empty(0, np.int8)


@dataclass(frozen=True, slots=True)
class _Arrival:
    at_s: float
    blocks: int
    tiers: npt.NDArray[np.int8]  # of each run of blocks in one tier
    lengths: npt.NDArray[np.int64]


class Arrivals:
    """Of one session, at most `MOST`, each of at most 64 runs of blocks in one tier."""

    def __init__(self) -> None:
        self.noted: dict[tuple[int, bytes], _Arrival] = {}  # by namespace and key of the last block, the oldest first

    def __len__(self) -> int:
        return len(self.noted)

    def note(self, namespace: Namespace, chain: BlockChain, tiers: npt.NDArray[np.int8], now_s: float) -> None:
        """A hint was given for a prompt: its first blocks lie in these tiers. An earlier hint for it stays what counts.

        Args:
            namespace: the prompt's.
            chain: its blocks, of which those that were found are hashed.
            tiers: [blocks] of each that was found.
            now_s: seconds, on the clock of `take`.
        """
        self._forget(now_s)
        key = namespace.ordinal, chain.key(len(tiers) - 1)
        if key in self.noted:
            return
        if len(self.noted) >= MOST:
            del self.noted[next(iter(self.noted))]
        starts = np.flatnonzero(np.diff(tiers, prepend=np.int8(-1)))
        lengths = np.diff(starts, append=len(tiers))
        self.noted[key] = _Arrival(now_s, len(tiers), tiers[starts[:_RUNS]], lengths[:_RUNS].copy())  # no views

    def take(self, namespace: Namespace, chain: BlockChain, now_s: float) -> npt.NDArray[np.int8]:
        """[blocks]: where the first blocks of a prompt lay at the hint for it, or for the longest beginning of it; none
        without one. It is forgotten then: the prompt is counted once."""
        self._forget(now_s)
        hashed = chain.hashed  # no more is hashed for it
        found = [
            key
            for key, arrival in self.noted.items()
            if key[0] == namespace.ordinal and arrival.blocks <= hashed and chain.key(arrival.blocks - 1) == key[1]
        ]
        if not found:
            return _NOTHING
        arrival = self.noted.pop(max(found, key=lambda key: self.noted[key].blocks))
        return np.repeat(arrival.tiers, arrival.lengths)

    def _forget(self, now_s: float) -> None:
        while self.noted and now_s - self.noted[key := next(iter(self.noted))].at_s > KEPT_S:
            del self.noted[key]
