"""What can go wrong for a client. One class per thing a caller can do about it."""

from __future__ import annotations

import re

import grpc


class ClientError(Exception):
    """Base of every error this package raises on purpose; carries the daemon's message where there is one."""


class InvalidArgumentError(ClientError, ValueError):
    """The call is wrong whatever the daemon's state; repeating it cannot help."""


class BufferSizeError(InvalidArgumentError):
    """A buffer does not have the bytes that the blocks need; the message names both sizes."""


class NotFoundError(ClientError):
    """The daemon knows no such namespace, prefix or request."""


class SessionUnknown(NotFoundError):
    """The daemon does not know the session, for it was restarted: what was asked can be asked again in a new one."""


class AlreadyExistsError(ClientError):
    """The name is taken: by a running request with the same id, or by chance by another namespace."""


class ExhaustedError(ClientError):
    """No room, and nothing may be evicted; or a queue or session limit is reached. Try again later."""


class PreconditionError(ClientError):
    """What was asked cannot be done in the daemon's present state."""


class UnsupportedError(ClientError):
    """The daemon was not configured for this part of the service."""


class PermissionDeniedError(ClientError):
    """The daemon refuses this caller: its role, or a namespace that it has not registered."""


class Unauthenticated(PermissionDeniedError):
    """The daemon does not know this caller: a missing or unknown token, or a ticket that it has not given."""


class NamespaceClosed(PermissionDeniedError):
    """The daemon has closed the namespace, which was not used for long, to make room: register it again."""


class ServerUnavailable(ClientError):
    """The daemon is not running, died during the call, or drains. The next call tries again.

    Attributes:
        answered: the daemon itself said so, and the message is its answer.
    """

    answered = False


class CallTimeout(ClientError, TimeoutError):
    """The daemon did not answer within the call's time, or gave up a stream whose client was too slow."""


class ServerError(ClientError):
    """The daemon failed or broke the contract; its log says more."""


class LeaseLost(ClientError):
    """A lease or reservation ended before its holder was done: it expired, or its session ended.

    Bytes read since then are not to be trusted; bytes written since then are kept by nobody.
    """


class MemoryUnavailable(ClientError):
    """The daemon's arena cannot be mapped here though `memory="shared"` asks for it."""


class SocketUntrusted(ClientError):
    """The default socket lies where another user could have put it; nothing was sent there."""


class ClientClosed(ClientError):
    """The client was closed before or during the call."""


class ForkedProcess(ClientClosed):
    """The client, or gRPC, was in use when this process was forked, and works in the parent alone: use "spawn"."""


_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ExhaustedError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionError,
    grpc.StatusCode.UNIMPLEMENTED: UnsupportedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.UNAVAILABLE: ServerUnavailable,
    # A daemon that shuts down cancels what still runs; a call that we cancel never gets here.
    grpc.StatusCode.CANCELLED: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: CallTimeout,
}


# gRPC names the socket three times before it says what is wrong with it.
_NO_SOCKET = re.compile(r"failed to connect to all addresses; .* addr: unix:.* error: (?P<reason>.+)", re.DOTALL)
_SESSION_ENDED = ("prefixd-session", "ended")
_NAMESPACE_CLOSED = ("prefixd-namespace", "closed")
_ANSWERED = ("prefixd-answered", "yes")


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> ClientError:
    """The client error for a failed call to `address`."""
    kind = _BY_STATUS.get(error.code(), ServerError)
    detail = error.details() or f"the daemon gave {error.code().name} and no reason"
    trailers = tuple(error.trailing_metadata() or ())
    if kind is CallTimeout and _ANSWERED in trailers:
        return CallTimeout(detail)
    if kind is CallTimeout:
        return CallTimeout(
            f"no answer from the daemon at {address} in time ({detail}); what was asked for may still be done; "
            "give the client a larger timeout_s"
        )
    if detail == grpc.StatusCode.CANCELLED.name:  # all that gRPC says when a server ends
        detail = "it is ending; try again when it is back"
    if kind is ServerUnavailable and _ANSWERED in trailers:
        refused = ServerUnavailable(f"the daemon at {address} answers: {detail}")
        refused.answered = True
        return refused
    if kind is ServerUnavailable:
        if no_socket := _NO_SOCKET.fullmatch(detail):
            detail = no_socket["reason"]
        return ServerUnavailable(f"no answer from the daemon at {address}: {detail}")
    if kind is NotFoundError and _SESSION_ENDED in trailers:
        return SessionUnknown(detail)
    if kind is PermissionDeniedError and _NAMESPACE_CLOSED in trailers:
        return NamespaceClosed(detail)
    return kind(detail)
