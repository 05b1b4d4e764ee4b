"""The waiting requests, with a limit."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from itertools import islice

from prefixd_scheduler.distance import Distance
from prefixd_scheduler.errors import (
    DuplicateRequestError,
    IntegrityError,
    InvalidValueError,
    QueueFullError,
    UnknownRequestError,
)
from prefixd_scheduler.policies import Policy
from prefixd_scheduler.request import QueuedRequest, check_state
from prefixd_scheduler.sorted_keys import SortedKeys


class RequestQueue:
    """Requests that wait, handed over in the order of a policy.

    Not thread-safe: it belongs to one event loop. The requests are kept in the policy's order (`Policy.order`): a
    change costs O(log n), and the first requests are found without looking at the others.

    **Computed once.** Of those that lack the same block next (`QueuedRequest.lacks`) only one stands in the order, the
    first one by `Policy.first_of`: it computes what the others then find. They stand behind it, so that a
    thousand of them do not hide the next request, and whoever is earliest takes its place when it leaves.

    Args:
        policy: decides the order.
        limit: how many requests may be admitted at a time.
    """

    def __init__(self, policy: Policy, limit: int) -> None:
        if limit < 1:
            raise InvalidValueError(f"a queue limited to {limit} requests admits none; pass a limit of at least 1")
        self.policy = policy
        self.limit = limit
        self._order = policy.order()
        self._requests: dict[int, QueuedRequest] = {}
        self._lacking: dict[Hashable, SortedKeys[tuple[float, ...]]] = {}  # by what they lack, the earliest first
        self._place: dict[int, tuple[Hashable, tuple[float, ...]]] = {}  # of each of them
        self._readmitted: set[int] = set()

    def push(self, request: QueuedRequest) -> None:
        """Admit a new request.

        Raises:
            QueueFullError: `limit` requests wait already.
            DuplicateRequestError: one with this id waits already.
        """
        if len(self._requests) >= self.limit:
            raise QueueFullError(self.limit)
        self._add(request)

    def readmit(self, request: QueuedRequest) -> None:
        """Put back a request that was handed over and interrupted; the limit does not apply to it.

        It was admitted once. How many come back is bounded by how many run.

        Raises:
            DuplicateRequestError: one with this id waits already.
        """
        self._add(request)
        self._readmitted.add(request.id)

    def remove(self, request_id: int) -> QueuedRequest:
        """Take a request out, because it runs now or was cancelled.

        Raises:
            UnknownRequestError: no request with this id waits.
        """
        request = self._waiting(request_id)
        del self._requests[request_id]
        self._readmitted.discard(request_id)
        self._leave(request_id)
        return request

    def update(
        self,
        request_id: int,
        distance: Distance,
        cached_tokens: int,
        prefix: Hashable | None,
        *,
        lacks: Hashable | None = None,
        ready_s: float = math.inf,
    ) -> None:
        """Record how much of a waiting request's prefix is cached now, and where; see `QueuedRequest`.

        Raises:
            UnknownRequestError: no request with this id waits.
            InvalidValueError: `cached_tokens` is negative or more than the prompt has, or `ready_s` is negative.
        """
        request = self._waiting(request_id)
        check_state(request_id, cached_tokens, request.prompt_tokens, ready_s)
        request.distance, request.cached_tokens, request.prefix = distance, cached_tokens, prefix
        request.ready_s = ready_s
        if lacks != request.lacks:
            self._leave(request_id)
            request.lacks = lacks
            self._enter(request)
        elif self._is_first(request):
            self._order.put(request)

    def get(self, request_id: int) -> QueuedRequest | None:
        """The waiting request with this id, or None."""
        return self._requests.get(request_id)

    def window(self, n: int, now_s: float) -> list[QueuedRequest]:
        """The next `n` requests in the policy's order (all of them where fewer stand in it); none is taken out.

        Time O(n), however many wait. One core of a small machine takes 0.04 ms for n = 32.

        Args:
            n: how many to look at.
            now_s: the present time, on the clock of `QueuedRequest.arrival_s`.
        """
        return [self._requests[request_id] for request_id in islice(self._order.ids(now_s), n)]

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The waiting requests in the order in which they were queued. Do not push or remove meanwhile."""
        return iter(self._requests.values())

    def check_integrity(self, now_s: float = 0.0) -> None:
        """Raise IntegrityError unless ids are consistent, the limit holds, and at `now_s` the order is the policy's."""
        for request_id, request in self._requests.items():
            if request.id != request_id:
                raise IntegrityError(f"the request queued as {request_id} says that its id is {request.id}")
            if not 0 <= request.cached_tokens <= request.prompt_tokens:
                raise IntegrityError(
                    f"request {request_id}: {request.cached_tokens} cached of {request.prompt_tokens} tokens"
                )
        strangers = self._readmitted - self._requests.keys()
        if strangers:
            raise IntegrityError(f"requests {sorted(strangers)} are marked as readmitted but do not wait")
        admitted = len(self._requests) - len(self._readmitted)
        if admitted > self.limit:
            raise IntegrityError(f"{admitted} admitted requests wait, over the limit of {self.limit}")
        kept = list(self._order.ids(now_s))
        standing: dict[Hashable, QueuedRequest] = {}
        for request in self._requests.values():
            common = ("alone", request.id) if request.lacks is None else ("lacks", request.lacks)
            if (other := standing.setdefault(common, request)) is not request and (
                self.policy.first_of(request) < self.policy.first_of(other)
            ):
                standing[common] = request
        first = list(standing.values())
        if sorted(kept) != sorted(request.id for request in first):
            raise IntegrityError(f"the order has {len(kept)} requests, but {len(first)} others belong into it")
        ranked = zip(self.policy.ranks(first, now_s), (request.id for request in first), strict=True)
        for there, (_, belongs) in zip(kept, sorted(ranked), strict=True):
            if there != belongs:
                raise IntegrityError(
                    f"request {there} stands where request {belongs} belongs; change waiting requests with update()"
                )

    def _waiting(self, request_id: int) -> QueuedRequest:
        try:
            return self._requests[request_id]
        except KeyError:
            raise UnknownRequestError(
                f"no request with id {request_id} waits; it was handed over, cancelled or never queued"
            ) from None

    def _add(self, request: QueuedRequest) -> None:
        if request.id in self._requests:
            raise DuplicateRequestError(f"a request with id {request.id} waits already; give each its own id")
        self._requests[request.id] = request
        self._enter(request)

    # -- who computes what several lack -------------------------------------------------------------------------

    def _enter(self, request: QueuedRequest) -> None:
        if request.lacks is None:
            self._order.put(request)
            return
        others = self._lacking.setdefault(request.lacks, SortedKeys())
        first = int(others.first[-1]) if others else None
        key = self.policy.first_of(request)
        others.add(key)
        self._place[request.id] = request.lacks, key
        if others.first == key:
            if first is not None:
                self._order.remove(first)
            self._order.put(request)

    def _leave(self, request_id: int) -> None:
        if request_id not in self._place:
            self._order.remove(request_id)
            return
        lacks, key = self._place.pop(request_id)
        others = self._lacking[lacks]
        was_first = others.first == key
        others.remove(key)
        if was_first:
            self._order.remove(request_id)
            if others:
                self._order.put(self._requests[int(others.first[-1])])
        if not others:
            del self._lacking[lacks]

    def _is_first(self, request: QueuedRequest) -> bool:
        """Whether it stands in the order, rather than behind another that lacks the same."""
        return request.lacks is None or self._lacking[request.lacks].first[-1] == request.id
