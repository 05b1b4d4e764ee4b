"""The errors of the client: a class for each way in which a caller can react.

ClientError
    InvalidArgumentError         the call is wrong in any state of the daemon
        BufferSizeError
    NotFoundError                no such namespace, prefix or request
        SessionUnknown           internal: the call is repeated in a new session
    AlreadyExistsError           the name is taken
    ExhaustedError               no room, or a limit is reached: try again later
    PreconditionError            not possible in the daemon's present state
    UnsupportedError             the daemon was not configured for it
    PermissionDeniedError        the daemon refuses this caller
        Unauthenticated
        NamespaceClosed          internal: the namespace is registered again
    ServerUnavailable            the daemon is away: the next call tries again
    CallTimeout                  no answer in time
    ServerError                  the daemon failed; see its log
    LeaseLost                    a lease or reservation ended too early
    MemoryUnavailable            the arena cannot be mapped
    SocketUntrusted              the default socket may belong to another user
    ClientClosed
        ForkedProcess
"""

from __future__ import annotations

import re

import grpc


class ClientError(Exception):
    """Base of all errors of this package; has the daemon's message if the daemon sent one."""


class InvalidArgumentError(ClientError, ValueError):
    """The call is wrong in any state of the daemon; repeating it does not help."""


class BufferSizeError(InvalidArgumentError):
    """A buffer has another size than the blocks need; the message names both sizes."""


class NotFoundError(ClientError):
    """The daemon has no such namespace, prefix or request."""


class SessionUnknown(NotFoundError):
    """The daemon was restarted and does not know the session; the call can be repeated in a new session."""


class AlreadyExistsError(ClientError):
    """The name is taken: a running request has the same id, or another namespace has the same hash by chance."""


class ExhaustedError(ClientError):
    """There is no room and no block may be evicted, or a limit of the queue or of sessions is reached; try again
    later."""


class PreconditionError(ClientError):
    """The call is not possible in the daemon's present state."""


class UnsupportedError(ClientError):
    """The daemon was not configured for this part of the service."""


class PermissionDeniedError(ClientError):
    """The daemon refuses this caller because of its role, or because it has not registered the namespace."""


class Unauthenticated(PermissionDeniedError):
    """The daemon does not know this caller: its token is missing or unknown, or another daemon issued its ticket."""


class NamespaceClosed(PermissionDeniedError):
    """The daemon has closed the namespace, which was not used for a long time, to make room; register it again."""


class ServerUnavailable(ClientError):
    """The daemon is not running, ended during the call, or drains. The next call tries again.

    Attributes:
        answered: True if the message is the daemon's own answer.
    """

    answered = False


class CallTimeout(ClientError, TimeoutError):
    """The daemon did not answer within the call's time limit, or ended a stream because the client was too slow."""


class ServerError(ClientError):
    """The daemon failed or broke the contract; see its log."""


class LeaseLost(ClientError):
    """A lease or reservation expired, or its session ended, before it was released or committed.

    Bytes that were read since then may be wrong; bytes that were written since then are lost.
    """


class MemoryUnavailable(ClientError):
    """The daemon's arena cannot be mapped here, and `memory="shared"` requires it."""


class SocketUntrusted(ClientError):
    """Another user could have made the default socket; nothing was sent there."""


class ClientClosed(ClientError):
    """The client was closed before or during the call."""


class ForkedProcess(ClientClosed):
    """The client, or gRPC, was in use when this process was forked, and works only in the parent; use "spawn"."""


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
    # A daemon that shuts down cancels running calls. A call that the client cancels raises CancelledError instead.
    grpc.StatusCode.CANCELLED: ServerUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: CallTimeout,
}


def status_name(error: ClientError) -> str:
    """Returns the name of the gRPC status that an error stands for; `INTERNAL` for one without a status of its own."""
    names = {kind: status.name for status, kind in reversed(_BY_STATUS.items())}  # of two the first one counts
    return next((names[kind] for kind in type(error).__mro__ if kind in names), "INTERNAL")


# gRPC's text repeats the socket three times before the cause.
_NO_SOCKET = re.compile(r"failed to connect to all addresses; .* addr: unix:.* error: (?P<reason>.+)", re.DOTALL)
_SESSION_ENDED = ("prefixd-session", "ended")
_NAMESPACE_CLOSED = ("prefixd-namespace", "closed")
_ANSWERED = ("prefixd-answered", "yes")


def from_rpc_error(error: grpc.aio.AioRpcError, address: str) -> ClientError:
    """Returns the client error for a failed call to `address`."""
    kind = _BY_STATUS.get(error.code(), ServerError)
    detail = error.details() or f"the daemon gave {error.code().name} and no reason"
    trailers = tuple(error.trailing_metadata() or ())
    if kind is CallTimeout and _ANSWERED in trailers:
        return CallTimeout(detail)
    if kind is CallTimeout:
        return CallTimeout(
            f"no answer from the daemon at {address} in time ({detail}); it may still carry out the call; give the "
            "client a larger timeout_s"
        )
    if detail == grpc.StatusCode.CANCELLED.name:  # gRPC's only text when a server ends
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
