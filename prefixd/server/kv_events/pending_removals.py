"""Removals that wait to be published, of any number of rows; each turn publishes a bounded part of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from prefixd.cache.index.trie import Rows
from prefixd.server.kv_events.announced_rows import AnnouncedRows, Bits, Hashes
from prefixd.server.kv_events.engine_blocks import EngineBlocks
from prefixd.server.kv_events.event_messages import LOCALITY, BlockRemoved

_TURN_HASHES = 4096  # hashes that one turn publishes
_TURN_FORGOTTEN = 1024  # engine's blocks that one turn forgets


class RemovalQueue:
    """Queues removals, and forgets the engine's blocks that no tier has after them.

    Args:
        engine_blocks: counts the announced blocks of the cache that begin with each of the engine's blocks.
        media: vLLM's name of a tier's medium, by tier level: {0: "GPU"}.
    """

    def __init__(self, engine_blocks: EngineBlocks, media: Mapping[int, str]) -> None:
        self._engine_blocks = engine_blocks
        self._media = media
        self._removed: deque[tuple[bytes, int, Hashes]] = deque()  # topic, tier level, hashes
        self._unused: deque[Rows] = deque()  # ids of engine's blocks to forget

    def __bool__(self) -> bool:
        return bool(self._removed or self._unused)

    def add(self, announced: AnnouncedRows, rows: Rows, tiers: Bits, topics: Sequence[bytes]) -> None:
        """Queues the removal of each row from its `tiers`; `topics` are the names of the topics by number."""
        unused = []
        for tier in self._media:
            of_tier = rows[(tiers & np.uint8(1 << tier)) != 0]
            numbers = announced.topic[of_tier]
            for number in np.unique(numbers).tolist():
                of_topic = of_tier[numbers == number]
                inner = self._engine_blocks.remove(announced.inner[of_topic].astype(np.int64), tier)
                hashes = np.concatenate([announced.hashes[of_topic], self._engine_blocks.hashes(inner)])
                self._removed.append((topics[number], tier, hashes))
                unused.append(inner)
        if unused:
            ids = self._engine_blocks.unused(np.unique(np.concatenate(unused)))
            self._unused += np.split(ids, range(_TURN_FORGOTTEN, len(ids), _TURN_FORGOTTEN)) if len(ids) else []

    def pop_events(self) -> dict[bytes, list[BlockRemoved]]:
        """Takes one turn's part from the queue; returns its events by topic."""
        if self._unused:
            self._engine_blocks.forget(self._unused.popleft())
        left = _TURN_HASHES
        by_topic: dict[bytes, list[BlockRemoved]] = {}
        while left and self._removed:
            topic, tier, hashes = self._removed.popleft()
            now, later = hashes[:left], hashes[left:]
            left -= len(now)
            if len(later):
                self._removed.appendleft((topic, tier, later))
            event = BlockRemoved(now.tolist(), self._media[tier], locality=LOCALITY)
            by_topic.setdefault(topic, []).append(event)
        return by_topic
