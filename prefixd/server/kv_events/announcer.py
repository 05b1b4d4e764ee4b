"""Announces blocks: publishes the difference between what was announced of the cache and what is true now.

The cache says which rows of its tries changed; a turn reads a changed row later and announces its state then. So a
block that came and went in between costs nothing, the changes that wait are bounded by the size of the tries, and no
queue can overflow. All removals are published first, since a removed block may be back in another row; then stored
blocks, parents before children. A turn on the event loop does a bounded part of that.

Events are in the engine's blocks (`events.block_tokens`), of which a block of the cache has several; `block_hashes`
draws them. A block that cannot be divided into blocks of that size is announced whole. If a model has
several KV groups, `tiers_with_block` decides whether a tier has a block.

A subscriber that missed events needs everything announced from the beginning, after AllBlocksCleared (`announce_all`).
That happens at most every `again_s` seconds, and takes at most a tenth of the time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

import numpy as np

from prefixd.cache import Namespace, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.server.kv_events.announced_rows import AnnouncedRows, Flags, choose_rows_to_store, tiers_with_block
from prefixd.server.kv_events.block_hashes import BlockHashes, salt_keys
from prefixd.server.kv_events.engine_blocks import EngineBlocks
from prefixd.server.kv_events.event_messages import MEDIA, AllBlocksCleared, BlockStored, Event
from prefixd.server.kv_events.pending_removals import RemovalQueue
from prefixd.server.kv_events.stored_blocks import StoredBlocks

log = logging.getLogger(__name__)

_GATHER_S = 0.004  # the pause between turns: changes within it go into one batch
# What one turn does at most, in the order of its steps:
_TURN_NAMESPACES = 512  # topics that it clears when everything is announced again
_TURN_TRIES = 256  # tries of which it reads changed rows
_TURN_ROWS = 32_768  # changed rows that it reads, of all tries together but for the last
_TURN_COUNTED = 4096  # engine's blocks in these rows, where a block has several
_TURN_BLOCKS = 512  # engine's blocks that it announces as stored
_TURN_TOKENS = 16_384  # their tokens
_SPARE_TOPICS = 256
_LOGGED_SIZES = 64
_ANEW_SHARE = 10  # announcing everything again takes at most this fraction of the time: one tenth


class Announcer(ABC):
    """Announces the blocks of all tiers; a subclass says which, under which topic, and sends the events.

    Args:
        cache: the cache, restored.
        block_tokens: tokens of an engine's block; None: blocks are announced as the cache has them.
        again_s: seconds from one announcement of everything to the next.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: TieredCache,
        block_tokens: int | None,
        again_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._engine_tokens = block_tokens
        self._again_s = again_s
        self._clock = clock
        # A shared store is equally far from every host, so its blocks are no reason to send a request to this one.
        self._media = {tier.level: MEDIA[tier.name] for tier in cache.tiers if tier is not cache.tiers.remote}
        self._hashes = BlockHashes(cache.namespaces.at)
        self._announced: dict[int, AnnouncedRows] = {}  # by the trie's ordinal, as the next two
        self._changed: dict[int, None] = {}  # tries with changed rows, the oldest change first
        self._storing: dict[int, None] = {}  # tries that may have rows to store
        self._replaced: list[AnnouncedRows] = []  # of tries that have another geometry now: all of it is removed
        self._undivided: set[int] = set()  # block sizes that the log has named
        self._engine_blocks = EngineBlocks(len(MEDIA))
        self._removals = RemovalQueue(self._engine_blocks, self._media)
        self._topic_numbers: dict[bytes, int] = {}  # of topics that have had their AllBlocksCleared
        self._topics: list[bytes] = []  # by number
        self._again = False  # `announce_all` was called, and its announcement has not begun
        self._announcing_all = False  # an announcement of everything is under way
        self._began_s = 0.0  # when it began
        self._earliest_s = self._clock()  # when the next one may begin
        self._clearing: Iterator[None] = iter(())  # clears one topic a step, before a block is stored under it
        self._wake = asyncio.Event()

    @abstractmethod
    def _publish(self, topic: bytes, events: Sequence[Event]) -> None:
        """Sends events; never waits."""

    @abstractmethod
    def _topic_of(self, namespace: Namespace) -> bytes:
        """Returns the topic under which a namespace's blocks are announced."""

    @abstractmethod
    def _is_announced(self, namespace: Namespace) -> bool:
        """True if the namespace's blocks are announced."""

    def _announced_namespaces(self, trie: Trie, rows: Rows | slice) -> Flags | bool:
        """Flags the rows that may be of announced namespaces; True for all, if finding out would take long."""
        return True

    def _may_announce(self, trie: Trie) -> bool:
        """True if the trie may have blocks that are announced."""
        return True

    @property
    def _fixed_topics(self) -> tuple[bytes, ...]:
        """Topics that are cleared at the beginning even if there is no namespace yet."""
        return ()

    def announce_all(self) -> None:
        """Requests that everything be announced from the beginning: after the announcement of everything that is under
        way, if there is one, and not earlier than `again_s` after the last one began."""
        self._again = True
        self._wake.set()

    def _mark_changed(self, trie: Trie, rows: int | Rows) -> None:
        """Observes the cache: these rows of the trie changed."""
        if self._may_announce(trie):
            self._rows_of(trie).changed[rows] = True
            self._changed[trie.ordinal] = None
            self._wake.set()

    def _rows_of(self, trie: Trie) -> AnnouncedRows:
        """Returns what was announced of a trie, with room for all its rows."""
        announced, pieces = self._announced.get(trie.ordinal), self._pieces(trie)
        if announced is None or announced.pieces != pieces:
            if announced is not None:
                self._replaced.append(announced)
            announced = self._announced[trie.ordinal] = AnnouncedRows(pieces)
        announced.grow(len(trie.parent))
        return announced

    def _pieces(self, trie: Trie) -> int:
        """Returns the number of engine's blocks as which one block of the trie is announced."""
        if self._engine_tokens is None:
            return 1
        pieces, rest = divmod(trie.block_tokens, self._engine_tokens)
        if rest and trie.block_tokens not in self._undivided and len(self._undivided) < _LOGGED_SIZES:
            self._undivided.add(trie.block_tokens)
            log.warning(
                "blocks of %d tokens cannot be divided into blocks of events.block_tokens = %d and are announced "
                "whole; a router that counts in other blocks does not find them",
                trie.block_tokens,
                self._engine_tokens,
            )
        return 1 if rest else pieces

    # -- turns --------------------------------------------------------------------------------------------------

    async def _wait_for_changes(self, most_s: float | None = None) -> None:
        """Waits until something is to be announced, at most `most_s` seconds, and 4 ms for changes that follow it."""
        pause_s = max(0.0, self._earliest_s - self._clock()) if self._again and not self._announcing_all else None
        limits = [limit for limit in (pause_s, most_s) if limit is not None]
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), min(limits, default=None))
        await asyncio.sleep(_GATHER_S)
        self._wake.clear()

    def _run_turn(self) -> bool:
        """Announces a bounded part of what changed; returns True if the next part can follow at once."""
        if self._again and not self._announcing_all and self._clock() >= self._earliest_s:
            self._begin_again()
        if sum(1 for _ in islice(self._clearing, _TURN_NAMESPACES)):
            return True
        self._compare_changed_tries()
        self._replaced = [announced for announced in self._replaced if self._remove_rows(announced)]
        if self._replaced or self._changed:
            return True
        if self._removals:
            for topic, events in self._removals.pop_events().items():
                self._publish(topic, events)
        else:
            self._publish_stored()
        more = bool(self._storing)
        if self._announcing_all and not more:
            self._announcing_all = False
            now = self._clock()
            self._earliest_s = max(self._began_s + self._again_s, now + (_ANEW_SHARE - 1) * (now - self._began_s))
        return more or bool(self._removals)

    def _begin_again(self) -> None:
        """Forgets what was announced, and flags all blocks as blocks to store."""
        self._again, self._announcing_all, self._began_s = False, True, self._clock()
        self._engine_blocks = EngineBlocks(len(MEDIA))
        self._removals = RemovalQueue(self._engine_blocks, self._media)
        before, self._topics = self._topics, []
        self._topic_numbers.clear()
        for topic in self._fixed_topics:
            self._clear_topic(topic)
        self._clearing = self._clear_topics(before)
        self._storing.clear()
        for trie in self._cache.tries:
            if self._may_announce(trie):
                announced = self._rows_of(trie)
                announced.tiers[:] = 0
                rows = slice(0, trie.rows)
                announced.to_store[rows] = (tiers_with_block(trie, rows) != 0) & self._announced_namespaces(trie, rows)
                if announced.to_store.any():
                    self._storing[trie.ordinal] = None
        self._replaced.clear()  # also those that the loop above has added

    def _clear_topics(self, before: list[bytes]) -> Iterator[None]:
        """Clears the topics of all namespaces, and then those of `before` that no namespace has any more."""
        for namespace in self._cache.namespaces:
            if self._is_announced(namespace):
                self._clear_topic(self._topic_of(namespace))
            yield
        for topic in before:
            if topic not in self._topic_numbers:  # its namespace was forgotten
                self._publish(topic, [AllBlocksCleared()])
            yield

    def _clear_topic(self, topic: bytes) -> int:
        """Publishes AllBlocksCleared as the first event under a topic; returns the topic's number."""
        if topic not in self._topic_numbers:
            self._topic_numbers[topic] = len(self._topics)
            self._topics.append(topic)
            self._publish(topic, [AllBlocksCleared()])
            if len(self._topics) > 2 * len(self._cache.namespaces) + _SPARE_TOPICS:
                self.announce_all()  # which drops the topics of namespaces that were forgotten
        return self._topic_numbers[topic]

    # -- changed rows -------------------------------------------------------------------------------------------

    def _compare_changed_tries(self) -> None:
        read = 0
        for ordinal in list(islice(self._changed, _TURN_TRIES)):
            if read >= _TURN_ROWS:
                break
            trie = self._cache.tries[ordinal]
            announced = self._rows_of(trie)
            if announced.changed.any():
                read += min(len(announced.changed), _rows_per_turn(announced))
                self._compare_changed_rows(trie, announced)
            del self._changed[ordinal]
            if announced.changed.any():
                self._changed[ordinal] = None  # behind the other tries

    def _compare_changed_rows(self, trie: Trie, announced: AnnouncedRows) -> None:
        """Compares the first changed rows with what was announced: queues removals, and flags the rows to store."""
        start = int(announced.changed.argmax())
        rows = start + np.flatnonzero(announced.changed[start : start + _rows_per_turn(announced)])
        now, before = tiers_with_block(trie, rows), announced.tiers[rows]
        same_block = announced.generation[rows] == trie.generation[rows]
        still = np.where(same_block, before & now, np.uint8(0))
        self._removals.add(announced, rows, before & ~still, self._topics)
        announced.tiers[rows] = still
        to_store = ((now & ~still) != 0) & self._announced_namespaces(trie, rows)
        announced.to_store[rows] = to_store
        if to_store.any():
            self._storing[trie.ordinal] = None
        announced.changed[rows] = False

    def _remove_rows(self, announced: AnnouncedRows) -> bool:
        """Queues the removal of the first blocks of a trie's former geometry; returns True if there are more."""
        rows = np.flatnonzero(announced.tiers)[: _rows_per_turn(announced)]
        self._removals.add(announced, rows, announced.tiers[rows], self._topics)
        announced.tiers[rows] = 0
        return bool(announced.tiers.any())

    # -- stored blocks ------------------------------------------------------------------------------------------

    def _publish_stored(self) -> None:
        """Publishes blocks to store of the first trie that has some."""
        for ordinal in list(self._storing):
            trie = self._cache.tries[ordinal]
            announced = self._rows_of(trie)
            if found := bool(announced.to_store.any()):
                self._publish_stored_of(trie, announced)
            if not announced.to_store.any():
                del self._storing[ordinal]
            if found:
                return

    def _publish_stored_of(self, trie: Trie, announced: AnnouncedRows) -> None:
        most = min(_TURN_TOKENS // trie.block_tokens, _TURN_BLOCKS // announced.pieces)
        rows = choose_rows_to_store(trie, announced.to_store, max(most, 1))
        announced.to_store[rows] = False
        ordinals = set(trie.namespace[rows].tolist())
        namespaces = {each: found for each in ordinals if self._is_announced(found := self._cache.namespaces.at(each))}
        rows = rows[[ordinal in namespaces for ordinal in trie.namespace[rows].tolist()]]
        rows = rows[(tiers_with_block(trie, rows) & ~announced.tiers[rows]) != 0]
        if not len(rows):
            return
        stored = self._count_stored(trie, announced, rows)
        topics = {ordinal: self._topic_of(namespace) for ordinal, namespace in namespaces.items()}
        announced.topic[rows] = [self._clear_topic(topics[ordinal]) for ordinal in trie.namespace[rows].tolist()]
        by_topic: dict[bytes, list[BlockStored]] = {}
        for start, end in stored.runs():
            ordinal, parent = int(trie.namespace[rows[start]]), int(trie.parent[rows[start]])
            above = None if parent < 0 else self._hashes.whole(trie, np.array([parent]))[0]
            salt = salt_keys(namespaces[ordinal]) if above is None else None
            by_topic.setdefault(topics[ordinal], []).extend(
                stored.event(start, end, tier, medium, above, salt)
                for tier, medium in self._media.items()
                if stored.tiers[start] & (1 << tier)
            )
        for topic, batch in by_topic.items():
            self._publish(topic, batch)

    def _count_stored(self, trie: Trie, announced: AnnouncedRows, rows: Rows) -> StoredBlocks:
        """Records blocks as announced in all tiers that have them, and counts their engine's blocks there."""
        tiers = tiers_with_block(trie, rows) & ~announced.tiers[rows]
        self._fill_hashes(trie, announced, rows)
        inner = announced.inner[rows].astype(np.int64)
        known = np.zeros((len(rows), len(MEDIA)), np.int64)
        for tier in self._media:
            here = np.flatnonzero(tiers & np.uint8(1 << tier))
            known[here, tier] = self._engine_blocks.add(inner[here], tier)
        announced.tiers[rows] |= tiers
        hashes = np.hstack([self._engine_blocks.hashes(inner), announced.hashes[rows, None]])
        return StoredBlocks(trie, rows, tiers, known, hashes)

    def _fill_hashes(self, trie: Trie, announced: AnnouncedRows, rows: Rows) -> None:
        """Computes the hashes of the blocks that are announced in no tier now."""
        rows = rows[announced.tiers[rows] == 0]
        announced.hashes[rows] = self._hashes.whole(trie, rows)
        announced.generation[rows] = trie.generation[rows]
        if announced.pieces > 1:
            inner = self._hashes.inner(trie, rows, announced.hashes[rows], announced.pieces)
            announced.inner[rows] = self._engine_blocks.enter(inner)


def _rows_per_turn(announced: AnnouncedRows) -> int:
    """Returns how many rows of one trie a turn reads."""
    return _TURN_ROWS if announced.pieces == 1 else max(_TURN_COUNTED // announced.pieces, 1)
