"""Calls of one kind that are under way, of all tenants: until the last of their answers is sent.

An answer waits in gRPC for as long as its caller has no room for it, also when the work is done and its limits know
nothing of it any more. So calls count until their tasks end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from prefixd.errors import ExhaustedError
from prefixd.server.caller import Caller
from prefixd.tenants import Role, Tenants
from prefixd_scheduler import SharedLimit


class CallPool:
    """Counts the calls; tenants share how many there may be (`SharedLimit`).

    Args:
        name: of the limit, where refusals are counted.
        what: the calls, in a refusal.
        limit: of all tenants together.
        tenants: all of them.
    """

    def __init__(self, name: str, what: str, limit: int, tenants: Tenants) -> None:
        self._name = name
        self._what = what
        self._calls = SharedLimit(limit, lambda: tenants.calling)

    def begin(self, caller: Caller, call: asyncio.Task[Any]) -> None:
        """Counts a call until its task is done; those of operators do not count. Raises ExhaustedError if the tenant
        has as many as it may."""
        tenant, calls = caller.tenant, self._calls
        if caller.role is Role.ADMIN:
            return
        if not calls.left(tenant):
            tenant.refused[self._name] += 1
            raise ExhaustedError(
                f"tenant {tenant.name}: {calls[tenant]} {self._what} are under way, and {calls.total} of all "
                f"tenants, which have {calls.limit} together (the daemon's own limit); read the answers of those that "
                "have ended, or send fewer at a time"
            )
        calls.add(tenant, 1)
        call.add_done_callback(lambda _: calls.add(tenant, -1))
