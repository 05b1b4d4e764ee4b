"""What routers are told of the cache: the difference between what was announced and what is so.

The cache says which rows of its tries changed; what became of them is looked up when it is announced. So a block that
came and went in between costs nothing, what waits to be announced is bounded by the size of the tries, and nothing is
lost in a queue. All removals go first, since a removed block may be back in another row; then what was stored, parents
before children. A turn on the event loop does a bounded part of that.

Events are in the engine's blocks (`events.block_tokens`), of which a block of the cache has several:

    tokens                        |  16  |  16  |  16  |  16  |
    hash (n: the namespace's id)  |  of n, the hash of the block before, |  of n and the block's key
                                  |  and the tokens up to here           |

So the same tokens behind the same block have the same hashes, as an engine's have, whichever block of the cache they
are in (`EngineBlocks`). A block of a size that cannot be divided so is told of as it is.

What an event says of a model with several KV groups: see `_tiers_of`.

Who has missed what was said before needs everything announced anew, after AllBlocksCleared (`announce_all`). It is
done at most every `again_s`, and in at most a tenth of the time.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from prefixd.cache import Namespace, TieredCache, Trie
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.key_index import KEY_BYTES
from prefixd.cache.index.trie import LOCAL_TIERS, Rows
from prefixd.server.kv_events.engine_blocks import EngineBlocks
from prefixd.server.kv_events.event_messages import AllBlocksCleared, BlockRemoved, BlockStored, Event

log = logging.getLogger(__name__)

MEDIA = {"gpu": "GPU", "cpu": "CPU", "disk": "STORAGE"}
"""vLLM's names, by the tier's."""

LOCALITY = "LOCAL"

_GATHER_S = 0.004  # what changes within it goes into one batch; the pause between turns
_TURN_TRIES = 256  # looked at in a turn,
_TURN_ROWS = 32_768  # and rows, of all of them together but for the last;
_TURN_COUNTED = 4096  # where they have several engine's blocks, so many of these
_TURN_HASHES = 4096  # removed in a turn,
_TURN_FORGOTTEN = 1024  # and forgotten here
_TURN_BLOCKS = 512  # stored in a turn, in the engine's blocks,
_TURN_TOKENS = 16_384  # and their tokens
_WINDOW = 8 * _TURN_BLOCKS  # rows among which those are sought
_TURN_NAMESPACES = 512  # whose topics begin in a turn
_SPARE_TOPICS = 256
_LOGGED_SIZES = 64
_INNER = b"inner"  # no hash of an engine's block is one of a whole block
_ANEW_SHARE = 10  # of the time, at most one part in so many goes into announcing everything anew

Bits = npt.NDArray[np.uint8]
Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]


class _Announced:
    """What was said of the rows of one trie, whose blocks have so many engine's blocks each."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces
        self._memory = ColumnMemory()
        self.media: Bits = np.zeros(0, np.uint8)  # where it was said to be, a bit a tier
        self.hashes: Hashes = np.zeros(0, np.uint64)
        # [rows, pieces - 1]: ids of the engine's blocks but the last, whose hash is the block's own.
        self.inner: npt.NDArray[np.int32] = np.zeros((0, pieces - 1), np.int32)
        self.generation: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # of the row's block then
        self.topic: npt.NDArray[np.int32] = np.zeros(0, np.int32)  # its number
        self.news: Flags = np.zeros(0, np.bool_)  # something changed; not looked at yet
        self.to_store: Flags = np.zeros(0, np.bool_)  # it is somewhere where it was not said to be

    def fit(self, rows: int) -> None:
        """Makes room for `rows` rows."""
        if rows > len(self.news):
            for name in ("media", "hashes", "inner", "generation", "topic", "news", "to_store"):
                setattr(self, name, self._memory.grown(name, getattr(self, name), rows))


class Announcer(ABC):
    """Announces the blocks of all tiers, to whom and by what name its subclass says.

    Args:
        cache: the cache, restored.
        block_tokens: of the blocks of which it tells; None: those of the cache, whatever their size.
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
        # What a shared store has is as far away for every host: it is no reason to send a request to this one.
        self._media = {tier.level: MEDIA[tier.name] for tier in cache.tiers if tier is not cache.tiers.remote}
        self._announced: dict[int, _Announced] = {}  # by the tries' ordinals, which are keys of the next two also
        self._changed: dict[int, None] = {}  # tries that have news, the oldest first
        self._storing: dict[int, None] = {}  # tries of which something may be to be stored
        self._left: list[_Announced] = []  # of tries that have another geometry now
        self._undivided: set[int] = set()  # block sizes about which that was logged
        self._engine_blocks = EngineBlocks(len(MEDIA))
        self._gone: deque[tuple[bytes, int, Hashes]] = deque()  # topic, tier, hashes: removals to be said
        self._unused: deque[Rows] = deque()  # ids of engine's blocks that are to be forgotten with them
        self._begun: dict[bytes, int] = {}  # topics that have had their AllBlocksCleared, and their numbers
        self._topics: list[bytes] = []  # by number
        self._anew = False  # everything is to be announced from the beginning,
        self._announcing = False  # and that has begun,
        self._begun_s = 0.0  # then;
        self._earliest_s = self._clock()  # it may begin again from then on
        self._beginning: Iterator[None] = iter(())  # clears one topic a step, before anything is stored on it
        self._wake = asyncio.Event()

    @abstractmethod
    def _publish(self, topic: bytes, events: Sequence[Event]) -> None:
        """Says something; never waits."""

    @abstractmethod
    def _topic_of(self, namespace: Namespace) -> bytes:
        """On which a namespace's blocks are announced."""

    @abstractmethod
    def _announces(self, namespace: Namespace) -> bool:
        """Whether its blocks are announced."""

    def _wanted(self, trie: Trie, rows: Rows | slice) -> Flags | bool:
        """Which rows may be of namespaces that are announced; all, where that is not known so fast."""
        return True

    def _tells_of(self, trie: Trie) -> bool:
        """Whether it may have blocks that are announced."""
        return True

    @property
    def _fixed_topics(self) -> tuple[bytes, ...]:
        """Those that begin whether there is a namespace or not."""
        return ()

    def announce_all(self) -> None:
        """Has everything announced from the beginning: after the announcement that is under way, if there is one, and
        not too soon after the last one."""
        self._anew = True
        self._wake.set()

    def _note(self, trie: Trie, rows: int | Rows) -> None:
        if self._tells_of(trie):
            self._of(trie).news[rows] = True
            self._changed[trie.ordinal] = None
            self._wake.set()

    def _of(self, trie: Trie) -> _Announced:
        announced, pieces = self._announced.get(trie.ordinal), self._pieces(trie)
        if announced is None or announced.pieces != pieces:
            if announced is not None:
                self._left.append(announced)
            announced = self._announced[trie.ordinal] = _Announced(pieces)
        announced.fit(len(trie.parent))
        return announced

    def _pieces(self, trie: Trie) -> int:
        """Of how many of the engine's blocks a block is told."""
        if self._engine_tokens is None:
            return 1
        pieces, rest = divmod(trie.block_tokens, self._engine_tokens)
        if rest and trie.block_tokens not in self._undivided and len(self._undivided) < _LOGGED_SIZES:
            self._undivided.add(trie.block_tokens)
            log.warning(
                "blocks of %d tokens cannot be told to routers in blocks of events.block_tokens = %d, and are told as "
                "they are: a router that counts in other blocks does not know them",
                trie.block_tokens,
                self._engine_tokens,
            )
        return 1 if rest else pieces

    # -- turns --------------------------------------------------------------------------------------------------

    async def _wait(self, most_s: float | None = None) -> None:
        """Waits until there is something to say, at most so many seconds, and for what else comes just then."""
        pause_s = max(0.0, self._earliest_s - self._clock()) if self._anew and not self._announcing else None
        limits = [limit for limit in (pause_s, most_s) if limit is not None]
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), min(limits, default=None))
        await asyncio.sleep(_GATHER_S)
        self._wake.clear()

    def _turn(self) -> bool:
        """Announces a bounded part of what is to be said; whether there is more that need not wait."""
        if self._anew and not self._announcing and self._clock() >= self._earliest_s:
            self._begin_anew()
        if sum(1 for _ in islice(self._beginning, _TURN_NAMESPACES)):
            return True
        looked = 0
        for ordinal in list(islice(self._changed, _TURN_TRIES)):
            if looked >= _TURN_ROWS:
                break
            trie = self._cache.tries[ordinal]
            announced = self._of(trie)
            if announced.news.any():
                looked += min(len(announced.news), _looked_at(announced))
                self._look(trie, announced)
            del self._changed[ordinal]
            if announced.news.any():
                self._changed[ordinal] = None  # behind the others
        self._left = [left for left in self._left if self._leave(left)]
        if self._left or self._changed:
            return True
        if self._gone or self._unused:
            self._publish_removals()
        else:
            self._publish_some()
        more = bool(self._storing)
        if self._announcing and not more:
            self._announcing = False
            now = self._clock()
            self._earliest_s = max(self._begun_s + self._again_s, now + (_ANEW_SHARE - 1) * (now - self._begun_s))
        return more or bool(self._gone or self._unused)

    def _begin_anew(self) -> None:
        self._anew, self._announcing, self._begun_s = False, True, self._clock()
        self._gone.clear()
        self._unused.clear()
        self._engine_blocks = EngineBlocks(len(MEDIA))
        before, self._topics = self._topics, []
        self._begun.clear()
        for topic in self._fixed_topics:
            self._begin(topic)
        self._beginning = self._begin_topics(before)
        self._storing.clear()
        for trie in self._cache.tries:
            if self._tells_of(trie):
                announced = self._of(trie)
                announced.media[:] = 0
                rows = slice(0, trie.rows)
                announced.to_store[rows] = (_tiers_of(trie, rows) != 0) & self._wanted(trie, rows)
                if announced.to_store.any():
                    self._storing[trie.ordinal] = None
        self._left.clear()  # also those that were found just now

    def _begin_topics(self, before: list[bytes]) -> Iterator[None]:
        for namespace in self._cache.namespaces:
            if self._announces(namespace):
                self._begin(self._topic_of(namespace))
            yield
        for topic in before:
            if topic not in self._begun:  # of a namespace that was forgotten
                self._publish(topic, [AllBlocksCleared()])
            yield

    def _begin(self, topic: bytes) -> int:
        """The first that is said on a topic; returns its number."""
        if topic not in self._begun:
            self._begun[topic] = len(self._topics)
            self._topics.append(topic)
            self._publish(topic, [AllBlocksCleared()])
            if len(self._topics) > 2 * len(self._cache.namespaces) + _SPARE_TOPICS:
                self.announce_all()  # without those of namespaces that were forgotten
        return self._begun[topic]

    # -- removals -----------------------------------------------------------------------------------------------

    def _look(self, trie: Trie, announced: _Announced) -> None:
        """Turns news into removals and into what is to be stored."""
        start = int(announced.news.argmax())
        rows = start + np.flatnonzero(announced.news[start : start + _looked_at(announced)])
        is_so, said = _tiers_of(trie, rows), announced.media[rows]
        same = announced.generation[rows] == trie.generation[rows]
        still = np.where(same, said & is_so, np.uint8(0))
        self._queue_removals(announced, rows, said & ~still)
        announced.media[rows] = still
        wanted = ((is_so & ~still) != 0) & self._wanted(trie, rows)
        announced.to_store[rows] = wanted
        if wanted.any():
            self._storing[trie.ordinal] = None
        announced.news[rows] = False

    def _leave(self, announced: _Announced) -> bool:
        """Turns what was said of a trie's former blocks into removals; whether there is more of it."""
        rows = np.flatnonzero(announced.media)[: _looked_at(announced)]
        self._queue_removals(announced, rows, announced.media[rows])
        announced.media[rows] = 0
        return bool(announced.media.any())

    def _queue_removals(self, announced: _Announced, rows: Rows, gone: Bits) -> None:
        """Queues the removals of rows from the tiers `gone`, a bit each."""
        unused = []
        for tier in self._media:
            of_tier = rows[(gone & np.uint8(1 << tier)) != 0]
            topics = announced.topic[of_tier]
            for number in np.unique(topics).tolist():
                of_topic = of_tier[topics == number]
                inner = self._engine_blocks.remove(announced.inner[of_topic].astype(np.int64), tier)
                hashes = np.concatenate([announced.hashes[of_topic], self._engine_blocks.hashes(inner)])
                self._gone.append((self._topics[number], tier, hashes))
                unused.append(inner)
        if unused:
            ids = self._engine_blocks.unused(np.unique(np.concatenate(unused)))
            self._unused += np.split(ids, range(_TURN_FORGOTTEN, len(ids), _TURN_FORGOTTEN)) if len(ids) else []

    def _publish_removals(self) -> None:
        if self._unused:
            self._engine_blocks.forget(self._unused.popleft())
        left = _TURN_HASHES
        by_topic: dict[bytes, list[BlockRemoved]] = {}
        while left and self._gone:
            topic, tier, hashes = self._gone.popleft()
            now, later = hashes[:left], hashes[left:]
            left -= len(now)
            if len(later):
                self._gone.appendleft((topic, tier, later))
            event = BlockRemoved(now.tolist(), self._media[tier], locality=LOCALITY)
            by_topic.setdefault(topic, []).append(event)
        for topic, events in by_topic.items():
            self._publish(topic, events)

    # -- what was stored ----------------------------------------------------------------------------------------

    def _publish_some(self) -> None:
        """Publishes what is to be stored of the first trie that has such blocks."""
        for ordinal in list(self._storing):
            trie = self._cache.tries[ordinal]
            announced = self._of(trie)
            if some := bool(announced.to_store.any()):
                self._publish_stored(trie, announced)
            if not announced.to_store.any():
                del self._storing[ordinal]
            if some:
                return

    def _publish_stored(self, trie: Trie, announced: _Announced) -> None:
        most = min(_TURN_TOKENS // trie.block_tokens, _TURN_BLOCKS // announced.pieces)
        rows = _some(trie, announced.to_store, max(most, 1))
        announced.to_store[rows] = False
        told = {each: self._announces(self._cache.namespaces.at(each)) for each in set(trie.namespace[rows].tolist())}
        rows = rows[[told[ordinal] for ordinal in trie.namespace[rows].tolist()]]
        if not len(rows):
            return
        fresh = _tiers_of(trie, rows) & ~announced.media[rows]
        rows, fresh = rows[fresh != 0], fresh[fresh != 0]
        if not len(rows):
            return
        self._name(trie, announced, rows)
        inner = announced.inner[rows].astype(np.int64)
        known = np.zeros((len(rows), len(MEDIA)), np.int64)  # of its engine's blocks, in each tier
        for tier in self._media:
            here = np.flatnonzero(fresh & np.uint8(1 << tier))
            known[here, tier] = self._engine_blocks.add(inner[here], tier)
        announced.media[rows] |= fresh
        ordinals = trie.namespace[rows].tolist()
        namespaces = {ordinal: self._cache.namespaces.at(ordinal) for ordinal in set(ordinals)}
        topics = {ordinal: self._topic_of(namespace) for ordinal, namespace in namespaces.items()}
        numbers = {ordinal: self._begin(topic) for ordinal, topic in topics.items()}
        announced.topic[rows] = [numbers[ordinal] for ordinal in ordinals]
        hashes = np.hstack([self._engine_blocks.hashes(inner), announced.hashes[rows, None]]).ravel().tolist()
        tokens = trie.tokens[rows].ravel().tolist()
        pieces, width = announced.pieces, trie.block_tokens // announced.pieces
        parents = trie.parent[rows].astype(np.int64)
        ends = (parents[1:] != rows[:-1]) | (fresh[1:] != fresh[:-1]) | known[1:].any(axis=1)
        by_topic: dict[bytes, list[BlockStored]] = {}
        for start, end in pairwise([0, *(1 + np.flatnonzero(ends)).tolist(), len(rows)]):
            above = None if parents[start] < 0 else self._hashes(trie, parents[start : start + 1])[0]
            salted = _salted(namespaces[ordinals[start]]) if above is None else None
            for tier, medium in self._media.items():
                if not fresh[start] & (1 << tier):
                    continue
                skipped = int(known[start, tier])
                first, last = pieces * start + skipped, pieces * end
                event = BlockStored(
                    block_hashes=hashes[first:last],
                    parent_block_hash=hashes[first - 1] if skipped else above,
                    token_ids=tokens[width * first : width * last],
                    block_size=width,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    extra_keys=[None if skipped else salted, *[None] * (last - first - 1)],
                    locality=LOCALITY,
                )
                by_topic.setdefault(topics[ordinals[start]], []).append(event)
        for topic, batch in by_topic.items():
            self._publish(topic, batch)

    def _name(self, trie: Trie, announced: _Announced, rows: Rows) -> None:
        """Finds the hashes of blocks of which nothing was said."""
        rows = rows[announced.media[rows] == 0]
        announced.hashes[rows] = self._hashes(trie, rows)
        announced.generation[rows] = trie.generation[rows]
        if announced.pieces > 1:
            announced.inner[rows] = self._engine_blocks.enter(self._inner_hashes(trie, announced, rows))

    def _inner_hashes(self, trie: Trie, announced: _Announced, rows: Rows) -> Hashes:
        """[len(rows), pieces - 1]: the hashes of the engine's blocks but the last, of rows that have their own."""
        above = dict(zip(rows.tolist(), announced.hashes[rows].tolist(), strict=True))
        parents = trie.parent[rows].tolist()
        others = sorted({parent for parent in parents if parent >= 0} - above.keys())
        above.update(zip(others, self._hashes(trie, np.array(others, np.int64)), strict=True))
        tokens, nbytes = trie.tokens[rows].astype("<u4", copy=False).tobytes(), 4 * trie.block_tokens
        digests = bytearray()
        for at, (ordinal, parent) in enumerate(zip(trie.namespace[rows].tolist(), parents, strict=True)):
            before = above[parent].to_bytes(8, "big") if parent >= 0 else b""
            beginning = hashlib.blake2b(self._cache.namespaces.at(ordinal).id + before, digest_size=8, person=_INNER)
            block = memoryview(tokens)[nbytes * at : nbytes * (at + 1)]
            for place in range(0, nbytes - nbytes // announced.pieces, nbytes // announced.pieces):
                beginning.update(block[place : place + nbytes // announced.pieces])
                digests += beginning.digest()
        return np.frombuffer(digests, ">u8").astype(np.uint64).reshape(len(rows), announced.pieces - 1)

    def _hashes(self, trie: Trie, rows: Rows) -> list[int]:
        ids = {ordinal: self._cache.namespaces.at(ordinal).id for ordinal in np.unique(trie.namespace[rows]).tolist()}
        keys, width = trie.keys(rows).tobytes(), KEY_BYTES
        return [
            block_hash(ids[ordinal], keys[at * width : (at + 1) * width])
            for at, ordinal in enumerate(trie.namespace[rows].tolist())
        ]


def _looked_at(announced: _Announced) -> int:
    """Rows of one turn."""
    return _TURN_ROWS if announced.pieces == 1 else max(_TURN_COUNTED // announced.pieces, 1)


def block_hash(namespace_id: bytes, key: bytes) -> int:
    """What routers know a block by, 64 bits; 1 us.

    Clients can choose keys. Nobody can choose one that stands for a block of another namespace here.
    """
    return int.from_bytes(hashlib.blake2b(namespace_id + key, digest_size=8).digest(), "big")


def _salted(namespace: Namespace) -> tuple[str | bytes] | None:
    """The extra keys of a first block: the salt as vLLM has it in a request, or as bytes where it is no text."""
    salt = namespace.spec.salt
    if not salt:
        return None
    try:
        return (salt.decode(),)
    except UnicodeDecodeError:
        return (salt,)


def _tiers_of(trie: Trie, rows: Rows | slice) -> Bits:
    """The tiers, a bit each, that have of each block what every prefix through it needs; none where there is no block.

    That is all of it, but for KV groups of which a prefix needs its end only, windows and states: they come and go
    while the block serves on. Of a model that has no other groups, a block is where any of it is; what it continues may
    be nowhere then.
    """
    lasting = np.uint8(trie.all_groups & ~trie.partial_groups)
    there = trie.there[rows]
    has = (there & lasting) == lasting if lasting else there != 0
    tiers: Bits = np.packbits(has, axis=1, bitorder="little").ravel() & np.uint8(trie.offered & LOCAL_TIERS)
    return tiers


def _some(trie: Trie, wanted: Flags, most: int) -> Rows:
    """Up to `most` of the `wanted` rows, parents before children and one behind the other as far as may be."""
    start = int(wanted.argmax())
    found = start + np.flatnonzero(wanted[start : start + _WINDOW])[:most]
    chosen: list[int] = []
    seen: set[int] = set()
    for row in found.tolist():
        path = []
        while row >= 0 and wanted[row] and row not in seen:
            seen.add(row)
            path.append(row)
            row = int(trie.parent[row])
        chosen += path[::-1]
        if len(chosen) >= most:
            break
    return np.array(chosen[:most], np.int64)
