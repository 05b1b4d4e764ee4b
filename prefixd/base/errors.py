"""What a caller can be told. Every message names the value and the remedy; `status` is the gRPC code's name."""

from __future__ import annotations

from typing import ClassVar


class PrefixdError(Exception):
    """Base of the errors that reach a user."""

    status: ClassVar[str] = "INTERNAL"


class InvalidArgumentError(PrefixdError):
    """The call is wrong, whatever the state of the cache."""

    status = "INVALID_ARGUMENT"


class NotFoundError(PrefixdError):
    """No such namespace, session, lease, reservation or prefix."""

    status = "NOT_FOUND"


class SessionEndedError(NotFoundError):
    """The session that a call names is not open: the daemon was restarted, or the session's stream has ended."""


class AlreadyExistsError(PrefixdError):
    """A name that is taken by something else."""

    status = "ALREADY_EXISTS"


class PermissionDeniedError(PrefixdError):
    """This caller may not have what it asks for."""

    status = "PERMISSION_DENIED"


class NamespaceClosedError(PermissionDeniedError):
    """The namespace is not open to the session: it was never registered there, or was closed to make room."""


class ExhaustedError(PrefixdError):
    """No room, and nothing may be evicted or no more may wait."""

    status = "RESOURCE_EXHAUSTED"


class PreconditionError(PrefixdError):
    """Right in itself, but not in the present state."""

    status = "FAILED_PRECONDITION"


class UnavailableError(PrefixdError):
    """Try again later: the daemon drains, or the worker is down."""

    status = "UNAVAILABLE"


class TooSlowError(PrefixdError):
    """A stream's client sends or reads too little for what it holds meanwhile."""

    status = "DEADLINE_EXCEEDED"


class UnsupportedError(PrefixdError):
    """This daemon was not configured for what was asked."""

    status = "UNIMPLEMENTED"


class ConfigError(PrefixdError):
    """A setting, file or directory that the daemon cannot start with."""

    status = "INVALID_ARGUMENT"
