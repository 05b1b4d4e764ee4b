"""The order of an engine's waiting queue, apart from the engine: what moves, what stays, and how long they wait."""

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
    """What is read of an engine's request."""

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    priority: int


R = TypeVar("R", bound=WaitingRequest)


def held_blocks(holds: Callable[[int], bool], count: int, guess: int = 0) -> int:
    """How many of `count` blocks are held from the first on, in O(log count) questions.

    As blocks are evicted from the end of a prefix, a held block is taken to mean that those before it are held too.
    Where that is wrong the answer is some number n such that block n - 1 is held and block n is not.

    Args:
        holds: whether the block with this number, from 0, is held.
        count: how many blocks there are.
        guess: the last answer, at most `count`; while it is still right two questions are enough, or one for 0.
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
    """What was last known of a request that may move."""

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

    What is cached of a prompt is looked at when its request comes, and again by `refresh`, for a bounded number of
    requests: so with n waiting, a change that no request near its turn sees is seen within n / `look_ahead` refreshes.

    Requests that share a prefix which nobody has computed need no grouping here: an engine that enters a block into its
    cache as it schedules it finds it for the next request of the same step.

    Args:
        policy: decides the order.
        look_ahead: how many requests a refresh looks at: of those next in order, of those that prefixd has not answered
            for, and of the others in turn, so many each.
        may_move: whether the engine has not begun the request.
        local_tokens: (request, last answer) -> tokens of its prompt that the engine's own cache holds.
        seen: request -> what prefixd holds of its prompt; None while it has not answered.
        prefix_key: (request, cached tokens > 0) -> something equal for requests with the same cached prefix; None where
            so few tokens have no key.
        ready_s: (request, tokens that the engine holds, what prefixd holds) -> estimated seconds to its first token.
        arrival_s: request -> when it arrived, the same at all times.
        deadline_s: request -> when its first token is due, on the clock of `arrival_s`.
        by_priority: whether the requests' priorities count: classes then come in order.
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
        self._unanswered: OrderedDict[int, None] = OrderedDict()  # who was looked at longest ago is first
        self._answered: OrderedDict[int, None] = OrderedDict()
        self._taken: dict[str, _Known[R]] = {}  # since the last refresh; the engine may put them back
        self._begun_now: dict[str, R] = {}
        self._front: list[tuple[int, int]] = []  # (priority, place), ascending: as many as the engine runs at most
        self._begun: dict[tuple[int, int], R] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._ids_given = itertools.count()
        self._first_place = self._last_place = 0

    # -- what comes and goes ------------------------------------------------------------------------------------

    def add(self, request: R) -> None:
        """A request has come. One that may not move goes to the end of the front."""
        if self._may_move(request):
            self._enter(request)
        else:
            self._last_place += 1
            self._put_in_front(request, self._last_place)

    def put_back(self, request: R) -> None:
        """A request that was taken comes back: before all others if the engine has begun it, else where it was."""
        self._begun_now.pop(request.request_id, None)
        if self._may_move(request):
            self._enter(request)
        else:
            self._taken.pop(request.request_id, None)
            self._first_place -= 1
            self._put_in_front(request, self._first_place)

    def first(self) -> R:
        """The next request. Raises IndexError when none waits."""
        known = self._first_known()
        if self._front and (known is None or self._front[0][0] <= known.queued.priority):
            return self._begun[self._front[0]]
        if known is None:
            raise IndexError("no request waits")
        return known.request

    def take(self) -> R:
        """Takes out the next request. Raises IndexError when none waits."""
        request = self.first()
        known = self._leave(request)
        if known is not None:
            self._taken[request.request_id] = known
        self._begun_now[request.request_id] = request
        return request

    def remove(self, request: R) -> bool:
        """Takes out a request that ended; whether it waited."""
        if request.request_id not in self:
            return False
        self._leave(request)
        return True

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids or request_id in self._places

    def __len__(self) -> int:
        return len(self._queue) + len(self._begun)

    def __iter__(self) -> Iterator[R]:
        """All of them, in order. Do not change anything meanwhile."""
        begun = ((place[0], self._begun[place]) for place in self._front)
        moving = ((known.queued.priority, known.request) for known in self._in_order(len(self._queue)))
        return (request for _, request in heapq.merge(begun, moving, key=itemgetter(0)))  # equal: the front first

    @property
    def begun(self) -> list[R]:
        """Those that were taken since the last refresh and did not come back, in the order in which they were taken."""
        return list(self._begun_now.values())

    # -- a step of the engine -----------------------------------------------------------------------------------

    def refresh(self, now_s: float, places: int) -> None:
        """Looks again at what is cached of some requests, at the beginning of a step that can take `places` of them.

        Args:
            now_s: the present time on the clock of `arrival_s`; the order is that of this moment until the next.
            places: how many may be taken.
        """
        self._now_s = now_s
        self._taken.clear()
        self._begun_now.clear()
        for known in self._in_order(min(places, self.look_ahead)):
            self._look(known)
        for line in (self._unanswered, self._answered):
            for number in list(itertools.islice(line, self.look_ahead)):
                self._look(self._known[number])

    def to_load(self, limit: int) -> list[tuple[R, int]]:
        """Of the next `look_ahead` in order, the first `limit` of which prefixd holds more than the engine does, each
        with the tokens that the engine has."""
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
        self._look(known)
        if is_new:
            self._header.add(partial(self._key, request), known.queued.cached_tokens)

    def _leave(self, request: R) -> _Known[R] | None:
        """Takes out a request that is there; what is known of one that may move."""
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
        """Equal for requests whose first `tokens` tokens are equal, but for those of a block that is cut."""
        key = self._prefix_key(request, tokens)
        return ("alone", request.request_id) if key is None else key

    def _look(self, known: _Known[R]) -> None:
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
    """How long requests waited until the engine began them, and what the promise of Relaxed-FPF rests on.

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
        """What Relaxed-FPF promises from these figures: 4 * `most` * `slowest_s`."""
        return 4 * self.most * self.slowest_s

    def waiting(self, count: int, now_s: float) -> None:
        """`count` requests wait at the beginning of a step."""
        self.most = max(self.most, count)
        if not count:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s

    def begun(self, arrivals_s: Iterable[float], now_s: float, more: bool) -> None:
        """In the step that began at `now_s`, requests were begun that had arrived at `arrivals_s`, or resumed ones
        (which have waited before and are not named); `more` says whether others still wait."""
        if self._since_s is not None:
            self.slowest_s = max(self.slowest_s, now_s - self._since_s)
        self._since_s = now_s if more else None
        self.longest_s = max([self.longest_s, *(now_s - arrival_s for arrival_s in arrivals_s)])
