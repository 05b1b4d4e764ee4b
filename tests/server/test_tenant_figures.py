"""Whose figures are told where there are very many tenants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from prefixd.server.tenant_figures import SOME, RequestFigures, TenantFigures
from prefixd.tenants import Quota, Tenants


def figures(names: list[str], sessions: dict[str, int]) -> tuple[TenantFigures, Tenants]:
    tenants = Tenants({name: Quota() for name in names})
    opened: dict[str, Any] = {
        f"{name} {number}": SimpleNamespace(tenant=tenants.known(name), grants={})
        for name, count in sessions.items()
        for number in range(count)
    }
    cache = cast(Any, SimpleNamespace(tenants=tenants, leases=SimpleNamespace(sessions=opened)))
    return TenantFigures(cache, lambda _: 0, lambda: {tenants.default: RequestFigures(2, 1)}), tenants


def test_those_with_most_sessions_are_told_of_where_not_all_can_be() -> None:
    names = [f"tenant-{number}" for number in range(SOME + 44)]
    busy = {"tenant-299": 2, "tenant-7": 1, "tenant-290": 1}
    made, tenants = figures(names, busy)
    told = made.take_some()
    assert len(told) == SOME and len(made.take()) == len(tenants) == SOME + 45
    assert [tenant.name for tenant in told if tenant.sessions] == ["tenant-7", "tenant-290", "tenant-299"]
    assert told[0].name == "default" and (told[0].waiting_requests, told[0].running_requests) == (2, 1)


def test_all_are_told_of_where_they_are_few() -> None:
    made, _ = figures(["a", "b"], {"b": 3})
    assert [(tenant.name, tenant.sessions) for tenant in made.take_some()] == [("default", 0), ("a", 0), ("b", 3)]
