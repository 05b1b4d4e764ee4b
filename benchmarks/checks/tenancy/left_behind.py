"""Sessions, grants, calls and held bytes that tenants still have after all their clients have ended."""

from __future__ import annotations

from benchmarks.common import harness
from prefixd.client import Client
from prefixd.v1 import admin_pb2


def left_of_tenants(admin: Client, patience_s: float) -> list[str]:
    """Returns what tenants still have that should end with their clients, one line each, after at most `patience_s`.

    Blocks stay, but they must not be held. `admin` has no session.
    """
    left: list[str] = []

    def gone() -> bool:
        left[:] = [line for tenant in admin.tenants() for line in _left(tenant)]
        return not left

    harness.wait_until(gone, patience_s)
    return left


def _left(tenant: admin_pb2.TenantStats) -> list[str]:
    asking = 1 if tenant.name == "default" else 0  # the call that asks
    counts = {
        "sessions": tenant.sessions,
        "grants": tenant.grants,
        "waiting requests": tenant.waiting_requests,
        "running requests": tenant.running_requests,
        "calls": tenant.calls - asking,
        "held bytes": sum(tier.held_bytes for tier in tenant.tiers),
    }
    return [f"tenant {tenant.name}: {count} {what} are left over" for what, count in counts.items() if count]
