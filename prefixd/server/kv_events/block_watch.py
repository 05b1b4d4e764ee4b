"""Announces the blocks of an engine's own namespaces to it, over its session.

Each watch has an announcer of its own, which takes its turn once the engine has read the last message: so no queue
grows if an engine does not read, and the engine misses nothing. All watches together take a bounded part of the event
loop's time (`LoopShare`): the pauses are longer if there are more watches, or if each has more to announce. A watch
takes 3 bytes for each block of a geometry that it watches, and 20 bytes for each block that it has announced.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import numpy as np

from prefixd.base.errors import SessionEndedError
from prefixd.base.tiers import Tier
from prefixd.cache import Namespace, Session, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.server.kv_events.announced_rows import Flags
from prefixd.server.kv_events.announcer import Announcer
from prefixd.server.kv_events.event_messages import MEDIA, AllBlocksCleared, BlockRemoved, BlockStored, Event
from prefixd.server.kv_events.loop_share import LoopShare
from prefixd.v1 import cache_pb2 as pb

_TIERS = dict(zip(MEDIA.values(), (Tier.GPU.wire, Tier.CPU.wire, Tier.DISK.wire), strict=True))
_CHECK_S = 0.25  # how often a watch checks whether its session has opened namespaces or has ended
_OPENED_AT_ONCE = 4  # adding one reads the namespace of every block: 0.5 ms for a million
_AGAIN_S = 5.0


class BlockWatch(Announcer):
    """Announces the blocks in the namespaces that a session has open, or had open at some time during the watch.

    Args:
        cache: the cache.
        session: an open session.
        share: the part of the event loop's time that all watches share; None: one for this watch alone.
    """

    def __init__(self, cache: TieredCache, session: Session, share: LoopShare | None = None) -> None:
        super().__init__(cache, None, _AGAIN_S)
        self._share = LoopShare() if share is None else share
        self._session = session
        self._watched: dict[bytes, int] = {}  # ordinals of the announced namespaces, by id
        self._watched_ordinals: Flags = np.zeros(0, np.bool_)  # by ordinal: the namespace is announced
        self._tries: set[int] = set()  # ordinals of the tries that have, or had, blocks of these namespaces
        self._unsent: list[pb.BlockChange] = []

    async def changes(self) -> AsyncGenerator[pb.BlockChanges, None]:
        """Yields all blocks first, then every change. Raises SessionEndedError when the session ends."""
        await self._share.turn()
        with self._share.counted():
            self._cache.observe(self._mark_changed)
            self.announce_all()
        try:
            while True:
                await self._share.turn()
                if self._session.id not in self._cache.leases.sessions:
                    break
                with self._share.counted():
                    opening = self._add_opened_namespaces()
                    more = self._run_turn() or opening
                    changes, self._unsent = self._unsent, []
                    answer = pb.BlockChanges(changes=changes)
                if changes:
                    yield answer
                if more:
                    self._wake.set()
                await self._wait_for_changes(_CHECK_S)
        finally:
            with self._share.counted():
                self._cache.unobserve(self._mark_changed)
        raise SessionEndedError(f"session {self._session.id[:8]}, whose blocks were watched, has ended")

    def _add_opened_namespaces(self) -> bool:
        """Adds namespaces that the session has opened to the watch, four at most; returns True if there are more."""
        opened = [each for each in self._session.namespaces.values() if self._watched.get(each.id) != each.ordinal]
        for namespace in opened[:_OPENED_AT_ONCE]:
            if len(self._watched) > 2 * len(self._session.namespaces) + _OPENED_AT_ONCE:
                self._watched = {key: value for key, value in self._watched.items() if key in self._cache.namespaces}
            self._watched[namespace.id] = namespace.ordinal
            if namespace.ordinal >= len(self._watched_ordinals):
                longer = np.zeros(namespace.ordinal + 1, np.bool_)
                self._watched_ordinals = np.concatenate([self._watched_ordinals, longer])
            self._watched_ordinals[namespace.ordinal] = True
            trie = self._cache.trie(namespace)
            self._tries.add(trie.ordinal)
            self._rows_of(trie).changed[: trie.rows] |= trie.namespace[: trie.rows] == namespace.ordinal
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
            self._unsent.append(change)

    def _topic_of(self, namespace: Namespace) -> bytes:
        return namespace.id

    def _is_announced(self, namespace: Namespace) -> bool:
        return namespace.id in self._watched

    def _may_announce(self, trie: Trie) -> bool:
        return trie.ordinal in self._tries

    def _announced_namespaces(self, trie: Trie, rows: Rows | slice) -> Flags | bool:
        ordinals = trie.namespace[rows]
        known = len(self._watched_ordinals)
        watched: Flags = np.append(self._watched_ordinals, False)[np.minimum(ordinals, known)]
        return watched
