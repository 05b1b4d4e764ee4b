"""Calls that are refused since a limit is reached are told so at a bounded rate, where there are several tenants.

Who is refused and asks again at once would have a large part of the event loop: refusing a call costs half as much as
serving one. So refusals of one tenant, beyond a few, wait. So do those of all callers who are not known, together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar

from prefixd.tenants import Tenant, Tenants
from prefixd_scheduler import SharedLimit

PER_S = 20
WAITING = 1024
"""Calls whose refusals wait, of all tenants (`SharedLimit`); more are told at once, and kept nowhere."""
_AT_ONCE = 50


class Refusals:
    """When tenants are told that they are refused.

    Args:
        tenants: all of them.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._paces: dict[Tenant | None, _Pace] = {}
        self._waiting = SharedLimit(WAITING, lambda: tenants.calling + 1)

    async def turn(self, tenant: Tenant | None) -> bool:
        """Waits until a tenant may be told; None: somebody who is not known. False where so many wait that it is told
        out of turn: then nothing is kept of it, and nothing written."""
        if tenant is not None and self._tenants.calling == 1:
            return True
        if not self._waiting.left(tenant):
            return False
        pace = self._paces.setdefault(tenant, _Pace())
        self._waiting.add(tenant, 1)
        try:
            await pace.turn()
        finally:
            self._waiting.add(tenant, -1)
        return True


class _Pace:
    """`_AT_ONCE`, and then `PER_S`, one after the other; who goes away takes nobody's turn."""

    def __init__(self) -> None:
        self._line = asyncio.Lock()
        self._next_s = 0.0

    async def turn(self) -> None:
        loop = asyncio.get_running_loop()
        async with self._line:
            next_s = max(self._next_s, loop.time() - _AT_ONCE / PER_S) + 1 / PER_S
            if next_s > loop.time():
                await asyncio.sleep(next_s - loop.time())
            self._next_s = next_s


_turn: ContextVar[Callable[[], Awaitable[bool]]] = ContextVar("refusal_turn")


def set_refusal_turn(turn: Callable[[], Awaitable[bool]]) -> None:
    """From here on `refusal_turn` in the call that is being handled awaits this."""
    _turn.set(turn)


async def refusal_turn() -> None:
    """Waits until the caller may be told that a limit is reached; returns at once outside of a call."""
    if (turn := _turn.get(None)) is not None:
        await turn()
