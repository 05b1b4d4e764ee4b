"""Divides the places of running requests among tenants, and the GPU tier's bytes by their quotas.

A run is not taken back for another tenant's sake, and may last minutes. So for each tenant without a running request
one place is kept free, up to half of all places; a tenant with a running request cannot take these. With one tenant no
place is kept.

A beam search takes a place for each beam. A *wide* search has more beams than the places that a tenant may take while
no other tenant runs any: it counts as that many places, and the worker has room for one such search at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.placement.tenant_use import TenantUse
from prefixd.serving.request.request import Request
from prefixd.serving.request.states import RequestState
from prefixd_swap.tiers import GpuTier


class Places:
    """Counts the places that are taken, and decides which request may take the next.

    Args:
        limit: number of places.
        tenants: number of tenants.
        running: the running requests.
    """

    def __init__(self, limit: int, tenants: int, running: Iterable[Request]) -> None:
        self._limit = limit
        self._tenants = tenants
        self._most = limit - self._kept(tenants - 1)
        self._taken: Counter[Hashable] = Counter()
        self._wide = False
        self._waiting: set[Hashable] = set()
        for request in running:
            self.add(request)

    @property
    def free(self) -> int:
        """How many are free; below 0 if the limit has fallen."""
        return self._limit - self._taken.total()

    def add(self, request: Request) -> None:
        """Counts the places of a request that runs."""
        self._taken[request.queued.tenant] += self._needed(request)
        self._wide |= request.places > self._most

    def has_room_for(self, request: Request) -> bool:
        """Whether as many places are free as a request takes."""
        return self._needed(request) <= self.free

    def must_wait(self, request: Request) -> bool:
        """True if the places that are left are kept for other tenants, or it is a second wide search. Later requests of
        its tenant wait with it."""
        tenant = request.queued.tenant
        if tenant not in self._waiting and self._is_barred(request):
            self._waiting.add(tenant)
        return tenant in self._waiting

    def _is_barred(self, request: Request) -> bool:
        if self._wide and request.places > self._most:
            return True
        if not self._taken[request.queued.tenant]:
            return False
        kept = self._kept(self._tenants - sum(1 for taken in self._taken.values() if taken))
        return kept > 0 and self.free - self._needed(request) < kept

    def _needed(self, request: Request) -> int:
        return min(request.places, self._most)

    def _kept(self, tenants: int) -> int:
        """How many are kept for `tenants` tenants that have none."""
        return max(0, min(self._limit // 2, tenants))


_STAGED = (RequestState.STAGING, RequestState.READY)


class GpuQuotas:
    """Admits requests by the tenants' quotas, in one look at the queue.

    The frames of a run cannot be evicted, and the bytes guaranteed to other tenants must be available at any time. So a
    request waits, until other runs of its tenant have ended, unless the most bytes that it and these runs may need fit
    into the bytes that the tenant may hold (`TenantUse.room_to_hold`). Requests of other tenants pass it. Without
    quotas requests begin with fewer frames, and are preempted when frames run out.

    Args:
        use: what tenants have and may have.
        tier: the GPU tier.
        running: all running requests, of all models.
    """

    def __init__(self, use: TenantUse, tier: GpuTier, running: Iterable[Request]) -> None:
        self._use = use
        self._tier = tier
        self._bounds = use.hold_bounds(tier, tier.attainable_bytes)
        self._guaranteed = 0
        self.never: list[tuple[Request, ExhaustedError]] = []
        """Requests that would not fit if their tenants had nothing else."""
        self.left_out = False
        """Whether some requests were not admitted."""
        self.needed_frames = 0
        """Frames of the tier with which the first request that lacks them would be admitted; 0: none lacks any."""
        if self._bounds is None:
            return
        self._guaranteed = sum(use.guaranteed(tenant, tier) for tenant in use.tenants)
        self._held = {tenant: use.held_bytes(tenant, tier) for tenant in use.tenants}
        for request in running:
            self._held[use.tenant_of(request.namespace)] += request.growth_frames * tier.frame_bytes
        self._reserved_of_all = sum(map(self._reserved, self._held))

    def admits(self, request: Request) -> bool:
        """Whether a waiting request may run beside those that run and those that were admitted before."""
        if self._bounds is None:
            return True
        tenant, use, tier = self._use.tenant_of(request.namespace), self._use, self._tier
        most, bound = request.most_frames * tier.frame_bytes, self._bounds[tenant]
        if most > bound:
            refusal = self._refusal(tenant, most, bound)
            self.never.append((request, refusal))
            return True
        rows, wanted, trie = request.rows, request.wanted, request.trie
        needed = trie.needed(len(rows)) if wanted is None else wanted
        more = most - int(use.group_bytes(trie, tier)[needed].sum())
        if request.state not in _STAGED:  # else they are held already
            more += int(use.held.fresh_bytes(trie, tier, rows, wanted).sum())
        others = self._reserved_of_all - self._reserved(tenant)
        room = min(bound, tier.capacity_bytes - others) - self._held[tenant]
        if more > room:
            self.left_out = True
            total = others + self._held[tenant] + more
            if not self.needed_frames and tier.capacity_bytes < total <= min(tier.attainable_bytes, others + bound):
                self.needed_frames = -(-total // tier.frame_bytes)
            return False
        self._held[tenant] += max(more, 0)
        self._reserved_of_all = others + self._reserved(tenant)
        return True

    def frames_alone(self, request: Request) -> int:
        """Frames of the tier with which a request could run if no other did: its own, and those guaranteed to other
        tenants."""
        if not self._guaranteed:
            return request.most_frames
        others = self._guaranteed - self._use.guaranteed(self._use.tenant_of(request.namespace), self._tier)
        return request.most_frames + -(-others // self._tier.frame_bytes)

    def _refusal(self, tenant: Tenant, most: int, bound: int) -> ExhaustedError:
        """The error for a request that may need `most` bytes, more than the `bound` of its tenant: it names the
        tenant's own limit, or the guarantees of others."""
        use, tier, remedy = self._use, self._tier, "shorten the prompt or lower max_tokens"
        need = f"prompt and output need up to {most} bytes of the gpu tier, of which it may hold {bound}"
        others = sum(use.guaranteed(each, tier) for each in use.tenants if each is not tenant)
        if bound < tier.attainable_bytes - others:
            return tenant.refusal("gpu_most", need, remedy)
        return tenant.refusal(
            "gpu_guaranteed",
            f"{need}, as {others} of {tier.attainable_bytes} bytes are guaranteed to others",
            remedy,
            "lower what others are guaranteed or make the tier larger (`prefixd tier resize gpu`)",
        )

    def _reserved(self, tenant: Tenant) -> int:
        """Bytes that other tenants cannot have: what the tenant's runs may need, at least what it is guaranteed."""
        return max(self._held[tenant], self._use.guaranteed(tenant, self._tier))
