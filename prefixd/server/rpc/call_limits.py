"""Limits the calls that each tenant has under way, and the rate at which callers are told of a refusal.

Refusing a call costs half as much as serving one, so a client that repeats a refused call at once would take a large
part of the event loop. Refusals of one tenant, beyond a few, therefore wait; those of all anonymous callers count as
one tenant's.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy.fairness import CallTurns, PacedLine
from prefixd.base.tenancy.tenants import Role, Tenant, Tenants
from prefixd.server.access.identities import Caller
from prefixd.server.rpc.anonymous import AnonymousCalls
from prefixd.server.rpc.receiving import Call, Receiving, Turns
from prefixd_scheduler import SharedLimit

OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_SESSION = "/prefixd.v1.PrefixCache/OpenSession"
"""Lasts as long as its session, and counts against the limit on sessions instead."""
_GENERATE = "/prefixd.v1.Inference/Generate"
_GET = "/prefixd.v1.PrefixCache/Get"
CALLS = 1024
"""Calls under way at once at the TCP door, besides those that last. Once half of them are taken, no tenant gets more
than its share of that half, so one tenant cannot take the last ones from others."""
HEALTH_CALLS = 512
"""Calls that ask for the daemon's health, of all tenants (`SharedLimit`)."""
_WATCH = "/prefixd.v1.PrefixCache/WatchBlocks"
WATCHES = 64
"""Calls of WatchBlocks, of all tenants (`SharedLimit`). Each lasts, and examines every change in the cache."""
GETS = 256
"""Calls of Get, of all tenants (`SharedLimit`). Each keeps a piece in memory, about 4 MiB with its copies, also after
its caller has stopped reading."""

PER_S = 20
WAITING = 1024
"""Refusals that wait, of all tenants (`SharedLimit`); beyond that a caller is told at once, and nothing is kept."""
_AT_ONCE = 50


class Refusals:
    """Paces the refusals of each tenant.

    Args:
        tenants: all of them.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._paces: dict[Tenant | None, PacedLine] = {}
        self._waiting = SharedLimit(WAITING, lambda: tenants.calling + 1)

    async def turn(self, tenant: Tenant | None) -> bool:
        """Waits until a tenant may be told (None: an anonymous caller). Returns False when too many refusals wait: the
        caller is then told out of turn, and the audit log does not mention it."""
        if tenant is not None and self._tenants.calling == 1:
            return True
        if not self._waiting.left(tenant):
            return False
        pace = self._paces.setdefault(tenant, PacedLine(_AT_ONCE / PER_S))
        self._waiting.add(tenant, 1)
        try:
            await pace.turn(1 / PER_S)
        finally:
            self._waiting.add(tenant, -1)
        return True


class CallLimits:
    """Counts the calls of each tenant that are under way, at all doors.

    Args:
        tenants: all of them.
        generations: calls of Generate at once, of all tenants (`SharedLimit`).
    """

    def __init__(self, tenants: Tenants, generations: int) -> None:
        self.tenants = tenants
        self._generations = CallPool("generations", "calls of Generate", generations, tenants)
        self._health = CallPool("health_calls", "calls to the health service", HEALTH_CALLS, tenants)
        self._watches = CallPool("watches", "calls of WatchBlocks", WATCHES, tenants)
        self._gets = CallPool("gets", "calls of Get", GETS, tenants)
        self._calls: Counter[Tenant] = Counter()
        self._all = 0
        self.refusals = Refusals(tenants)
        self.receiving = Receiving(tenants)
        self.anonymous = AnonymousCalls()
        self._turns = CallTurns()

    def calls(self, tenant: Tenant) -> int:
        """Calls of a tenant that are under way and counted."""
        return self._calls[tenant]

    def begin(self, method: str, caller: Caller, call: asyncio.Task[Any]) -> CallersCall:
        """Counts a call until its task is done. Operators may always call.

        Raises:
            ExhaustedError: the tenant has as many calls under way as it may.
        """
        if method == _GENERATE:
            self._generations.begin(caller, call)
        elif method.startswith(OPEN_SERVICES):
            self._health.begin(caller, call)
        elif method == _WATCH:
            self._watches.begin(caller, call)
        elif method != _SESSION:
            self._begin(caller, call)
            if method == _GET:
                self._gets.begin(caller, call)
        return CallersCall(self, caller, call)

    def _begin(self, caller: Caller, call: asyncio.Task[Any]) -> None:
        tenant, tenants = caller.tenant, self.tenants.calling
        have = self._calls[tenant]
        if caller.role is not Role.ADMIN:
            self._check(tenant, have, max(1, CALLS // 2 // tenants), tenants)
        self._calls[tenant] += 1
        self._all += 1
        call.add_done_callback(lambda _: self._end(tenant))

    def _check(self, tenant: Tenant, have: int, share: int, tenants: int) -> None:
        tenant.check("calls", have, "calls are under way", "wait for some to end")
        if tenants > 1 and self._all >= CALLS // 2 and have >= share:
            tenant.refused["calls"] += 1
            raise ExhaustedError(
                f"tenant {tenant.name}: {have} calls are under way, and {self._all} of all tenants; from "
                f"{CALLS // 2} on each may have {share} (the daemon's own limit); wait for some to end"
            )

    def _end(self, tenant: Tenant) -> None:
        self._calls[tenant] -= 1
        self._all -= 1

    async def turn(self, tenant: Tenant, call: asyncio.Task[Any]) -> None:
        """Waits until a call of the tenant may begin, or go on after `pause`."""
        if self.tenants.calling > 1:
            await self._turns.begin(tenant, call)

    def pause(self, call: asyncio.Task[Any]) -> None:
        """Lets the next call begin: this one waits for its caller."""
        self._turns.pause(call)


class CallersCall(Call):
    """One call of a known caller.

    Args:
        limits: of all calls.
        caller: the caller of the call.
        task: runs it.
    """

    def __init__(self, limits: CallLimits, caller: Caller, task: asyncio.Task[Any]) -> None:
        super().__init__(caller)
        self._limits = limits
        self._known = caller
        # The task's context holds this call. A strong reference back would leave every call, with all that it refers
        # to, to the garbage collector, which then holds the event loop for milliseconds.
        self._task = weakref.ref(task)

    def first(self) -> AbstractAsyncContextManager[Turns | None]:
        """Waits until the message may be received and the call may begin. Raises ExhaustedError."""
        if self._known.role is Role.ADMIN and self._limits.tenants.calling == 1:
            return nullcontext()
        return self._first()

    @asynccontextmanager
    async def _first(self) -> AsyncGenerator[Turns | None]:
        async with self._limits.receiving.first(self._known, self) as line:
            await self._turn()
            yield line

    @asynccontextmanager
    async def later(self) -> AsyncGenerator[Turns | None]:
        """Waits for a turn for each message, as for a call: a long stream would otherwise keep the event loop."""
        if (task := self._task()) is not None:
            self._limits.pause(task)
        async with self._limits.receiving.later(self._known, self) as line:
            yield line
        await self._turn()

    async def _turn(self) -> None:
        if (task := self._task()) is not None:
            await self._limits.turn(self._known.tenant, task)

    def stream(self) -> AbstractAsyncContextManager[None]:
        """Waits for a slot among the calls that send many messages."""
        return self._limits.receiving.stream(self._known)

    async def refusal_turn(self) -> None:
        await self._limits.refusals.turn(self._known.tenant)


class CallPool:
    """Counts calls of one kind against a limit that tenants share (`SharedLimit`).

    An answer waits in gRPC until its caller reads it, even when the work is done and the work's own limits have
    released it. So a call counts until its task ends.

    Args:
        name: the limit's name, under which refusals are counted.
        what: how a refusal names the calls.
        limit: calls of all tenants together.
        tenants: all of them.
    """

    def __init__(self, name: str, what: str, limit: int, tenants: Tenants) -> None:
        self._name = name
        self._what = what
        self._calls = SharedLimit(limit, lambda: tenants.calling)

    def begin(self, caller: Caller, call: asyncio.Task[Any]) -> None:
        """Counts a call until its task is done. Calls of operators do not count.

        Raises:
            ExhaustedError: the tenant has as many as it may.
        """
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
