"""One piece of work of each tenant at a time, in front of something that takes work first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Hashable
from contextlib import asynccontextmanager


class TenantTurns:
    """Lets one of each tenant in; its others wait here. So nobody waits behind more than one of another tenant."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}  # of tenants of which one is in

    @asynccontextmanager
    async def turn(self, tenant: Hashable) -> AsyncGenerator[None]:
        """Waits until none of the tenant is in. Raises CancelledError when it is closed meanwhile, too."""
        if (line := self._waiting.get(tenant)) is None:
            self._waiting[tenant] = deque()
        else:
            waits = asyncio.get_running_loop().create_future()
            line.append(waits)
            try:
                await waits
            except asyncio.CancelledError:
                if not waits.cancelled():  # its turn has just come
                    self._next(tenant)
                raise
        try:
            yield
        finally:
            self._next(tenant)

    def close(self) -> None:
        """Nobody who waits is let in any more."""
        for line in self._waiting.values():
            for waits in line:
                waits.cancel()

    def _next(self, tenant: Hashable) -> None:
        line = self._waiting[tenant]
        while line:
            if not (waits := line.popleft()).done():
                waits.set_result(None)
                return
        del self._waiting[tenant]
