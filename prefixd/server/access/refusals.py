"""Calls that are refused since a limit is reached are told so at a bounded rate, where there are several tenants.

Who is refused and asks again at once would have a large part of the event loop: refusing a call costs half as much as
serving one. So refusals of one tenant, beyond a few, wait. So do those of all callers who are not known, together.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenants import Role, Tenant, Tenants
from prefixd.server.access.caller import Caller
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


class CallPool:
    """Counts the calls; tenants share how many there may be (`SharedLimit`).

    An answer waits in gRPC for as long as its caller has no room for it, also when the work is done and its limits know
    nothing of it any more. So calls count until their tasks end.

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
