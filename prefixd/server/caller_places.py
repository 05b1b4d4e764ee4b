"""Places of which a tenant has so many and one caller of it fewer: who keeps his for long does not have all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from prefixd.server.caller import Caller
from prefixd.tenants import Tenant


class CallerPlaces:
    """Gives places in the order in which they are asked for.

    Args:
        of_tenant: how many all callers of a tenant have together.
        of_caller: how many one caller has.
    """

    def __init__(self, of_tenant: int, of_caller: int) -> None:
        self._of_tenant, self._of_caller = of_tenant, of_caller
        self._tenants: dict[Tenant, asyncio.Semaphore] = {}
        self._callers: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def place(self, caller: Caller) -> AsyncGenerator[None]:
        """Waits for a place, and has it. All processes of a user, and all calls from a host, are one caller."""
        of_caller = self._callers.get(caller.origin)
        if of_caller is None:
            of_caller = self._callers[caller.origin] = asyncio.Semaphore(self._of_caller)
        of_tenant = self._tenants.setdefault(caller.tenant, asyncio.Semaphore(self._of_tenant))
        async with of_caller, of_tenant:
            yield
