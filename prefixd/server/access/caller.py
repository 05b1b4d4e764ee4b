"""The call that is being handled and its caller: the door sets them, the services read them."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from prefixd.base.tenants import Role, Tenant


@dataclass(frozen=True, slots=True)
class Caller:
    """One caller.

    Attributes:
        tenant: the tenant that it belongs to.
        role: the services that it may use.
        name: a name for logs: `uid 1001`, or the name of a token or certificate.
        door: `unix` or `tcp`.
        pid: process id of a local caller that sent a credential, else 0.
        host: address of a caller that sent no token or certificate to an open TCP port, else empty.
    """

    tenant: Tenant
    role: Role
    name: str
    door: str
    pid: int = 0
    host: str = ""

    @property
    def origin(self) -> tuple[Tenant, str, str, str]:
        """Identifies the user, token or certificate; or the host, if the caller sent none of them."""
        return self.tenant, self.door, self.name, self.host


class Line(Protocol):
    """A line in which messages that have arrived wait until gRPC may put them together."""

    async def turn(self) -> None:
        """Waits until the next message may be put together."""
        ...


class Call:
    """One call, from its arrival on.

    Attributes:
        caller: the caller; None for an anonymous caller, which may only ask for the daemon's health.
        receive_s: seconds that its first message may take to arrive.
        message_bytes: bytes of the last message that has arrived; 0 before the first message and between two.
    """

    receive_s = 60.0

    def __init__(self, caller: Caller | None) -> None:
        self.caller = caller
        self.message_bytes = 0
        self._came_s = asyncio.get_running_loop().time()

    @property
    def waited_s(self) -> float:
        """Seconds since the call arrived: it received its message meanwhile, perhaps behind other messages."""
        return asyncio.get_running_loop().time() - self._came_s

    def first(self) -> AbstractAsyncContextManager[Line | None]:
        """Wraps the receiving of the first message; yields the line in which the message waits after its arrival."""
        raise NotImplementedError

    def later(self) -> AbstractAsyncContextManager[Line | None]:
        """Wraps the receiving of a later message; yields its line likewise."""
        raise NotImplementedError

    def stream(self) -> AbstractAsyncContextManager[None]:
        """Wraps the whole of a call that sends many messages."""
        raise NotImplementedError

    async def refusal_turn(self) -> None:
        """Waits until the caller may be told that it has reached a limit."""


CURRENT_CALL: ContextVar[Call] = ContextVar("call")
"""The call that is being handled; the door sets it."""


def current_call() -> Call:
    """Returns the call that is being handled. Raises LookupError outside of a call."""
    return CURRENT_CALL.get()


def current_caller() -> Caller:
    """Returns the caller of the call that is being handled. Raises LookupError outside of a call."""
    caller = CURRENT_CALL.get().caller
    if caller is None:
        raise LookupError("the caller is anonymous")
    return caller
