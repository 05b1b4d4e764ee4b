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
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import grpc

from prefixd.errors import ExhaustedError
from prefixd.server.audit import AuditLog
from prefixd.server.call_turns import CallTurns
from prefixd.server.caller import Caller, set_caller
from prefixd.server.identities import Identities, UnknownCallerError
from prefixd.server.receiving import RECEIVE_S, STRANGER_S, Receiving, set_door
from prefixd.server.refusals import Refusals, set_refusal_turn
from prefixd.server.rpc import Context
from prefixd.tenants import Role, Tenant, Tenants

log = logging.getLogger(__name__)

_OPEN_SERVICES = ("/grpc.health.v1.Health/",)
_ADMIN_SERVICES = ("/prefixd.v1.Admin/",)
_UNCOUNTED = ("/prefixd.v1.PrefixCache/OpenSession", "/prefixd.v1.Inference/Generate")
"""They last, and have limits of their own: sessions, and requests that wait."""
CALLS = 1024
"""Calls that are under way at once at the TCP door, beside those that last. From half of it on, no tenant gets more
than its part of that half: nobody takes the last ones from others."""

_METHOD = 100  # characters of a method's name that are written down


class CallLimits:
    """Calls of each tenant that are under way, at all doors.

    Args:
        tenants: all of them.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._calls: Counter[Tenant] = Counter()
        self._all = 0
        self.refusals = Refusals(tenants)
        self._receiving = Receiving(tenants)
        self._turns = CallTurns()

    def calls(self, tenant: Tenant) -> int:
        """Calls of a tenant that are under way and counted."""
        return self._calls[tenant]

    def begin(self, caller: Caller, call: asyncio.Task[Any]) -> None:
        """Counts a call until its task is done. Raises ExhaustedError if the tenant has as many as it may; operators
        may always call."""
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
        """Waits until a call of the tenant may begin."""
        if self._tenants.calling > 1:
            await self._turns.begin(tenant, call)

    @asynccontextmanager
    async def message(self, caller: Caller) -> AsyncGenerator[float]:
        """Around the receiving of a call's message: waits until that, and the call, may begin. Gives the seconds that
        it may take. Raises ExhaustedError."""
        call = asyncio.current_task()
        assert call is not None
        async with self._receiving.turn(caller):
            await self.turn(caller.tenant, call)
            yield RECEIVE_S

    @asynccontextmanager
    async def stranger(self) -> AsyncGenerator[float]:
        """As `message`, of a caller who may be anybody."""
        with self._receiving.stranger():
            yield STRANGER_S


class AccessCheck(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
    """Lets a call through to the handler if its caller is known and has the role that the service needs.

    Health is open to everyone; Admin needs the role admin; everything else the role client or admin.

    Args:
        identities: who is who.
        limits: of all doors together.
        audit: is told who is let in and refused.
        door: `unix` or `tcp`.
        certificates: whether clients may show certificates: whoever shows no token is then known to the handler only,
            see `check_certificate`.
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
        if method.startswith(_OPEN_SERVICES):
            set_door(self._limits.stranger)
            set_refusal_turn(partial(self._limits.refusals.turn, None))
            return await continuation(handler_call_details)
        given = [_text(value) for name, value in handler_call_details.invocation_metadata if name == "authorization"]
        try:
            if len(given) > 1:
                raise UnknownCallerError("the token is not known here: several were sent")
            if self._door == "unix":
                caller = self._identities.of_local(given[0] if given else "")
            elif given:
                caller = self._identities.of_token(given[0])
            elif self._certificates:
                _by_certificate.set((self, method))
                return await continuation(handler_call_details)
            else:
                caller = self._identities.of_certificate(())
        except UnknownCallerError as error:
            return _refuse(*await self._unknown(method, error))
        refusal = await self._admit(method, caller)
        return await continuation(handler_call_details) if refusal is None else _refuse(*refusal)

    async def check_certificate(self, context: Context, method: str) -> None:
        """As `intercept_service`, inside the handler, where the peer's certificate is known; ends the call if
        refused."""
        presented: Mapping[str, list[bytes]] = context.auth_context()
        fields = ("x509_common_name", "x509_subject_alternative_name")
        names = [_text(value) for field in fields for value in presented.get(field, ())]
        try:
            caller = self._identities.of_certificate(names)
        except UnknownCallerError as error:
            await context.abort(*await self._unknown(method, error))
        refusal = await self._admit(method, caller)
        if refusal is not None:
            await context.abort(*refusal)

    async def _admit(self, method: str, caller: Caller) -> tuple[grpc.StatusCode, str] | None:
        """Makes this the call's caller, in turn; or why not."""
        needed = Role.ADMIN if method.startswith(_ADMIN_SERVICES) else Role.CLIENT
        if caller.role is not Role.ADMIN and caller.role is not needed:
            await self._refused(caller, method, f"the role {needed} is needed")
            service = "Admin" if needed is Role.ADMIN else "this service"
            return grpc.StatusCode.PERMISSION_DENIED, (
                f"{service} needs the role {needed}, and {caller.name} has the role {caller.role}; use a token or a "
                "certificate with that role, or be the daemon's user or one of server.admin_uids at its unix socket"
            )
        call = asyncio.current_task()
        assert call is not None
        if method not in _UNCOUNTED:
            try:
                self._limits.begin(caller, call)
            except ExhaustedError as error:
                await self._refused(caller, method, str(error))
                return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        set_caller(caller)
        set_refusal_turn(partial(self._limits.refusals.turn, caller.tenant))
        self._audit.let_in(caller)
        set_door(partial(self._limits.message, caller))
        return None

    async def _refused(self, caller: Caller | None, method: str, why: str) -> None:
        """Waits until a caller may be told, and writes that down."""
        if await self._limits.refusals.turn(None if caller is None else caller.tenant):
            self._audit.refused(caller, method[:_METHOD], why, door="" if caller else self._door)
            if caller is None:
                log.info("refused %s: %s", method[:_METHOD], why)

    async def _unknown(self, method: str, error: UnknownCallerError) -> tuple[grpc.StatusCode, str]:
        await self._refused(None, method, str(error))
        remedy = (
            "; send `authorization: Bearer TOKEN`, with a token from the daemon's server.tokens "
            "(the prefixd command: --token-file, PREFIXD_TOKEN)"
        )
        return grpc.StatusCode.UNAUTHENTICATED, f"{error}{remedy if self._door == 'tcp' else ''}"


_by_certificate: ContextVar[tuple[AccessCheck, str]] = ContextVar("by_certificate")


async def check_certificate(context: Context) -> None:
    """Inside a handler: knows the caller by its certificate, where it has shown nothing else."""
    pending = _by_certificate.get(None)
    if pending is not None:
        check, method = pending
        await check.check_certificate(context, method)


def _refuse(code: grpc.StatusCode, message: str) -> grpc.RpcMethodHandler[Any, Any]:
    # Whatever the method's kind: nothing is read before the call is over.
    async def refuse(_requests: object, context: Context) -> NoReturn:
        await context.abort(code, message)
        raise AssertionError("abort does not return")

    return grpc.stream_stream_rpc_method_handler(refuse)  # type: ignore[arg-type, unused-ignore]


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")
