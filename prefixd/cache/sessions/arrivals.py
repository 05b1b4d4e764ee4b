"""Remembers the tiers of a prompt's blocks at the time of a hint (Prefetch), until the prompt is leased.

Hit rates count the tiers that had a prompt's blocks when its request arrived, which is when the engine sends the hint.
When it acquires the lease, the blocks are in the CPU tier already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.namespaces import Namespace

MOST = 256
"""Prompts of a session; beyond it the oldest is forgotten."""
KEPT_S = 600.0
"""A hint is forgotten after this time."""
_RUNS = 64
_NOTHING = np.empty(0, np.int8)


@dataclass(slots=True)
class _Arrival:
    at_s: float
    blocks: int
    tiers: npt.NDArray[np.int8]  # of each run of blocks in one tier
    lengths: npt.NDArray[np.int64]
    brought_s: float | None = None


class Arrivals:
    """The hints of one session: at most `MOST`, each with at most 64 runs of blocks in one tier."""

    def __init__(self) -> None:
        self.noted: dict[tuple[int, bytes], _Arrival] = {}  # by namespace and key of the last block, the oldest first

    def __len__(self) -> int:
        return len(self.noted)

    def note(self, namespace: Namespace, chain: BlockChain, tiers: npt.NDArray[np.int8], now_s: float) -> None:
        """Notes the tiers of a prompt's first blocks at a hint, unless there is an earlier hint for the prompt.

        Args:
            namespace: the prompt's.
            chain: the prompt's blocks; those that were found are hashed.
            tiers: [blocks] the tier of each block that was found.
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

    def brought(self, namespace: Namespace, key: bytes, now_s: float) -> None:
        """Notes that the blocks of a hint, whose last one has this key, have been brought up."""
        if (arrival := self.noted.get((namespace.ordinal, key))) is not None:
            arrival.brought_s = now_s

    def take(
        self,
        namespace: Namespace,
        chain: BlockChain,
        now_s: float,
        lead: Callable[[float], None] = lambda seconds: None,
    ) -> npt.NDArray[np.int8]:
        """[blocks]: the tiers of a prompt's first blocks at the hint for it, or for its longest beginning; empty
        without a hint. Forgets the hint, since a prompt counts once.

        `lead` is called with the seconds since the hint's blocks were brought up, 0 if they are on their way still.
        """
        self._forget(now_s)
        hashed = chain.hashed  # do not hash more blocks
        found = [
            key
            for key, arrival in self.noted.items()
            if key[0] == namespace.ordinal and arrival.blocks <= hashed and chain.key(arrival.blocks - 1) == key[1]
        ]
        if not found:
            return _NOTHING
        arrival = self.noted.pop(max(found, key=lambda key: self.noted[key].blocks))
        lead(0.0 if arrival.brought_s is None else now_s - arrival.brought_s)
        return np.repeat(arrival.tiers, arrival.lengths)

    def _forget(self, now_s: float) -> None:
        while self.noted and now_s - self.noted[key := next(iter(self.noted))].at_s > KEPT_S:
            del self.noted[key]
