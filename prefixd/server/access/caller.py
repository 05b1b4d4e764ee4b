"""Who makes the call that is being handled: set by the listener's check, read by the services."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

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
        host: from where somebody calls who has shown nothing, else empty.
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


_current: ContextVar[Caller] = ContextVar("caller")


def current_caller() -> Caller:
    """Who makes the call that is being handled. Raises LookupError outside of a call."""
    return _current.get()


def caller_if_known() -> Caller | None:
    """As `current_caller`; None where a stranger calls, who may ask for the daemon's health."""
    return _current.get(None)


def set_caller(caller: Caller) -> None:
    """From here on the call that is being handled is this caller's."""
    _current.set(caller)
