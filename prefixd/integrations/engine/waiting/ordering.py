"""Keeps an engine's waiting requests in the order of a policy and measures their waits; imports no engine."""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Generic, Protocol, TypeVar

from prefixd.integrations.engine.waiting.seen_prefix import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import Header, Policy, QueuedRequest, RequestQueue


class WaitingRequest(Protocol):
    """The fields of an engine's request that are read here."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    priority: int


R = TypeVar("R", bound=WaitingRequest)


def held_blocks(holds: Callable[[int], bool], count: int, guess: int = 0) -> int:
    """How many of `count` blocks are held from the first on, in O(log count) calls of `holds`.

    Blocks are evicted from the end of a prefix, so a held block implies that those before it are held too. Where that
    is wrong the result is a number n such that block n - 1 is held and block n is not.

    Args:
        holds: whether the block with this number, from 0, is held.
        count: how many blocks there are.
        guess: the last result, at most `count`; if it still holds, two calls are enough, or one for 0.
    """
    low, high = 0, count
    if guess and not holds(guess - 1):
        high = guess - 1
    elif guess == count or not holds(guess):
        return guess
    else:
        low = guess + 1
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(slots=True, eq=False)
class _Known(Generic[R]):
    """The last known cached tokens of a request that may move."""

    request: R
    queued: QueuedRequest
    local_tokens: int = 0
    seen: SeenPrefix | None = None


class PrefixOrder(Generic[R]):
    """An engine's waiting requests, in the order of a policy.

    ```
    taken from here  ->  | preempted, latest first | others that may not move | those that may, in the policy's order |
    ```

    Requests that may not move, because the engine has begun them, stay in front, in the engine's own order; with
    priorities each class has a front of its own. The others are kept in a `prefixd_scheduler.RequestQueue`: a change
    costs O(log n) and the first is found without looking at the others.

    The cached prefix of a prompt is read when its request comes, and again by `refresh` for a bounded number of
    requests: with n waiting, every change is noticed within n / `look_ahead` refreshes.

    Requests that share a prefix which is not computed yet need no grouping here: the engine enters a block into its
    cache as it schedules it, and finds it for the next request of the same step.

    Args:
        policy: decides the order.
        look_ahead: how many requests a refresh reads of each kind: the next ones in order, those without an answer from
            prefixd, and the others in turn.
        may_move: whether the engine has not begun the request.
        local_tokens: (request, last answer) -> tokens of its prompt that the engine's own cache holds.
        seen: request -> the prefix of its prompt that prefixd holds; None before the first answer.
        prefix_key: (request, cached tokens > 0) -> a key that requests with the same cached prefix share; None where
            there are too few tokens for a key.
        ready_s: (request, tokens that the engine holds, prefix that prefixd holds) -> estimated s to its first token.
        arrival_s: request -> when it arrived, the same at all times.
        deadline_s: request -> when its first token is due, on the clock of `arrival_s`.
        by_priority: whether requests with a smaller priority number go before all others.
    """

    def __init__(
        self,
        policy: Policy,
        look_ahead: int,
        *,
        may_move: Callable[[R], bool],
        local_tokens: Callable[[R, int], int],
        seen: Callable[[R], SeenPrefix | None],
        prefix_key: Callable[[R, int], Hashable | None],
        ready_s: Callable[[R, int, SeenPrefix], float] = lambda request, local_tokens, seen: math.inf,
        arrival_s: Callable[[R], float] = lambda request: request.arrival_time,
        deadline_s: Callable[[R], float] = lambda request: math.inf,
        by_priority: bool = False,
    ) -> None:
        self.policy = policy
        self.look_ahead = look_ahead
        self._may_move = may_move
        self._local_tokens = local_tokens
        self._seen = seen
        self._prefix_key = prefix_key
        self._ready_s = ready_s
        self._arrival_s = arrival_s
        self._deadline_s = deadline_s
        self._by_priority = by_priority
        self._now_s = 0.0
        self._queue = RequestQueue(policy, sys.maxsize)
        self._header = Header()  # in tokens
        self._known: dict[int, _Known[R]] = {}  # by the id in the queue
        self._ids: dict[str, int] = {}  # in the queue
        self._unanswered: OrderedDict[int, None] = OrderedDict()  # the least recently refreshed first
        self._answered: OrderedDict[int, None] = OrderedDict()
        self._taken: dict[str, _Known[R]] = {}  # since the last refresh; the engine may return them
        self._begun_now: dict[str, R] = {}
        self._front: list[tuple[int, int]] = []  # (priority, place), ascending: as many as the engine runs at most
        self._begun: dict[tuple[int, int], R] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._ids_given = itertools.count()
        self._first_place = self._last_place = 0

    # -- the queue ----------------------------------------------------------------------------------------------

    def add(self, request: R) -> None:
        """Adds a request. One that may not move goes to the end of the front."""
        if self._may_move(request):
            self._enter(request)
        else:
            self._last_place += 1
            self._put_in_front(request, self._last_place)

    def put_back(self, request: R) -> None:
        """Adds a taken request again: before all others if the engine has begun it, else at its former position."""
        self._begun_now.pop(request.request_id, None)
        if self._may_move(request):
            self._enter(request)
        else:
            self._taken.pop(request.request_id, None)
            self._first_place -= 1
            self._put_in_front(request, self._first_place)

    def first(self) -> R:
        """The next request. Raises IndexError if none waits."""
        known = self._first_known()
        if self._front and (known is None or self._front[0][0] <= known.queued.priority):
            return self._begun[self._front[0]]
        if known is None:
            raise IndexError("no request waits")
        return known.request

    def take(self) -> R:
        """Removes and returns the next request. Raises IndexError if none waits."""
        request = self.first()
        known = self._leave(request)
        if known is not None:
            self._taken[request.request_id] = known
        self._begun_now[request.request_id] = request
        return request

    def remove(self, request: R) -> bool:
        """Removes a request that ended; returns whether it waited."""
        if request.request_id not in self:
            return False
        self._leave(request)
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids or request_id in self._places

    def __len__(self) -> int:
        return len(self._queue) + len(self._begun)

    def __iter__(self) -> Iterator[R]:
        """All requests in order. Nothing may change during the iteration."""
        begun = ((place[0], self._begun[place]) for place in self._front)
        moving = ((known.queued.priority, known.request) for known in self._in_order(len(self._queue)))
        return (request for _, request in heapq.merge(begun, moving, key=itemgetter(0)))  # equal: the front first

    @property
    def begun(self) -> list[R]:
        """Requests that were taken since the last refresh and not put back, in the order of taking."""
        return list(self._begun_now.values())

    # -- a step of the engine -----------------------------------------------------------------------------------

    def refresh(self, now_s: float, places: int) -> None:
        """Reads the cached prefixes of some requests again, at the beginning of a step of the engine.

        Args:
            now_s: the present time on the clock of `arrival_s`; it decides the order until the next refresh.
            places: how many requests the step can begin.
        """
        self._now_s = now_s
        self._taken.clear()
        self._begun_now.clear()
        for known in self._in_order(min(places, self.look_ahead)):
            self._refresh_request(known)
        for line in (self._unanswered, self._answered):
            for number in list(itertools.islice(line, self.look_ahead)):
                self._refresh_request(self._known[number])

    def next_to_load(self, limit: int) -> list[tuple[R, int]]:
        """Of the next `look_ahead` requests the first `limit` with a longer prefix in prefixd than in the engine, each
        with the tokens that the engine holds."""
        near = (
            (known.request, known.local_tokens)
            for known in self._in_order(self.look_ahead)
            if (known.seen or NOTHING_SEEN).tokens > known.local_tokens
        )
        return list(itertools.islice(near, limit))

    # -- inside -------------------------------------------------------------------------------------------------

    def _first_known(self) -> _Known[R] | None:
        window = self._queue.window(1, self._now_s)
        return self._known[window[0].id] if window else None

    def _in_order(self, count: int) -> list[_Known[R]]:
        return [self._known[queued.id] for queued in self._queue.window(count, self._now_s)]

    def _put_in_front(self, request: R, place: int) -> None:
        key = (request.priority if self._by_priority else 0, place)
        insort(self._front, key)
        self._begun[key] = request
        self._places[request.request_id] = key

    def _enter(self, request: R) -> None:
        known = self._taken.pop(request.request_id, None)
        is_new = known is None
        if known is None:
            priority = request.priority if self._by_priority else 0
            number = next(self._ids_given)
            queued = QueuedRequest(number, self._arrival_s(request), request.num_prompt_tokens, priority=priority)
            queued.deadline_s = self._deadline_s(request)
            known = _Known(request, queued)
        number = known.queued.id
        self._ids[request.request_id] = number
        self._known[number] = known
        self._queue.push(known.queued)
        self._refresh_request(known)
        if is_new:
            self._header.add(partial(self._key, request), known.queued.cached_tokens)

    def _leave(self, request: R) -> _Known[R] | None:
        """Removes a waiting request; returns its `_Known` if it may move."""
        key = self._places.pop(request.request_id, None)
        if key is not None:
            del self._front[bisect_left(self._front, key)]
            del self._begun[key]
            return None
        number = self._ids.pop(request.request_id)
        self._queue.remove(number)
        self._unanswered.pop(number, None)
        self._answered.pop(number, None)
        return self._known.pop(number)

    def _key(self, request: R, tokens: int) -> Hashable:
        """A key that requests with equal first `tokens` tokens share; tokens of a partial block do not count."""
        key = self._prefix_key(request, tokens)
        return ("alone", request.request_id) if key is None else key

    def _refresh_request(self, known: _Known[R]) -> None:
        request, queued = known.request, known.queued
        known.local_tokens = self._local_tokens(request, known.local_tokens)
        known.seen = self._seen(request)
        line, other = self._answered, self._unanswered
        if known.seen is None:
            line, other = other, line
        other.pop(queued.id, None)
        line[queued.id] = None
        line.move_to_end(queued.id)
        seen = known.seen or NOTHING_SEEN
        cached = min(max(known.local_tokens, seen.tokens), request.num_prompt_tokens)
        header = self._header.within(partial(self._key, request), cached)
        self._queue.update(
            queued.id,
            seen.weight(known.local_tokens, request.num_prompt_tokens, header),
            cached,
            self._prefix_key(request, cached) if cached else None,
            ready_s=self._ready_s(request, known.local_tokens, seen) if self.policy.needs_estimate else math.inf,
        )


class Waits:
    """How long requests waited until the engine began them, and the figures of Relaxed-FPF's bound.

    Attributes:
        longest_s: the longest such wait.
        most: the most requests that waited at a time.
        slowest_s: the longest time that passed, while requests waited, without one being begun.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.most = 0
        self.slowest_s = 0.0
        self._since_s: float | None = None

    @property
    def bound_s(self) -> float:
        """The longest wait that Relaxed-FPF allows with these figures: 4 * `most` * `slowest_s`."""
        return 4 * self.most * self.slowest_s

    def waiting(self, count: int, now_s: float) -> None:
        """Notes that `count` requests wait at the beginning of a step."""
        self.most = max(self.most, count)
        if not count:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def begun(self, arrivals_s: Iterable[float], now_s: float, more: bool) -> None:
        """Notes the requests that a step at `now_s` began.

        Args:
            arrivals_s: when they had arrived; resumed requests, which waited before, are left out.
            more: whether other requests still wait.
        """
        if self._since_s is not None:
            self.slowest_s = max(self.slowest_s, now_s - self._since_s)
        self._since_s = now_s if more else None
        self.longest_s = max([self.longest_s, *(now_s - arrival_s for arrival_s in arrivals_s)])
