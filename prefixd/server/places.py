"""Places: how many requests run at once, and which of them one tenant may have.

What runs is not taken back for another tenant's sake, and may run for minutes. So as long as other tenants have nothing
that runs, a place is kept free for each of them, up to half of all; a tenant that has something running takes none of
these. With one tenant no place is kept.

A search takes a place for each beam. One that is wider than all that a tenant may have while no other has any counts as
so many, and runs beside those for whom the others are kept; the worker has room for one such search at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from prefixd.server.request import Request


class Places:
    """Those that are taken, and what may start beside.

    Args:
        limit: of all.
        tenants: how many there are.
        running: the requests that have some.
    """

    def __init__(self, limit: int, tenants: int, running: Iterable[Request]) -> None:
        self._limit = limit
        self._tenants = tenants
        self._most = limit - self._kept(tenants - 1)
        self._taken: Counter[Hashable] = Counter()
        self._wide = False
        self._waiting: set[Hashable] = set()
        for request in running:
            self.take(request)

    @property
    def free(self) -> int:
        """How many nobody has; below 0 where the limit has fallen."""
        return self._limit - self._taken.total()

    def take(self, request: Request) -> None:
        """A request runs."""
        self._taken[request.queued.tenant] += self._needed(request)
        self._wide |= request.places > self._most

    def has_for(self, request: Request) -> bool:
        """Whether as many are free as a request takes."""
        return self._needed(request) <= self.free

    def keeps_waiting(self, request: Request) -> bool:
        """Whether a request does not keep others waiting: the places that are left are kept for other tenants, or it is
        a second wide search. Later ones of its tenant wait with it."""
        tenant = request.queued.tenant
        if tenant not in self._waiting and self._waits(request):
            self._waiting.add(tenant)
        return tenant in self._waiting

    def _waits(self, request: Request) -> bool:
        if self._wide and request.places > self._most:
            return True
        if not self._taken[request.queued.tenant]:
            return False
        kept = self._kept(self._tenants - sum(1 for taken in self._taken.values() if taken))
        return kept > 0 and self.free - self._needed(request) < kept

    def _needed(self, request: Request) -> int:
        return min(request.places, self._most)

    def _kept(self, tenants: int) -> int:
        """How many are kept for so many tenants that have none."""
        return max(0, min(self._limit // 2, tenants))
