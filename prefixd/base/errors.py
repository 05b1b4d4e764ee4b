"""Errors that reach a caller. Every message names the value and the remedy; `status` is the name of the gRPC code.

PrefixdError
    InvalidArgumentError     the call is wrong, whatever the state of the cache
        PromptTooLongError
        ChatRefusedError
    NotFoundError            there is no such namespace, session, lease, reservation or prefix
        SessionEndedError
    AlreadyExistsError       another object has the name
    PermissionDeniedError    the caller may not have this
        NamespaceClosedError
    ExhaustedError           there is no room, or a limit is reached
    PreconditionError        the call is not possible in the present state
    UnavailableError         the caller should try again later
    TooSlowError             the client sends or reads too slowly
    UnsupportedError         this daemon was not configured for it
    ConfigError              the daemon cannot start with a setting
"""

from __future__ import annotations

from typing import ClassVar


class PrefixdError(Exception):
    """Base of the errors that reach a user."""

    status: ClassVar[str] = "INTERNAL"

    @property
    def without_prompt(self) -> str:
        """The message for records and logs, which have no text of a prompt."""
        return str(self)


class InvalidArgumentError(PrefixdError):
    """The call is wrong in any state of the cache."""

    status = "INVALID_ARGUMENT"


class PromptTooLongError(InvalidArgumentError):
    """The prompt has more tokens than the model takes."""


class ChatRefusedError(InvalidArgumentError):
    """The model's chat template does not take a chat. What the template says may quote the chat.

    Args:
        kind: of the template's error.
        said: by the template, for the caller alone.
    """

    def __init__(self, kind: str, said: str) -> None:
        super().__init__(_CHAT_REFUSED.format(f"{kind}: {said}"))
        self._kind = kind

    @property
    def without_prompt(self) -> str:
        return _CHAT_REFUSED.format(self._kind)


_CHAT_REFUSED = (
    "the model's chat template does not take these messages ({}); change their roles, their order or their content, or "
    "use /v1/completions"
)


class NotFoundError(PrefixdError):
    """There is no such namespace, session, lease, reservation or prefix."""

    status = "NOT_FOUND"


class SessionEndedError(NotFoundError):
    """The session that a call names is not open: the daemon was restarted, or the session's stream has ended."""


class AlreadyExistsError(PrefixdError):
    """Another object has the name already."""

    status = "ALREADY_EXISTS"


class PermissionDeniedError(PrefixdError):
    """This caller may not have what it asks for."""

    status = "PERMISSION_DENIED"


class NamespaceClosedError(PermissionDeniedError):
    """The namespace is not open to the session: it was never registered there, or was closed to make room."""


class ExhaustedError(PrefixdError):
    """There is no room and no block may be evicted, or a limit is reached."""

    status = "RESOURCE_EXHAUSTED"


class PreconditionError(PrefixdError):
    """The call is valid, but not possible in the present state."""

    status = "FAILED_PRECONDITION"


class UnavailableError(PrefixdError):
    """The daemon drains, or the worker is down: the caller should try again later."""

    status = "UNAVAILABLE"


class TooSlowError(PrefixdError):
    """A stream's client sends or reads too slowly for the memory or slots that the stream holds."""

    status = "DEADLINE_EXCEEDED"


class UnsupportedError(PrefixdError):
    """This daemon was not configured for this call."""

    status = "UNIMPLEMENTED"


class ConfigError(PrefixdError):
    """The daemon cannot start with a setting, file or directory."""

    status = "INVALID_ARGUMENT"
