"""The waiting requests, with a limit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import TypeAlias

from prefixd_scheduler.errors import (
    DuplicateRequestError,
    IntegrityError,
    InvalidValueError,
    QueueFullError,
    UnknownRequestError,
)
from prefixd_scheduler.fair_share import OUTPUT_TOKEN, ByTenant, FairShare
from prefixd_scheduler.orders import SortedKeys
from prefixd_scheduler.policies import Policy
from prefixd_scheduler.request import QueuedRequest
from prefixd_scheduler.shared_limit import SharedLimit

_Common: TypeAlias = tuple[Hashable, Hashable]
"""The tenant of requests, and the block that they lack."""


class RequestQueue:
    """Requests that wait, handed over in the order of a policy.

    Not thread-safe: it belongs to one event loop. The requests are kept in the policy's order (`Policy.order`): a
    change costs O(log n), and the first requests are found without looking at the others.

    **Between tenants** the policy decides nothing: each has an order of its own, and they take turns by the service
    that they have received (`fair_share`). Priorities, deadlines and cached blocks order requests of one tenant. A
    bound on waiting holds for a tenant's own requests and its own service, of which it gets at least a T-th while T
    tenants wait. `serve` and `charge` count the service. With several queues, each is fair by itself.

    **Computed once.** Of a tenant's requests that lack the same block next (`QueuedRequest.lacks`) only one stands in
    the order, the first one by `Policy.first_of`: it computes the block, which the others then find. They stand behind
    it, so that a thousand of them do not hide the next request, and the earliest takes its place when it leaves. No
    request stands behind a request of another tenant, whose turn may come late.

    Args:
        policy: decides the order.
        limit: most requests that may be admitted at a time.
        tenants: returns the number of tenants, which share the limit (`SharedLimit`).
    """

    def __init__(self, policy: Policy, limit: int, tenants: Callable[[], int] = lambda: 1) -> None:
        if limit < 1:
            raise InvalidValueError(f"a queue limited to {limit} requests admits none; pass a limit of at least 1")
        self.policy = policy
        self.limit = limit
        self._share = FairShare()
        self._order = ByTenant(policy.order, self._share, lambda request_id: self._cost(self._requests[request_id]))
        self._admitted = SharedLimit(limit, tenants)
        self._requests: dict[int, QueuedRequest] = {}
        self._lacking: dict[_Common, SortedKeys[tuple[float, ...]]] = {}  # the earliest first
        self._place: dict[int, tuple[_Common, tuple[float, ...]]] = {}  # of each of them
        self._readmitted: set[int] = set()

    def push(self, request: QueuedRequest) -> None:
        """Admit a new request.

        Raises:
            QueueFullError: `limit` requests wait already, or the tenant has its share of it.
            DuplicateRequestError: one with this id waits already.
        """
        self.check_room(request.tenant)
        self._add(request)
        self._admitted.add(request.tenant, 1)

    def check_room(self, tenant: Hashable) -> None:
        """Raise QueueFullError unless one more request of a tenant can be pushed."""
        if len(self._requests) >= self.limit:
            raise QueueFullError(self.limit)
        if not self._admitted.left(tenant):
            raise QueueFullError(self.limit, self._admitted[tenant], self._admitted.reserved)

    def readmit(self, request: QueuedRequest) -> None:
        """Put back a request that was handed over and interrupted.

        The limit does not apply: it was admitted once, and the number of such requests is bounded by those that run.

        Raises:
            DuplicateRequestError: one with this id waits already.
        """
        self._add(request)
        self._readmitted.add(request.id)

    def remove(self, request_id: int) -> QueuedRequest:
        """Take a request out, because it was cancelled, or runs without being charged to its tenant.

        Raises:
            UnknownRequestError: no request with this id waits.
        """
        request = self._waiting(request_id)
        del self._requests[request_id]
        if request_id in self._readmitted:
            self._readmitted.discard(request_id)
        else:
            self._admitted.add(request.tenant, -1)
        self._leave(request_id)
        self._share.leave(request.tenant)
        return request

    def serve(self, request_id: int) -> QueuedRequest:
        """Take a request out because it runs now; its tenant is charged for the prompt, unless it was readmitted.

        Raises:
            UnknownRequestError: no request with this id waits.
        """
        self._share.serve(self._waiting(request_id).tenant, self._cost(self._requests[request_id]))
        return self.remove(request_id)

    def charge(self, tenant: Hashable, output_tokens: int) -> None:
        """`output_tokens` tokens were generated for requests of a tenant that were handed over."""
        self._share.charge(tenant, OUTPUT_TOKEN * output_tokens)

    def waiting_of(self, tenant: Hashable) -> int:
        """How many requests of a tenant wait."""
        return self._share.waiting(tenant)

    def update(
        self,
        request_id: int,
        weight: float,
        cached_tokens: int,
        prefix: Hashable | None,
        *,
        lacks: Hashable | None = None,
        ready_s: float = math.inf,
    ) -> None:
        """Record how much of a waiting request's prefix is cached now, and where (`QueuedRequest.set_cached`), and move
        it in the order.

        Raises:
            UnknownRequestError: no request with this id waits.
            InvalidValueError: `cached_tokens` is negative or more than the prompt has, `weight` is none of
                `WEIGHT_CLASSES`, or `ready_s` is negative.
        """
        request = self._waiting(request_id)
        lacks_other = lacks != request.lacks
        request.set_cached(weight, cached_tokens, prefix, lacks=lacks, ready_s=ready_s)
        if lacks_other:
            self._leave(request_id)
            self._enter(request)
        elif self._is_first(request):
            self._order.put(request)

    def get(self, request_id: int) -> QueuedRequest | None:
        """The waiting request with this id, or None."""
        return self._requests.get(request_id)

    def window(
        self,
        n: int,
        now_s: float,
        admits: Callable[[QueuedRequest], bool] = lambda request: True,
        passes: Callable[[QueuedRequest], bool] = lambda request: False,
    ) -> list[QueuedRequest]:
        """The next `n` requests in order (all of them where fewer stand in it); none is taken out.

        Time O(n), and O(t) for t tenants that wait, however many wait. One core of a small machine takes 0.04 ms for
        n = 32 and one tenant.

        Args:
            n: how many to look at.
            now_s: the present time, on the clock of `QueuedRequest.arrival_s`.
            admits: whether a request may run beside those before it. If not, it and its tenant's requests behind it
                are left out, and those of other tenants pass them.
            passes: whether a request alone is left out: all behind it pass it, those of its tenant, too.
        """
        requests = self._requests
        ids = self._order.ids(now_s, lambda number: passes(requests[number]) or admits(requests[number]))
        return list(islice((requests[number] for number in ids if not passes(requests[number])), n))

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
        unknown = self._readmitted - self._requests.keys()
        if unknown:
            raise IntegrityError(f"requests {sorted(unknown)} are marked as readmitted but do not wait")
        admitted = len(self._requests) - len(self._readmitted)
        if admitted > self.limit:
            raise IntegrityError(f"{admitted} admitted requests wait, over the limit of {self.limit}")
        of_tenant = Counter(request.tenant for request in self._requests.values())
        for tenant, count in of_tenant.items():
            if count != self._share.waiting(tenant):
                raise IntegrityError(f"{count} requests of tenant {tenant} wait, counted are {self.waiting_of(tenant)}")
        if admitted != self._admitted.total:
            raise IntegrityError(f"{admitted} admitted requests wait, counted are {self._admitted.total}")
        kept = list(self._order.ids(now_s))
        standing: dict[Hashable, QueuedRequest] = {}
        for request in self._requests.values():
            common = ("alone", request.id) if request.lacks is None else (request.tenant, request.lacks)
            if (other := standing.setdefault(common, request)) is not request and (
                self.policy.first_of(request) < self.policy.first_of(other)
            ):
                standing[common] = request
        first = list(standing.values())
        if sorted(kept) != sorted(request.id for request in first):
            raise IntegrityError(f"the order has {len(kept)} requests, but {len(first)} others belong into it")
        for tenant in of_tenant:
            own = [request for request in first if request.tenant == tenant]
            ranked = zip(self.policy.ranks(own, now_s), (request.id for request in own), strict=True)
            there_of_tenant = [request_id for request_id in kept if self._requests[request_id].tenant == tenant]
            for there, (_, belongs) in zip(there_of_tenant, sorted(ranked), strict=True):
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
        self._share.enter(request.tenant)
        self._enter(request)

    def _cost(self, request: QueuedRequest) -> int:
        """The cost of handing a request over: the tokens of its prompt that are not cached."""
        return 0 if request.id in self._readmitted else max(1, request.prompt_tokens - request.cached_tokens)

    # -- who computes what several lack -------------------------------------------------------------------------

    def _enter(self, request: QueuedRequest) -> None:
        if request.lacks is None:
            self._order.put(request)
            return
        common = request.tenant, request.lacks
        others = self._lacking.setdefault(common, SortedKeys())
        first = int(others.first[-1]) if others else None
        key = self.policy.first_of(request)
        others.add(key)
        self._place[request.id] = common, key
        if others.first == key:
            if first is not None:
                self._order.remove(first)
            self._order.put(request)

    def _leave(self, request_id: int) -> None:
        if request_id not in self._place:
            self._order.remove(request_id)
            return
        common, key = self._place.pop(request_id)
        others = self._lacking[common]
        was_first = others.first == key
        others.remove(key)
        if was_first:
            self._order.remove(request_id)
            if others:
                self._order.put(self._requests[int(others.first[-1])])
        if not others:
            del self._lacking[common]

    def _is_first(self, request: QueuedRequest) -> bool:
        """Whether it stands in the order, rather than behind another that lacks the same."""
        return request.lacks is None or self._lacking[request.tenant, request.lacks].first[-1] == request.id
