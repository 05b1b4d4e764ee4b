"""What an engine is told of the blocks of its own namespaces, over its session.

Each watch has an announcer of its own, which takes its turn when the engine has read what it was told before: so an
engine that does not read makes nothing grow, and misses nothing. All watches together take a bounded part of the event
loop's time (`LoopShare`): the more there are, and the more each has to tell, the longer are the pauses. A watch takes
3 bytes for each block of a geometry of which it tells, and 20 for each block that it told of.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import numpy as np

from prefixd.base.errors import SessionEndedError
from prefixd.base.tiers import Tier
from prefixd.cache import Namespace, Session, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.server.kv_events.announcer import MEDIA, Announcer, Flags
from prefixd.server.kv_events.event_messages import AllBlocksCleared, BlockRemoved, BlockStored, Event
from prefixd.server.kv_events.loop_share import LoopShare
from prefixd.v1 import cache_pb2 as pb

_TIERS = dict(zip(MEDIA.values(), (Tier.GPU.wire, Tier.CPU.wire, Tier.DISK.wire), strict=True))
_LOOK_S = 0.25  # for namespaces that the session has opened, and for its end
_OPENED_AT_ONCE = 4  # each looks at the namespaces of all blocks: 0.5 ms for a million
_AGAIN_S = 5.0


class BlockWatch(Announcer):
    """Tells of the blocks in the namespaces that a session has open, or had open while it was told.

    Args:
        cache: the cache.
        session: an open session.
        share: of the event loop's time, with other watches; None: its own.
    """

    def __init__(self, cache: TieredCache, session: Session, share: LoopShare | None = None) -> None:
        super().__init__(cache, None, _AGAIN_S)
        self._share = LoopShare() if share is None else share
        self._session = session
        self._told: dict[bytes, int] = {}  # ids of namespaces, with their ordinals
        self._ordinals: Flags = np.zeros(0, np.bool_)  # of which blocks are told
        self._tries: set[int] = set()  # ordinals of the tries that have them, or had
        self._said: list[pb.BlockChange] = []

    async def changes(self) -> AsyncGenerator[pb.BlockChanges, None]:
        """First all blocks, then what changes. Raises SessionEndedError when the session ends."""
        await self._share.turn()
        with self._share.counted():
            self._cache.observe(self._note)
            self.announce_all()
        try:
            while True:
                await self._share.turn()
                if self._session.id not in self._cache.leases.sessions:
                    break
                with self._share.counted():
                    opening = self._open()
                    more = self._turn() or opening
                    said, self._said = self._said, []
                    answer = pb.BlockChanges(changes=said)
                if said:
                    yield answer
                if more:
                    self._wake.set()
                await self._wait(_LOOK_S)
        finally:
            with self._share.counted():
                self._cache.unobserve(self._note)
        raise SessionEndedError(f"session {self._session.id[:8]}, whose blocks were watched, has ended")

    def _open(self) -> bool:
        """Has blocks told of namespaces that the session has opened; whether there may be more of these."""
        opened = [each for each in self._session.namespaces.values() if self._told.get(each.id) != each.ordinal]
        for namespace in opened[:_OPENED_AT_ONCE]:
            if len(self._told) > 2 * len(self._session.namespaces) + _OPENED_AT_ONCE:
                self._told = {key: value for key, value in self._told.items() if key in self._cache.namespaces}
            self._told[namespace.id] = namespace.ordinal
            if namespace.ordinal >= len(self._ordinals):
                self._ordinals = np.concatenate([self._ordinals, np.zeros(namespace.ordinal + 1, np.bool_)])
            self._ordinals[namespace.ordinal] = True
            trie = self._cache.trie(namespace)
            self._tries.add(trie.ordinal)
            self._of(trie).news[: trie.rows] |= trie.namespace[: trie.rows] == namespace.ordinal
            self._changed[trie.ordinal] = None
        return len(opened) > _OPENED_AT_ONCE

    def _publish(self, topic: bytes, events: Sequence[Event]) -> None:
        for event in events:
            change = pb.BlockChange(namespace_id=topic)
            match event:
                case AllBlocksCleared():
                    change.cleared = True
                case BlockRemoved(hashes, medium):
                    change.removed.extend(hashes)
                    change.tier = _TIERS[str(medium)]
                case BlockStored(hashes, parent, tokens):
                    change.stored.extend(hashes)
                    change.tier = _TIERS[str(event.medium)]
                    change.token_ids = np.asarray(tokens, "<u4").tobytes()
                    if parent is not None:
                        change.parent = parent
            self._said.append(change)

    def _topic_of(self, namespace: Namespace) -> bytes:
        return namespace.id

    def _announces(self, namespace: Namespace) -> bool:
        return namespace.id in self._told

    def _tells_of(self, trie: Trie) -> bool:
        return trie.ordinal in self._tries

    def _wanted(self, trie: Trie, rows: Rows | slice) -> Flags | bool:
        ordinals = trie.namespace[rows]
        known = len(self._ordinals)
        wanted: Flags = np.append(self._ordinals, False)[np.minimum(ordinals, known)]
        return wanted
