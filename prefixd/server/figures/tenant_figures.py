"""Figures of tenants for operators: quotas and use of each tenant; and changes of quotas while the daemon runs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.tenancy.tenants import Quota, Tenant, TierQuota, check_guarantees
from prefixd.base.tiers import QUOTA_TIERS, Tier
from prefixd.cache import Session, TieredCache
from prefixd.v1 import admin_pb2 as pb

SOME = 256
"""Most tenants in `Stats` and in the metrics; `ListTenants` has all tenants."""
_COUNTS = ("sessions", "grants", "namespaces", "waiting_requests", "requests_per_s", "calls", "retained_bytes")
_LARGER = {
    "gpu": "make the tier larger (`prefixd tier resize gpu`, or gpu.least_bytes of a tier that grows)",
    "cpu": "raise cpu.bytes and start the daemon again",
    "disk": "raise disk.bytes and start the daemon again",
}
_TIER_LIMITS = tuple(f"{tier}_most" for tier in QUOTA_TIERS)


def check_tiers_hold(cache: TieredCache, quotas: Mapping[str, Quota], *, gpu: bool) -> None:
    """Checks that the tiers hold what these quotas guarantee, at the least size that they have.

    Args:
        cache: its tiers.
        quotas: the quotas by tenant.
        gpu: True if the daemon has models, and thus a GPU tier once they are loaded.

    Raises:
        ValueError: the guarantees of a tier are more than the tier has.
    """
    sizes = {tier.level: tier.least_bytes for tier in cache.tiers.existing}
    for level, name in enumerate(QUOTA_TIERS):
        if level in sizes or name != "gpu" or not gpu:
            larger = _LARGER[name] if name != "gpu" or gpu else "start the daemon with a model"
            check_guarantees(quotas, name, sizes.get(level, 0), larger)


class TenantFigures:
    """Figures and quotas of tenants.

    Args:
        cache: the cache.
        calls: returns the number of a tenant's calls under way.
        requests: returns how many of a tenant's requests to all models wait, and how many run.
        gpu: True if there is a GPU tier, or will be once the models are loaded.
    """

    def __init__(
        self,
        cache: TieredCache,
        calls: Callable[[Tenant], int],
        requests: Callable[[Tenant], tuple[int, int]],
        *,
        gpu: bool = False,
    ) -> None:
        self._gpu = gpu
        self._cache = cache
        self._calls = calls
        self._requests = requests

    def take(self) -> list[pb.TenantStats]:
        """Returns the figures of all tenants, in the order in which the daemon first saw them."""
        return self._collect(list(self._cache.tenants.all))

    def take_some(self) -> list[pb.TenantStats]:
        """Returns the figures of all tenants, in the same order; if there are more than `SOME`, only of the `SOME`
        tenants with most sessions."""
        tenants = list(self._cache.tenants.all)
        if len(tenants) > SOME:
            sessions = Counter(session.tenant for session in self._cache.leases.sessions.values())
            chosen = sorted(tenants, key=lambda tenant: sessions[tenant], reverse=True)[:SOME]
            tenants = sorted(chosen, key=lambda tenant: tenant.ordinal)
        return self._collect(tenants)

    def _collect(self, tenants: Sequence[Tenant]) -> list[pb.TenantStats]:
        sessions = defaultdict[Tenant, list[Session]](list)
        for session in self._cache.leases.sessions.values():
            sessions[session.tenant].append(session)
        return [self._stats(tenant, sessions.get(tenant, [])) for tenant in tenants]

    def set_quota(self, request: pb.SetTenantRequest) -> pb.TenantStats:
        """Changes the quota of a tenant that the daemon knows; returns its figures.

        Raises:
            NotFoundError: there is no such tenant.
            InvalidArgumentError: a value is invalid, or the guarantees do not fit into a tier.
        """
        tenants = self._cache.tenants
        tenant = tenants.get(request.name)
        if tenant is None:
            raise NotFoundError(
                f"there is no tenant {request.name[:100]!r}; add a section [tenants.NAME] to the settings and send the "
                "daemon SIGHUP"
            )
        quota = _changed_quota(tenant.quota, request.quota, request.unlimited)
        quotas = {each.name: each.quota for each in tenants} | {tenant.name: quota}
        try:
            check_tiers_hold(self._cache, quotas, gpu=self._gpu)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error
        tenant.quota = quota
        self._cache.mover.changed.set()  # blocks that the former limit kept back may be written now
        return self._collect([tenant])[0]

    def _stats(self, tenant: Tenant, sessions: Sequence[Session]) -> pb.TenantStats:
        use, tiers, (waiting, running) = self._cache.mover.use, self._cache.tiers, self._requests(tenant)
        return pb.TenantStats(
            name=tenant.name,
            quota=_quota_message(tenant.quota),
            tiers=[
                pb.TenantTierUse(
                    tier=Tier(tier.level).wire,
                    used_bytes=use.used_bytes(tenant, tier),
                    held_bytes=use.held_bytes(tenant, tier),
                    exact_bytes=use.stored.of_tenant(tenant.ordinal).exact if tier is tiers.durable else None,
                )
                for tier in tiers.own
            ],
            sessions=len(sessions),
            grants=sum(len(session.grants) for session in sessions),
            namespaces=self._cache.namespaces.count(tenant.name),
            waiting_requests=waiting,
            running_requests=running,
            calls=self._calls(tenant),
            retained_bytes=self._cache.retained.of_tenant[tenant],
            refused=tenant.refused,
        )


def _quota_message(quota: Quota) -> pb.TenantQuota:
    tiers = [
        pb.TierQuota(tier=Tier(level).wire, guaranteed_bytes=each.guaranteed_bytes, most_bytes=each.most_bytes)
        for level, each in enumerate(quota.tiers)
    ]
    return pb.TenantQuota(tiers=tiers, **{name: getattr(quota, name) for name in _COUNTS})


def _changed_quota(quota: Quota, wanted: pb.TenantQuota, unlimited: Iterable[str]) -> Quota:
    tiers = list(quota.tiers)
    counts = {name: getattr(wanted, name) for name in _COUNTS if wanted.HasField(name)}
    for name, value in counts.items():
        if not (value > 0 or name == "retained_bytes") or value == float("inf"):
            raise InvalidArgumentError(f"{name} is {value:g}; give a number above 0, or name it in `unlimited`")
    for each in wanted.tiers:
        level = each.tier - Tier.GPU.wire
        if not 0 <= level < len(tiers):
            raise InvalidArgumentError(f"tier {each.tier} has no quotas; those with are {', '.join(QUOTA_TIERS)}")
        tiers[level] = TierQuota(
            each.guaranteed_bytes if each.HasField("guaranteed_bytes") else tiers[level].guaranteed_bytes,
            each.most_bytes if each.HasField("most_bytes") else tiers[level].most_bytes,
        )
    for name in unlimited:
        if name in _TIER_LIMITS:
            level = _TIER_LIMITS.index(name)
            tiers[level] = replace(tiers[level], most_bytes=None)
        elif name in _COUNTS:
            counts[name] = None
        else:
            raise InvalidArgumentError(f"{name[:100]!r} is no limit; there are {', '.join((*_TIER_LIMITS, *_COUNTS))}")
    for name, tier in zip(QUOTA_TIERS, tiers, strict=True):
        if tier.most_bytes is not None and tier.guaranteed_bytes > tier.most_bytes:
            raise InvalidArgumentError(
                f"{tier.guaranteed_bytes} bytes of the {name} tier would be guaranteed, of {tier.most_bytes} at most; "
                "lower the first or raise the second"
            )
    return replace(quota, tiers=tuple(tiers), **counts)
