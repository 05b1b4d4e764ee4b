"""The check at the door: who calls, and whether the role is enough, before anything of the call is read.

Sets the caller for the handler (`current_caller`), and bounds what one tenant's calls can make the daemon keep: how
many are under way, and how many of their messages are on their way (`receiving`). Where there are several tenants,
their calls begin in turn (`CallTurns`), and those that are refused are told so at a bounded rate (`refusals`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import grpc

from prefixd.base.errors import ExhaustedError
from prefixd.base.fairness import CallTurns
from prefixd.base.tenants import Role, Tenant, Tenants
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.caller import Caller, set_caller
from prefixd.server.access.identities import Identities, UnknownCallerError
from prefixd.server.access.refusals import CallPool, Refusals, set_refusal_turn
from prefixd.server.access.strangers import Strangers, StrangersDoor
from prefixd.server.rpc.receiving import RECEIVE_S, Line, Receiving, set_door
from prefixd.server.rpc.rpc import Context, abort

log = logging.getLogger(__name__)

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_ADMIN_SERVICES = ("/prefixd.v1.Admin/",)
_SESSION = "/prefixd.v1.PrefixCache/OpenSession"
"""It lasts, and has a limit of its own: sessions."""
_GENERATE = "/prefixd.v1.Inference/Generate"
_GET = "/prefixd.v1.PrefixCache/Get"
CALLS = 1024
"""Calls that are under way at once at the TCP door, beside those that last. From half of it on, no tenant gets more
than its part of that half: nobody takes the last ones from others."""
HEALTH_CALLS = 512
"""Calls that ask for the daemon's health, of all tenants (`SharedLimit`)."""
_WATCH = "/prefixd.v1.PrefixCache/WatchBlocks"
WATCHES = 64
"""Calls of WatchBlocks, of all tenants (`SharedLimit`). They last, and each looks at every change in the cache."""
GETS = 256
"""Calls of Get, of all tenants (`SharedLimit`). A piece of each waits in memory, some 4 MiB with its copies, also of
one that is given up since nobody reads it."""

_METHOD = 100  # characters of a method's name that are written down


class CallLimits:
    """Calls of each tenant that are under way, at all doors.

    Args:
        tenants: all of them.
        generations: calls of Generate at once, of all tenants (`SharedLimit`).
    """

    def __init__(self, tenants: Tenants, generations: int) -> None:
        self._tenants = tenants
        self._generations = CallPool("generations", "calls of Generate", generations, tenants)
        self._health = CallPool("health_calls", "calls to the health service", HEALTH_CALLS, tenants)
        self._watches = CallPool("watches", "calls of WatchBlocks", WATCHES, tenants)
        self._gets = CallPool("gets", "calls of Get", GETS, tenants)
        self._calls: Counter[Tenant] = Counter()
        self._all = 0
        self.refusals = Refusals(tenants)
        self.receiving = Receiving(tenants)
        self.strangers = Strangers()
        self._turns = CallTurns()

    def calls(self, tenant: Tenant) -> int:
        """Calls of a tenant that are under way and counted."""
        return self._calls[tenant]

    def begin(self, method: str, caller: Caller, call: asyncio.Task[Any]) -> None:
        """Counts a call until its task is done. Raises ExhaustedError if the tenant has as many as it may; operators
        may always call."""
        if method == _GENERATE:
            self._generations.begin(caller, call)
        elif method.startswith(_OPEN_SERVICES):
            self._health.begin(caller, call)
        elif method == _WATCH:
            self._watches.begin(caller, call)
        elif method != _SESSION:
            self._begin(caller, call)
            if method == _GET:
                self._gets.begin(caller, call)

    def _begin(self, caller: Caller, call: asyncio.Task[Any]) -> None:
        tenant, tenants = caller.tenant, self._tenants.calling
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
        if self._tenants.calling > 1:
            await self._turns.begin(tenant, call)

    def pause(self, call: asyncio.Task[Any]) -> None:
        """A call waits for its caller now."""
        self._turns.pause(call)


class _CallersDoor:
    """The `Door` of one call of a caller who is known."""

    within_s = RECEIVE_S

    def __init__(self, limits: CallLimits, caller: Caller, call: asyncio.Task[Any]) -> None:
        self._limits = limits
        self._caller = caller
        self._call = call

    @asynccontextmanager
    async def first(self) -> AsyncGenerator[Line | None]:
        """See `Door`: waits until the message may be received, and the call begin. Raises ExhaustedError."""
        async with self._limits.receiving.first(self._caller) as line:
            await self._limits.turn(self._caller.tenant, self._call)
            yield line

    @asynccontextmanager
    async def later(self) -> AsyncGenerator[Line | None]:
        """See `Door`: each message has a turn as a call has one, or who sends many would have the event loop."""
        self._limits.pause(self._call)
        async with self._limits.receiving.later(self._caller) as line:
            yield line
        await self._limits.turn(self._caller.tenant, self._call)

    def stream(self) -> AbstractAsyncContextManager[None]:
        """See `Door`."""
        return self._limits.receiving.stream(self._caller)


class AccessCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Lets a call through to the handler if its caller is known and has the role that the service needs.

    Health is open to everyone, also to those who are not known (`Strangers`); Admin needs the role admin; everything
    else the role client or admin.

    Args:
        identities: who is who.
        limits: of all doors together.
        audit: is told who is let in and refused.
        door: `unix` or `tcp`.
        certificates: whether clients may show certificates.

    Who shows no token at the TCP port is looked at inside the handler, where the peer is known: see `check_peer`.
    """

    def __init__(
        self, identities: Identities, limits: CallLimits, audit: AuditLog, door: str, *, certificates: bool = False
    ) -> None:
        self._identities = identities
        self._limits = limits
        self._audit = audit
        self._door = door
        self._certificates = certificates

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of the call, or one that refuses it."""
        method = _text(handler_call_details.method)
        given = [_text(value) for name, value in handler_call_details.invocation_metadata if name == "authorization"]
        try:
            if len(given) > 1:
                raise UnknownCallerError("the token is not known here: several were sent")
            if self._door == "unix":
                caller = self._identities.of_local(given[0] if given else "")
            elif given:
                caller = self._identities.of_token(given[0])
            else:
                if not self._certificates:
                    self._identities.of_certificate(())  # raises unless everybody is let in
                _by_peer.set(partial(self._check_certificate, method))
                return await continuation(handler_call_details)
        except UnknownCallerError as error:
            if method.startswith(_OPEN_SERVICES):
                _by_peer.set(self._let_stranger_in)
                return await continuation(handler_call_details)
            return _refusing(partial(self._unknown, method, str(error)))
        refusal = await self._admit(method, caller)
        if refusal is None:
            return await continuation(handler_call_details)
        code, why = refusal
        return _refusing(lambda context: context.abort(code, why))

    async def _check_certificate(self, method: str, context: Context) -> None:
        """As `intercept_service`, inside the handler, by the peer's certificate and host; ends the call if refused."""
        presented: Mapping[str, list[bytes]] = context.auth_context()
        fields = ("x509_common_name", "x509_subject_alternative_name")
        names = [_text(value) for field in fields for value in presented.get(field, ())]
        try:
            caller = self._identities.of_certificate(names, _host(context))
        except UnknownCallerError as error:
            if method.startswith(_OPEN_SERVICES):
                await self._let_stranger_in(context)
                return
            await self._unknown(method, str(error), context)
        refusal = await self._admit(method, caller)
        if refusal is not None:
            await context.abort(*refusal)

    async def _let_stranger_in(self, context: Context) -> None:
        set_refusal_turn(partial(self._limits.refusals.turn, None))
        host, call = _host(context), asyncio.current_task()
        assert call is not None
        try:
            self._limits.strangers.begin(host, call)
        except ExhaustedError as error:
            await abort(context, error)
        set_door(StrangersDoor(self._limits.strangers, host))

    async def _admit(self, method: str, caller: Caller) -> tuple[grpc.StatusCode, str] | None:
        """Makes this the call's caller, in turn; or why not."""
        needed = Role.ADMIN if method.startswith(_ADMIN_SERVICES) else Role.CLIENT
        open_to_all = method.startswith(_OPEN_SERVICES)
        if caller.role is not Role.ADMIN and caller.role is not needed and not open_to_all:
            await self._refused(caller, method, f"the role {needed} is needed")
            service = "Admin" if needed is Role.ADMIN else "this service"
            return grpc.StatusCode.PERMISSION_DENIED, (
                f"{service} needs the role {needed}, and {caller.name} has the role {caller.role}; use a token or a "
                "certificate with that role, or be the daemon's user or one of server.admin_uids at its unix socket"
            )
        call = asyncio.current_task()
        assert call is not None
        try:
            self._limits.begin(method, caller, call)
        except ExhaustedError as error:
            await self._refused(caller, method, str(error))
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        set_caller(caller)
        set_refusal_turn(partial(self._limits.refusals.turn, caller.tenant))
        self._audit.let_in(caller)
        set_door(_CallersDoor(self._limits, caller, call))
        return None

    async def _refused(self, caller: Caller, method: str, why: str) -> None:
        """Waits until a caller may be told, and writes that down."""
        if await self._limits.refusals.turn(caller.tenant):
            self._audit.refused(caller, method[:_METHOD], why)

    async def _unknown(self, method: str, why: str, context: Context) -> NoReturn:
        """Inside a handler: ends the call of somebody who is not known, and writes down from where it came."""
        if await self._limits.refusals.turn(None):
            peer = context.peer() if self._door == "tcp" else ""
            self._audit.refused(None, method[:_METHOD], why, door=self._door, peer=peer)
            log.info("refused %s%s: %s", method[:_METHOD], f" from {peer}" if peer else "", why)
        remedy = (
            "; send `authorization: Bearer TOKEN`, with a token from the daemon's server.tokens "
            "(the prefixd command: --token-file, PREFIXD_TOKEN)"
        )
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{why}{remedy if self._door == 'tcp' else ''}")
        raise AssertionError("abort does not return")


_by_peer: ContextVar[Callable[[Context], Awaitable[None]]] = ContextVar("by_peer")


async def check_peer(context: Context) -> None:
    """Inside a handler: knows the caller by the peer, where it has shown nothing else."""
    check = _by_peer.get(None)
    if check is not None:
        await check(context)


def _host(context: Context) -> str:
    """From where a call comes: `ipv4:127.0.0.1`, or `unix:` and a path."""
    peer: str = context.peer()
    return peer if peer.startswith("unix:") else peer.rpartition(":")[0]


def _refusing(refusal: Callable[[Context], Awaitable[None]]) -> grpc.RpcMethodHandler[Any, Any]:
    # Whatever the method's kind: nothing is read before the call is over.
    async def refuse(_requests: object, context: Context) -> NoReturn:
        await refusal(context)
        raise AssertionError("abort does not return")

    return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type, unused-ignore]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")
