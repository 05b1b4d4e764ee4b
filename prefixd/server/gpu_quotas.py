"""Which waiting requests may run beside those that do, where tenants have quotas of the GPU tier.

The frames of a run cannot be evicted, and others' guarantees must be there when they are wanted. So a request waits
until all that it, and its tenant's other runs, may come to fits into what the tenant may hold of the tier
(`TenantUse.room_to_hold`): until others of its tenant have ended. Requests of other tenants pass it. Without quotas
requests begin with less, and are preempted when frames run out.
"""

from __future__ import annotations

from collections.abc import Iterable

from prefixd.cache.tenant_use import TenantUse
from prefixd.errors import ExhaustedError
from prefixd.server.request import Request, RequestState
from prefixd.tenants import Tenant
from prefixd_swap.tiers import GpuTier

_STAGED = (RequestState.STAGING, RequestState.READY)


class GpuQuotas:
    """One look at the queue: what the tenants' runs may come to, those that are admitted here among them.

    Args:
        use: what tenants have and may have.
        tier: the GPU tier.
        running: all running requests, of all models.
    """

    def __init__(self, use: TenantUse, tier: GpuTier, running: Iterable[Request]) -> None:
        self._use = use
        self._tier = tier
        self._bounds = use.hold_bounds(tier)
        self.never: list[tuple[Request, ExhaustedError]] = []
        """Requests that would not fit if their tenants had nothing else."""
        self.left_out = False
        """Whether some were not admitted."""
        if self._bounds is None:
            return
        self._held = {tenant: use.held_bytes(tenant, tier) for tenant in use.tenants}
        for request in running:
            self._held[use.tenant_of(request.namespace)] += request.growth_frames * tier.frame_bytes
        self._together = sum(map(self._at_least, self._held))

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
        others = self._together - self._at_least(tenant)
        room = min(bound, tier.capacity_bytes - others) - self._held[tenant]
        if more > room:
            self.left_out = True
            return False
        self._together = others
        self._held[tenant] += max(more, 0)
        self._together += self._at_least(tenant)
        return True

    def _refusal(self, tenant: Tenant, most: int, bound: int) -> ExhaustedError:
        """For a request of `most` bytes of a tenant that may hold `bound` bytes: by its own limit, or by others'."""
        use, tier, remedy = self._use, self._tier, "shorten the prompt or lower max_tokens"
        need = f"prompt and output need up to {most} bytes of the gpu tier, of which it may hold {bound}"
        others = sum(use.guaranteed(each, tier) for each in use.tenants if each is not tenant)
        if bound < tier.capacity_bytes - others:
            return tenant.refusal("gpu_most", need, remedy)
        return tenant.refusal(
            "gpu_guaranteed",
            f"{need}, as {others} of {tier.capacity_bytes} bytes are guaranteed to others",
            remedy,
            "lower what others are guaranteed or make the tier larger (`prefixd tier resize gpu`)",
        )

    def _at_least(self, tenant: Tenant) -> int:
        """What a tenant's runs keep others from: what they may come to, and what it is guaranteed."""
        return max(self._held[tenant], self._use.guaranteed(tenant, self._tier))
