"""Turns a handler's errors into status codes, and lets its work outlive a caller that hangs up."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import grpc

from prefixd.base.errors import NamespaceClosedError, PrefixdError, SessionEndedError
from prefixd.server.access.caller import CURRENT_CALL
from prefixd_scheduler import QueueFullError, SchedulerError
from prefixd_swap import OutOfMemoryError, SwapError

log = logging.getLogger(__name__)

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = Any  # grpc.aio.ServicerContext is generic in what our handlers never name

# gRPC sends the message percent-encoded in a header, and drops a header of more than 2 KiB. 600 ASCII characters fit;
# another character takes up to twelve bytes.
_MESSAGE_CHARACTERS = 600
_MESSAGE_BYTES = 1800
_SESSION_ENDED = ("prefixd-session", "ended")
_NAMESPACE_CLOSED = ("prefixd-namespace", "closed")
_ANSWERED = ("prefixd-answered", "yes")
"""Trailing metadata of every error from a handler: gRPC uses the same status codes when no daemon answers."""

_working: set[asyncio.Task[Any]] = set()


def unary(
    method: Callable[[Any, Request], Coroutine[Any, Any, Response]],
) -> Callable[[Any, Request, Context], Awaitable[Response]]:
    """Turns `async def f(self, request) -> response` into a handler.

    The work runs as a task of its own: a caller that hangs up must not leave a copy writing into slots that have been
    released.
    """
    return granting(lambda self, request, response: None)(method)


def granting(
    take_back: Callable[[Any, Any, Any], None],
) -> Callable[
    [Callable[[Any, Request], Coroutine[Any, Any, Response]]], Callable[[Any, Request, Context], Awaitable[Response]]
]:
    """Like `unary`, for a method that grants the caller something, such as a lease.

    When the caller has hung up (cancelled, out of time) before the response could be sent, `take_back(self, request,
    response)` is called with the response: the caller will never learn of the grant.
    """

    def decorate(
        method: Callable[[Any, Request], Coroutine[Any, Any, Response]],
    ) -> Callable[[Any, Request, Context], Awaitable[Response]]:
        @functools.wraps(method)
        async def handler(self: Any, request: Request, context: Context) -> Response:
            try:
                return await deliver(method(self, request), lambda response: take_back(self, request, response))
            except Exception as error:
                del request  # its memory is freed before the refusal, which may wait
                await abort(context, error)

        return handler

    return decorate


def streaming(
    method: Callable[[Any, Any], AsyncGenerator[Response, None]],
) -> Callable[[Any, Any, Context], AsyncGenerator[Response, None]]:
    """Turns `async def f(self, request) -> AsyncGenerator[response]` into a handler. The work ends with the call."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Context) -> AsyncGenerator[Response, None]:
        try:
            async with aclosing(method(self, request)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            del request  # a refusal may wait
            await abort(context, error)

    return handler


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
        log.error("a call failed with an unexpected error", exc_info=error)
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
    await context.abort(code, _short(str(error)), metadata)
    raise AssertionError("abort does not return")


async def deliver(work: Coroutine[Any, Any, Response], take_back: Callable[[Response], None]) -> Response:
    """Returns the result of `work` to a handler; `take_back` gets the result if the caller has hung up by then."""
    task = outlive(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: _undo(done, take_back))
        raise
    finally:
        del task  # its error refers to this frame, which would keep the request until the garbage collector runs


def outlive(work: Coroutine[Any, Any, Response]) -> asyncio.Task[Response]:
    """Starts work that goes on when its caller has hung up; `finish_work` waits for it."""
    task = asyncio.ensure_future(work)
    _working.add(task)
    task.add_done_callback(_finished)
    return task


async def finish_work() -> None:
    """Waits for the work of calls that their callers have left."""
    while _working:
        await asyncio.gather(*_working, return_exceptions=True)


def _undo(task: asyncio.Task[Response], take_back: Callable[[Response], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        take_back(task.result())


def _finished(task: asyncio.Task[Any]) -> None:
    _working.discard(task)
    if not task.cancelled():
        task.exception()  # the caller has got it or has hung up


def _short(message: str) -> str:
    """Shortens a message to what gRPC sends: an error that quotes its input may be long. Keeps beginning and remedy."""
    half, short = (_MESSAGE_CHARACTERS - 5) // 2, message
    while len(short) > _MESSAGE_CHARACTERS or len(quote(short, " ")) > _MESSAGE_BYTES:
        short = f"{message[:half]} ... {message[-half:]}"
        half -= 20
    return short
