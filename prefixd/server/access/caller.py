"""Who makes the call that is being handled, and what goes with that call: set by the door, read by the services."""

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
        tenant: to whom it belongs.
        role: what it may use.
        name: for logs: `uid 1001`, a token's or a certificate's name.
        door: `unix` or `tcp`.
        pid: of a process of this host that proved who it is, else 0.
        host: from where an anonymous caller calls, else empty.
    """

    tenant: Tenant
    role: Role
    name: str
    door: str
    pid: int = 0
    host: str = ""

    @property
    def origin(self) -> tuple[Tenant, str, str, str]:
        """The same for all calls of one user, token, certificate or, where nothing is shown, host."""
        return self.tenant, self.door, self.name, self.host


class Line(Protocol):
    """Where a message that has arrived waits before it is put together."""

    async def turn(self) -> None:
        """Waits until the next message may be put together."""
        ...


class Call:
    """One call, from the moment at which it came.

    Attributes:
        caller: who makes it; None for an anonymous caller, who may ask for the daemon's health.
        receive_s: seconds that its first message may take.
        message_bytes: bytes of the last message that has arrived; 0 before the first, and between two.
    """

    receive_s = 60.0

    def __init__(self, caller: Caller | None) -> None:
        self.caller = caller
        self.message_bytes = 0
        self._came_s = asyncio.get_running_loop().time()

    @property
    def waited_s(self) -> float:
        """Seconds since it came: its message was received, perhaps in line behind others."""
        return asyncio.get_running_loop().time() - self._came_s

    def first(self) -> AbstractAsyncContextManager[Line | None]:
        """Around the receiving of its first message; gives where that waits once it has arrived."""
        raise NotImplementedError

    def later(self) -> AbstractAsyncContextManager[Line | None]:
        """Around the receiving of another message."""
        raise NotImplementedError

    def stream(self) -> AbstractAsyncContextManager[None]:
        """Around a call that sends many messages."""
        raise NotImplementedError

    async def refusal_turn(self) -> None:
        """Waits until the caller may be told that a limit is reached."""


CURRENT_CALL: ContextVar[Call] = ContextVar("call")
"""The call that is being handled, from the door on."""


def current_call() -> Call:
    """The call that is being handled. Raises LookupError outside of one."""
    return CURRENT_CALL.get()


def current_caller() -> Caller:
    """Who makes the call that is being handled. Raises LookupError outside of one."""
    caller = CURRENT_CALL.get().caller
    if caller is None:
        raise LookupError("the caller is anonymous")
    return caller
