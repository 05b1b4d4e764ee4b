"""The standard gRPC health service, for the daemon and for each of its tiers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from prefixd.base.tenancy.tenants import Tenant
from prefixd.server.rpc.receiving import CURRENT_CALL
from prefixd.server.rpc.status import Context

_WATCHERS = 64  # watchers of one tenant at once, and of all anonymous callers together

_Response = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Serves the status of each service by name.

    grpcio-health-checking's own servicer writes to its watchers under a lock that setting a status needs too, so a
    watcher that does not read would keep the daemon from ending; and a watcher that leaves takes the wake-up of the
    others with it.
    """

    def __init__(self) -> None:
        self._status: dict[str, Any] = {}
        self._changed = asyncio.Event()  # set, and replaced, with every change
        self._watchers: Counter[Tenant | None] = Counter()  # None: anonymous callers

    def set(self, service: str, status: Any) -> None:
        """Sets the status of `service` and wakes its watchers."""
        if self._status.get(service) != status:
            self._status[service] = status
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> _Response:
        """Returns the status now. NOT_FOUND: no service has this name."""
        status = self._status.get(request.service)
        if status is None:
            known = ", ".join(sorted(filter(None, self._status)))
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no service {request.service[:200]!r} here; ask for {known}, or for none"
            )
        return _Response(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Sends the status now and after each change."""
        call = CURRENT_CALL.get(None)
        tenant = None if call is None or call.caller is None else call.caller.tenant
        if self._watchers[tenant] >= _WATCHERS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_WATCHERS} calls watch the health already; use Check instead"
            )
        self._watchers[tenant] += 1
        try:
            last = None
            while True:
                changed, status = self._changed, self._status.get(request.service, _Response.SERVICE_UNKNOWN)
                if status != last:
                    await context.write(_Response(status=status))
                    last = status
                await changed.wait()
        finally:
            self._watchers[tenant] -= 1
