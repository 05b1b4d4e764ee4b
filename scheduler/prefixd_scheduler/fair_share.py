"""Decides which tenant is served next: tenants get equal service, however many requests each of them has.

Start-time fair queueing (Goyal, Vin and Cheng, "Start-Time Fair Queueing", SIGCOMM 1996) with the counters of "Fairness
in Serving Large Language Models" (Sheng et al., VTC, OSDI 2024), of equal weights. Each tenant has a counter of the
service that it has received, in tokens of prompts that were computed; a generated token counts as two (VTC, section
4.1). The tenant whose counter is lowest is next. A request is charged for its prompt when it is handed over and for its
output as it comes, since its length is not known before.

**No credit.** The counter of a tenant that begins to wait is raised to the lowest counter among the waiting tenants or,
if none waits, to that of the tenant that waited last. Service that it did not use while it was idle is lost.

**Bound.** While two tenants wait all the time, the service that they have received differs by no more than a bound that
does not depend on their numbers of requests: twice the larger one of the longest prompt and twice the tokens that all
running requests may generate (VTC, theorem 4.4). So of T waiting tenants each gets at least a T-th of the service, and
a tenant that asks for less gets all that it asks for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import takewhile

from prefixd_scheduler.orders import Order
from prefixd_scheduler.request import QueuedRequest

OUTPUT_TOKEN = 2
"""The cost of a generated token."""


class FairShare:
    """The service that tenants have received, and which of them wait.

    It remembers a counter of each tenant that ever waited.
    """

    def __init__(self) -> None:
        self._received: dict[Hashable, int] = {}
        self._served: dict[Hashable, int] = {}  # number of its last turn: among equal counters the smallest is next
        self._waiting: dict[Hashable, int] = {}
        self._waited_last: Hashable = None
        self._turn = 0

    def waiting(self, tenant: Hashable) -> int:
        """How many of a tenant's requests wait."""
        return self._waiting.get(tenant, 0)

    def received(self, tenant: Hashable) -> int:
        """A tenant's counter."""
        return self._received.get(tenant, 0)

    def enter(self, tenant: Hashable) -> None:
        """One more request of a tenant waits."""
        if tenant not in self._waiting:
            floor = min((self._received[other] for other in self._waiting), default=self.received(self._waited_last))
            self._received[tenant] = max(self.received(tenant), floor)
        self._waiting[tenant] = self.waiting(tenant) + 1

    def leave(self, tenant: Hashable) -> None:
        """One less request of a tenant waits."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._waited_last = tenant

    def serve(self, tenant: Hashable, cost: int) -> None:
        """A request of a tenant that waits is handed over."""
        self._turn += 1
        self._served[tenant] = self._turn
        self.charge(tenant, cost)

    def charge(self, tenant: Hashable, cost: int) -> None:
        """A tenant has received service."""
        self._received[tenant] = self.received(tenant) + cost

    def in_turn(
        self,
        waiting: Iterable[tuple[Hashable, Iterator[int]]],
        cost: Callable[[int], int],
        admits: Callable[[int], bool],
    ) -> Iterator[int]:
        """The ids of all requests, as they would be served if no request came and nothing was generated.

        Args:
            waiting: tenants that wait, each with its requests in its own order.
            cost: what a request will be charged when it is handed over.
            admits: whether a request may run beside those before it; if not, the rest of its tenant's is left out.
        """
        line = [
            (self.received(tenant), self._served.get(tenant, 0), place, ids)
            for place, (tenant, ids) in enumerate(waiting)
        ]
        heapq.heapify(line)
        turn = self._turn
        while line:
            received, _, place, ids = line[0]
            request_id = next(ids, None)
            if request_id is None or not admits(request_id):
                heapq.heappop(line)
                continue
            yield request_id
            turn += 1
            heapq.heapreplace(line, (received + cost(request_id), turn, place, ids))


class ByTenant(Order):
    """An order for each tenant; the tenants take turns (`FairShare`). A tenant's requests do not affect the order of
    another's.

    The first w requests of t tenants cost O(t + w log t) besides. With a single tenant its order is used as it is.

    Args:
        order: makes an order.
        share: decides which tenant is next.
        cost: what a request will be charged when it is handed over.
    """

    def __init__(self, order: Callable[[], Order], share: FairShare, cost: Callable[[int], int]) -> None:
        self._new = order
        self._share = share
        self._cost = cost
        self._orders: dict[Hashable, Order] = {}
        self._tenant_of: dict[int, Hashable] = {}

    def put(self, request: QueuedRequest) -> None:
        if request.tenant not in self._orders:
            self._orders[request.tenant] = self._new()
        self._tenant_of[request.id] = request.tenant
        self._orders[request.tenant].put(request)

    def remove(self, request_id: int) -> None:
        tenant = self._tenant_of.pop(request_id)
        self._orders[tenant].remove(request_id)
        if not len(self._orders[tenant]):
            del self._orders[tenant]

    def ids(self, now_s: float, admits: Callable[[int], bool] = lambda request_id: True) -> Iterator[int]:
        if len(self._orders) == 1:
            (order,) = self._orders.values()
            return takewhile(admits, order.ids(now_s))
        waiting = ((tenant, order.ids(now_s)) for tenant, order in self._orders.items())
        return self._share.in_turn(waiting, self._cost, admits)

    def __len__(self) -> int:
        return len(self._tenant_of)
