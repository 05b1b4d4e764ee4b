"""Turns a handler's errors into status codes."""

from __future__ import annotations

import logging
from typing import Any, NoReturn
from urllib.parse import quote

import grpc

from prefixd.base.errors import NamespaceClosedError, PrefixdError, SessionEndedError
from prefixd.observability.actor import log_fields
from prefixd.server.rpc.receiving import CURRENT_CALL
from prefixd_scheduler import QueueFullError, SchedulerError
from prefixd_swap import OutOfMemoryError, SwapError

log = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext has type parameters that our handlers do not need

# gRPC sends the message percent-encoded in a header, and drops a header of more than 2 KiB. 600 ASCII characters fit;
# another character takes up to twelve bytes.
_MESSAGE_CHARACTERS = 600
_MESSAGE_BYTES = 1800
_SESSION_ENDED = ("prefixd-session", "ended")
_NAMESPACE_CLOSED = ("prefixd-namespace", "closed")
_ANSWERED = ("prefixd-answered", "yes")
"""Trailing metadata of every error from a handler: gRPC uses the same status codes when no daemon answers."""


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends the call with the status of `error`; an unexpected error is logged and becomes INTERNAL."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, PrefixdError | SchedulerError | SwapError):  # expected: their tracebacks are not logged
        error.__traceback__ = error.__cause__ = error.__context__ = None  # they keep the request alive
    if isinstance(error, PrefixdError):
        code = grpc.StatusCode[error.status]
    elif isinstance(error, QueueFullError | OutOfMemoryError):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    elif isinstance(error, SchedulerError | SwapError):
        code = grpc.StatusCode.FAILED_PRECONDITION
    else:
        log.error("a call failed with an unexpected error", exc_info=error, extra=log_fields(error))
        await context.abort(
            grpc.StatusCode.INTERNAL,
            f"{type(error).__name__} in the daemon; its log says where. Please report it",
            (_ANSWERED,),
        )
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and (call := CURRENT_CALL.get(None)) is not None:
        await call.refusal_turn()
    # Both are NOT_FOUND: the metadata tells a client whether a new session, or registering again, will do.
    metadata: tuple[tuple[str, str], ...] = (_ANSWERED,)
    if isinstance(error, SessionEndedError):
        metadata += (_SESSION_ENDED,)
    elif isinstance(error, NamespaceClosedError):
        metadata += (_NAMESPACE_CLOSED,)
    await context.abort(code, _shorten_message(str(error)), metadata)
    raise AssertionError("abort does not return")


def _shorten_message(message: str) -> str:
    """Shortens a message to the length that gRPC sends: an error that quotes its input may be long. Keeps both ends."""
    half, short = (_MESSAGE_CHARACTERS - 5) // 2, message
    while len(short) > _MESSAGE_CHARACTERS or len(quote(short, " ")) > _MESSAGE_BYTES:
        short = f"{message[:half]} ... {message[-half:]}"
        half -= 20
    return short
