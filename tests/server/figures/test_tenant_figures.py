"""Whose figures are told where there are very many tenants."""

from __future__ import annotations

import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import TieredCache
from prefixd.server.figures.tenant_figures import SOME, TenantFigures
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2


def figures(cache: TieredCache, names: list[str], sessions: dict[str, int]) -> TenantFigures:
    for name in names:
        cache.tenants.known(name)
    for name, count in sessions.items():
        for _ in range(count):
            cache.leases.open("test", 0, 0.0, cache.tenants.known(name))
    return TenantFigures(cache, lambda _: 0, lambda tenant: (2, 1) if tenant is cache.tenants.default else (0, 0))


def test_those_with_most_sessions_are_told_of_where_not_all_can_be(cache: TieredCache) -> None:
    names = [f"tenant-{number}" for number in range(SOME + 44)]
    busy = {"tenant-299": 2, "tenant-7": 1, "tenant-290": 1}
    made = figures(cache, names, busy)
    told = made.take_some()
    assert len(told) == SOME and len(made.take()) == len(cache.tenants) == SOME + 45
    assert [tenant.name for tenant in told if tenant.sessions] == ["tenant-7", "tenant-290", "tenant-299"]
    assert told[0].name == "default" and (told[0].waiting_requests, told[0].running_requests) == (2, 1)


def test_all_are_told_of_where_they_are_few(cache: TieredCache) -> None:
    made = figures(cache, ["a", "b"], {"b": 3})
    assert [(tenant.name, tenant.sessions) for tenant in made.take_some()] == [("default", 0), ("a", 0), ("b", 3)]


def test_what_a_tenant_has_of_each_tier_is_told(cache: TieredCache) -> None:
    tenant, shared = cache.tenants.known("a"), cache.tiers.shared
    slots = shared.allocate((4096, 5000), 2, account=cache.mover.use.granted(tenant, shared))
    made = figures(cache, ["a"], {})
    assert [
        (each.name, [(use.tier, use.used_bytes, use.held_bytes) for use in each.tiers]) for each in made.take()
    ] == [("default", [(cache_pb2.TIER_CPU, 0, 0)]), ("a", [(cache_pb2.TIER_CPU, 6 * 4096, 6 * 4096)])]
    shared.free(slots)


async def test_nothing_can_be_guaranteed_of_a_tier_that_there_is_not(cache: TieredCache) -> None:
    made = figures(cache, ["a"], {})
    for tier in (cache_pb2.TIER_GPU, cache_pb2.TIER_DISK):
        quota = pb.TenantQuota(tiers=[pb.TierQuota(tier=tier, guaranteed_bytes=4096)])
        with pytest.raises(InvalidArgumentError, match=r"tier, which has 0 \(a 4096\); lower .* start the daemon"):
            made.set_quota(pb.SetTenantRequest(name="a", quota=quota))
    loading = TenantFigures(cache, lambda _: 0, lambda _: (0, 0), gpu=True)
    quota = pb.TenantQuota(tiers=[pb.TierQuota(tier=cache_pb2.TIER_GPU, guaranteed_bytes=4096)])
    assert loading.set_quota(pb.SetTenantRequest(name="a", quota=quota)).quota.tiers[0].guaranteed_bytes == 4096
