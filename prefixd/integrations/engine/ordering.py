"""The order of an engine's waiting queue, apart from the engine: what moves, what stays, and how long they wait."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from prefixd.integrations.engine.seen import NOTHING_SEEN, SeenPrefix
from prefixd_scheduler import Policy, QueuedRequest


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


@dataclass(slots=True)
class _Known:
    """What was last known of a request in the window."""

    queued: QueuedRequest
    local_tokens: int = 0
    seen: SeenPrefix = NOTHING_SEEN


class PrefixOrder(Generic[R]):
    """Puts the oldest waiting requests in the order of a policy; the others stay as they are behind them.

    Requests that may not move keep their places exactly. The others in the window are ranked and take the places that
    are left, in order. Nothing is lost or doubled: the result is a permutation of the queue.

    Args:
        policy: decides the order.
        look_ahead: how many requests that may move are put in order, from the front of the queue on. As the engine
            appends what arrives and takes from the front, the front of the queue is its oldest part, in any order.
        may_move: whether the engine has not begun the request.
        local_tokens: (request, last answer) -> tokens of its prompt that the engine's own cache holds.
        seen: request -> what prefixd holds of its prompt; None while it has not answered.
        prefix_key: (request, cached tokens > 0) -> something equal for requests with the same cached prefix.
        by_priority: whether the requests' priorities count: classes then come in order, also beyond the window.
    """

    def __init__(
        self,
        policy: Policy,
        look_ahead: int,
        *,
        may_move: Callable[[R], bool],
        local_tokens: Callable[[R, int], int],
        seen: Callable[[R], SeenPrefix | None],
        prefix_key: Callable[[R, int], Hashable],
        by_priority: bool = False,
    ) -> None:
        self.policy = policy
        self.look_ahead = look_ahead
        self._may_move = may_move
        self._local_tokens = local_tokens
        self._seen = seen
        self._prefix_key = prefix_key
        self._by_priority = by_priority
        self._known: dict[str, _Known] = {}
        self._window: list[R] = []
        self._ids = itertools.count()

    def arrange(self, queue: Iterable[R], now_s: float) -> list[R]:
        """The queue in its new order; `now_s` on the clock of `arrival_time`."""
        before = list(queue)
        if self._by_priority:
            before.sort(key=lambda request: request.priority)
        window = itertools.islice((i for i, request in enumerate(before) if self._may_move(request)), self.look_ahead)
        places = list(window)
        # Only the window is remembered: whoever leaves the queue, for whatever reason, is forgotten here.
        self._known = {before[place].request_id: self._look(before[place]) for place in places}
        ranks = self.policy.ranks([known.queued for known in self._known.values()], now_s)
        after = before.copy()
        for place, (_, came_from) in zip(places, sorted(zip(ranks, places, strict=True)), strict=True):
            after[place] = before[came_from]
        self._window = [after[place] for place in places]
        return after

    def to_load(self, limit: int) -> list[tuple[R, int]]:
        """Of the window, in its last order, the first `limit` of which prefixd holds more than the engine does, each
        with the tokens that the engine has."""
        known = ((request, self._known[request.request_id]) for request in self._window)
        near = ((request, k.local_tokens) for request, k in known if k.seen.tokens > k.local_tokens)
        return list(itertools.islice(near, limit))

    def _look(self, request: R) -> _Known:
        known = self._known.get(request.request_id)
        if known is None:
            priority = request.priority if self._by_priority else 0
            known = _Known(
                QueuedRequest(next(self._ids), request.arrival_time, request.num_prompt_tokens, priority=priority)
            )
        local_tokens = self._local_tokens(request, known.local_tokens)
        seen = self._seen(request) or NOTHING_SEEN
        if local_tokens != known.local_tokens or seen is not known.seen:
            known.local_tokens, known.seen = local_tokens, seen
            queued = known.queued
            queued.cached_tokens = min(max(local_tokens, seen.tokens), request.num_prompt_tokens)
            queued.distance = seen.distance(local_tokens)
            queued.prefix = self._prefix_key(request, queued.cached_tokens) if queued.cached_tokens else None
        return known


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
