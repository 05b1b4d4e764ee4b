"""Keeps the weights of waiting requests up to date while blocks come, move and go.

Ten thousand waiting requests of 32K tokens have 20 million blocks, so not every block is read whenever something
moves. Four *marks* show almost every change: the last blocks of the first, second, third and fourth quarter of a cached
prefix. A block is evicted from a tier after those that continue it there, it leaves the trie after them, and a prefix
that is brought up has its *tail*, the last mark, come last. Each refresh

- reads all marks, in one numpy call,
- looks for the block behind the tail, which appears when a request computes it, of the next 512 requests in turn,
- reads all blocks of the next requests in turn, about 16,384 rows, for changes that marks do not show (a damaged block
  in the middle of a prefix),
- looks up again the requests in which one of these steps found a change, about 16,384 rows of them.

**How stale a weight can be.** With n waiting requests that have w rows in all, a change is seen at the next refresh
if a mark shows it (the tail's, or of a quarter of the prefix), within n / 512 refreshes if a prefix grew, and within
w / 16384 + n / 64 refreshes in any case. When more requests change at once than one refresh looks up, the next
refreshes look them up, first come, first served.
Where the policy asks how long a request takes until it is ready, 16 requests in turn are estimated anew besides, fewer
where these have more than 16,384 rows: what loading and computing take is learned as it goes.

Where all prompts of a namespace begin with the same header, only the part behind it counts in their weights. The
headers of the 64 namespaces with the latest requests are remembered. When a header changes, the weights follow as all
requests are read in turn.

Weights only decide the order. A request is staged with exact rows: `verify` reads all of them at that moment.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.cache import NONE, TieredCache, Trie
from prefixd.cache.index.trie import Rows
from prefixd.serving.request.request import Request
from prefixd_scheduler import Distance, Header, RequestQueue, weight_class

_KEYS = 512
_REQUESTS = 64
_ROWS = 16_384
_LOOK_UP_ROWS = 256  # the fixed cost of a look-up, in rows
_ESTIMATES = 16
_HEADERS = 64
_MARKS = 4
_QUARTERS = np.arange(1, _MARKS + 1)
_GAINS = np.array([distance.weight - 1.0 for distance in Distance])  # a token's weight above that of one not cached


class PrefixTracker:
    """Watches the cached prefixes of waiting requests and keeps the queue informed.

    Args:
        cache: where the blocks are.
        queue: has the requests that are watched.
        caching: False finds nothing and watches nothing.
        rows_a_refresh: rows that a refresh reads in turn, and rows that it looks up.
        ready_s: estimates the seconds to load and compute a request's prompt; called only if the policy ranks by it.
    """

    def __init__(
        self,
        cache: TieredCache,
        queue: RequestQueue,
        *,
        caching: bool = True,
        rows_a_refresh: int = _ROWS,
        ready_s: Callable[[Request], float] | None = None,
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._caching = caching
        self._rows_a_refresh = rows_a_refresh
        self._ready_s = ready_s if queue.policy.needs_estimate else None
        self._slots: dict[int, int] = {}  # by request id, its place in the columns
        self._free: list[int] = []
        self._requests: list[Request | None] = []
        self._marks = np.zeros((0, _MARKS), np.int64)  # rows, the tail last; the root when nothing is cached
        self._generation = np.zeros((0, _MARKS), np.int32)  # of the marks, as seen
        self._nearest = np.zeros((0, _MARKS), np.int8)  # of the marks, as seen
        self._namespace = np.zeros(0, np.int64)  # of the request
        self._common = np.zeros(0, np.int64)  # the common namespace beside it, -1 where there is none
        self._key = np.zeros((0, 16), np.uint8)  # of the block behind the tail
        self._has_next = np.zeros(0, np.bool_)  # the prompt has such a block
        self._changed: dict[int, None] = {}  # ids of requests that have to be looked up, first come, first served
        self._epoch = -1
        self._headers: OrderedDict[int, Header] = OrderedDict()  # in blocks, by a namespace's root
        self._unread_slots = 0  # slots that have not been read since something changed
        self._next_key = 0
        self._next_slot = 0
        self._next_estimate = 0

    # -- one request --------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Begins to watch a request that waits or is about to be queued. Looks it up if that was never done, else reads
        the blocks that were found."""
        if not self._caching:
            return
        slot = self._free.pop() if self._free else self._new_slot()
        self._slots[request.id] = slot
        self._requests[slot] = request
        namespace = request.namespace
        self._namespace[slot] = namespace.ordinal
        self._common[slot] = -1 if namespace.common is None else namespace.common.ordinal
        if request.seen_epoch < 0 and not len(request.found):
            self._look_up(request)
            self._count_header(request)
        else:
            known = request.uncut(min(len(request.found), request.usable_blocks))
            request.found = request.found[:known]
            request.generations = request.generations[:known]
            self._read(request)

    def remove(self, request: Request) -> None:
        """Ends the watch; does nothing for a request that is not watched."""
        slot = self._slots.pop(request.id, None)
        if slot is not None:
            self._requests[slot] = None
            self._has_next[slot] = False
            self._marks[slot] = -1
            self._free.append(slot)

    def verify(self, request: Request) -> bool:
        """Makes `request.found` exact, as of now; returns whether it changed."""
        if request.id not in self._slots or request.seen_epoch == self._cache.mover.epoch:
            return False
        before = request.found
        self._read(request)
        return request.found is not before

    def stand_alone(self, request: Request) -> None:
        """Others that lack the same block stand behind a request no longer: they pass it."""
        if not request.stands_alone:
            request.stands_alone = True
            if request.id in self._slots:
                self._tell_queue(request)

    def has_grown(self, request: Request) -> bool:
        """Whether the block behind the request's cached prefix is cached now."""
        key = request.next_key if self._caching else None
        if key is None:
            return False
        trie, namespace = request.trie, request.namespace
        if namespace.common is None:
            row = trie.find(namespace.ordinal, key)
            tail = int(request.rows[-1]) if len(request.rows) else namespace.root
            if row is None or trie.parent[row] != tail:
                return False
            if not trie.has_rules and request.images is None and not trie.refused:
                return bool(trie.nearest[row] != NONE)
        else:  # the tail may be of the other namespace, and the block behind it be there in either
            rows = [trie.find(each, key) for each in (namespace.ordinal, namespace.common.ordinal)]
            if not any(row is not None and (trie.has_rules or trie.nearest[row] != NONE) for row in rows):
                return False
        # The next block alone may not be usable, but a later one: it lacks a state, say, or has no bytes, or it ends
        # inside an image, or is refused.
        return len(request.usable(request.path)) > len(request.rows)

    # -- all requests -------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Looks for changes, within the bounds of one refresh; see the top of this file."""
        if not self._slots:
            return
        if self._epoch != self._cache.mover.epoch:
            self._epoch = self._cache.mover.epoch
            self._unread_slots = len(self._requests)
        if self._unread_slots > 0:
            trie = self._trie()
            self._look_at_marks(trie)
            self._look_behind_tails(trie)
            self._read_in_turn(trie)
        self._look_up_changed()
        self._estimate_in_turn()

    def _estimate_in_turn(self) -> None:
        if self._ready_s is None:
            return
        begin, end = self._next_slice(self._next_estimate, _ESTIMATES)
        rows_left = self._rows_a_refresh
        for at in range(begin, end):
            request = self._requests[at]
            if request is not None:
                if rows_left < len(request.found) and rows_left < self._rows_a_refresh:
                    end = at
                    break
                rows_left -= len(request.found)
                self._tell_queue(request)
        self._next_estimate = end

    def _look_at_marks(self, trie: Trie) -> None:
        slots = np.flatnonzero(self._marks[:, -1] >= 0)
        rows = self._marks[slots]
        generation, nearest = trie.generation[rows], trie.nearest[rows]
        moved = ((generation != self._generation[slots]) | (nearest != self._nearest[slots])).any(axis=1)
        if moved.any():
            slots = slots[moved]
            self._generation[slots], self._nearest[slots] = generation[moved], nearest[moved]
            self._note_changes(slots)

    def _look_behind_tails(self, trie: Trie) -> None:
        begin, end = self._next_slice(self._next_key, _KEYS)
        self._next_key = end
        slots = begin + np.flatnonzero(self._has_next[begin:end])
        composed = self._common >= 0
        for namespaces in (self._namespace, self._common):
            asked = slots[namespaces[slots] >= 0]
            if not len(asked):
                continue
            rows = trie.find_all(namespaces[asked], self._key[asked])
            asked, rows = asked[rows >= 0], rows[rows >= 0]
            there = trie.has_rules | (trie.nearest[rows] != NONE)  # see `has_grown`
            self._note_changes(asked[((trie.parent[rows] == self._marks[asked, -1]) | composed[asked]) & there])

    def _read_in_turn(self, trie: Trie) -> None:
        begin, end = self._next_slice(self._next_slot, _REQUESTS)
        some: list[Request] = []
        rows_read = 0
        for at in range(begin, end):
            request = self._requests[at]
            if request is not None and len(request.found):
                if some and rows_read + len(request.found) > self._rows_a_refresh:
                    end = at
                    break
                rows_read += len(request.found)
                some.append(request)
        self._next_slot = end
        self._unread_slots -= end - begin
        if not some:
            return
        lengths = np.array([len(request.found) for request in some])
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        rows = np.concatenate([request.found for request in some])
        stale = trie.generation[rows] != np.concatenate([request.generations for request in some])
        if trie.has_rules:
            nearest = np.concatenate([trie.distances(request.found) for request in some])
        else:
            nearest = trie.nearest[rows]
        nearest = np.where(stale, NONE, nearest)
        far = np.maximum.reduceat(nearest, starts)
        changed = far != [request.farthest for request in some]
        headers = [self._header_blocks(request) for request in some]
        gains_of_rows = _GAINS[nearest]
        for start, header in zip(starts, headers, strict=True):
            if header:
                gains_of_rows[start : start + header] = 0.0
        gains = np.add.reduceat(gains_of_rows, starts)
        for at, request in enumerate(some):
            if changed[at] or _weight(request, gains[at], headers[at]) != request.queued.weight:
                request.seen_epoch = -1  # a header may change although no block moves
                self._changed[request.id] = None

    def _look_up_changed(self) -> None:
        budget = self._rows_a_refresh
        looked_at: list[int] = []
        for request_id in self._changed:
            if budget <= 0:
                break
            looked_at.append(request_id)
            slot = self._slots.get(request_id)
            request = None if slot is None else self._requests[slot]
            if request is not None and request.seen_epoch != self._cache.mover.epoch:
                self._read(request)
                budget -= len(request.found) + _LOOK_UP_ROWS
                if request.trie.has_rules:  # the whole path was looked at, in columns
                    budget -= request.usable_blocks // 16
        for request_id in looked_at:
            del self._changed[request_id]

    def _note_changes(self, slots: Rows) -> None:
        for slot in slots.tolist():
            request = self._requests[slot]
            if request is not None:
                self._changed[request.id] = None

    def _next_slice(self, begin: int, count: int) -> tuple[int, int]:
        if begin >= len(self._requests):
            begin = 0
        return begin, min(begin + count, len(self._requests))

    def _trie(self) -> Trie:
        """The worker has one geometry, so all its requests have one trie."""
        request = next(request for request in self._requests if request is not None)
        return request.trie

    # -- inside -------------------------------------------------------------------------------------------------

    def _read(self, request: Request) -> None:
        """Reads where the found blocks are. Looks the request up if one is gone or refused, or one more is cached."""
        nearest = request.trie.distances(request.found)
        gone = (nearest == NONE) | (request.trie.generation[request.found] != request.generations)
        refused = request.trie.unrefused(request.found) < len(request.found)
        if refused or gone.any() or self.has_grown(request):
            self._look_up(request)
        else:
            self._remember(request, nearest)

    def _look_up(self, request: Request) -> None:
        """Finds the longest cached prefix."""
        trie = request.trie
        request.found = request.usable(request.path)
        request.generations = trie.generation[request.found]
        self._remember(request, trie.distances(request.found))

    def _remember(self, request: Request, nearest: npt.NDArray[Any]) -> None:
        """Remembers a look at a request and tells the queue. `nearest`: the tier that each found block comes from."""
        found, trie = request.found, request.trie
        request.seen_epoch = self._cache.mover.epoch
        blocks = len(found)
        request.farthest = Distance(int(nearest.max()) if blocks else NONE)
        header = self._header_blocks(request)
        self._tell_queue(request, _weight(request, _GAINS[nearest[header:]].sum(), header))
        slot = self._slots[request.id]
        self._marks[slot] = request.namespace.root
        if blocks:
            places = (blocks * _QUARTERS - 1) // _MARKS
            self._marks[slot] = found[places]
            self._generation[slot] = request.generations[places]
            self._nearest[slot] = trie.nearest[found[places]]
        key = request.next_key
        self._has_next[slot] = key is not None
        if key is not None:
            self._key[slot] = np.frombuffer(key, np.uint8)

    def _tell_queue(self, request: Request, weight: float | None = None) -> None:
        """`weight`: of the prompt; unchanged by default."""
        queued, trie, blocks = request.queued, request.trie, len(request.found)
        weight = queued.weight if weight is None else weight
        prefix = (request.namespace.root, request.chain.key(blocks - 1)) if blocks else None
        cached_tokens = min(blocks * trie.block_tokens, queued.prompt_tokens)
        # With windows, states or images, one request may be able to go on from a block where another cannot. And a
        # read-only request leaves nothing in the cache for others. For one that others pass they would wait in vain.
        alone = trie.has_rules or request.images is not None or request.read_only or request.stands_alone
        key = None if alone else request.next_key
        lacks = None if key is None else (request.namespace.root, key)
        ready_s = math.inf if self._ready_s is None else self._ready_s(request)
        now = (weight, cached_tokens, prefix, lacks, ready_s)
        if now == (queued.weight, queued.cached_tokens, queued.prefix, queued.lacks, queued.ready_s):
            return
        if request.id in self._queue:
            self._queue.update(request.id, weight, cached_tokens, prefix, lacks=lacks, ready_s=ready_s)
        else:  # looked up before it is queued, so that it enters the order only once
            queued.set_cached(weight, cached_tokens, prefix, lacks=lacks, ready_s=ready_s)

    def _count_header(self, request: Request) -> None:
        """Counts a prompt that has come, or that is back in the queue with nothing cached."""
        root = request.namespace.root
        header = self._headers.pop(root, None) or Header()
        self._headers[root] = header
        if len(self._headers) > _HEADERS:
            self._headers.popitem(last=False)
        if header.add(_key_of(request.found), len(request.found)):
            self._unread_slots = len(self._requests)

    def _header_blocks(self, request: Request) -> int:
        """Blocks of the header that a request's prompt begins with."""
        header = self._headers.get(request.namespace.root)
        return 0 if header is None else header.within(_key_of(request.found), len(request.found))

    def _new_slot(self) -> int:
        slot = len(self._requests)
        if slot == len(self._marks):
            capacity = max(64, 2 * slot)
            for name in ("_marks", "_generation", "_nearest", "_namespace", "_common", "_key", "_has_next"):
                old = getattr(self, name)
                new = np.zeros((capacity, *old.shape[1:]), old.dtype)
                new[:slot] = old
                setattr(self, name, new)
            self._marks[slot:] = -1
        self._requests.append(None)
        return slot


def _key_of(found: Rows) -> Callable[[int], int]:
    """Keys for `Header`: a row identifies its block and all blocks before it."""
    return lambda blocks: int(found[blocks - 1])


def _weight(request: Request, gained: float, header: int) -> float:
    """The weight of a request's tokens behind `header` blocks, generated ones included. `gained`: the sum of the gains
    of its cached blocks there."""
    block_tokens = request.trie.block_tokens
    return weight_class(1.0 + float(gained) * block_tokens / (request.chain.tokens - header * block_tokens))
