"""Bounds the bodies of requests, sends answers in pieces, and ends the work for a client that has left."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prefixd.server.http.http_connection import HttpLimits

log = logging.getLogger(__name__)

_PATH_CHARACTERS = 100  # of a request's path in the log
_PIECE_BYTES = 256 << 10
"""Of an answer. A TLS transport takes a message of any size before it says that the client does not read."""


class RequestBounds:
    """The app of a port, with bounds around it.

    Args:
        app: the app.
        limits: the port's.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self._app = app
        self._limits = limits
        self.held_bytes = 0
        """Bytes of the bodies of all requests that are being answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        body = _Body(self, self._limits, _length(scope), receive)
        scope["state"] = {**scope.get("state", {}), "free_body": body.free}
        try:
            await self._app(scope, body.receive, partial(_send_in_pieces, send))
        except asyncio.CancelledError:
            # The client has left, or the daemon ends: its connection is closed. Nobody awaits this task, and uvicorn
            # would log a traceback.
            return
        except Exception:
            # An answer 500 was sent, or will be; an answer that was begun is cut off.
            log.exception("%s %s failed with an unexpected error", scope["method"], scope["path"][:_PATH_CHARACTERS])
        finally:
            body.free()


class _Body:
    """The body of one request, as it is received."""

    def __init__(self, bounds: RequestBounds, limits: HttpLimits, length: int, receive: Receive) -> None:
        self.nbytes = 0
        self._bounds = bounds
        self._limits = limits
        self._length = length
        self._receive = receive
        self._complete = False
        self._end_s: float | None = None

    async def receive(self) -> Message:
        """Returns the next message. Raises HTTPException if the body is too large or too slow."""
        if self._complete:
            return await self._receive()
        limits = self._limits
        self._check(self._length)
        if self._end_s is None:
            self._end_s = asyncio.get_running_loop().time() + limits.body_s
        try:
            async with asyncio.timeout_at(self._end_s):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the request's body did not arrive within {limits.body_s:g} s") from None
        arrived = len(message.get("body", b""))
        self.nbytes += arrived
        self._bounds.held_bytes += arrived
        self._check(self.nbytes)
        self._complete = not message.get("more_body", False)
        return message

    def free(self) -> None:
        """The handler does not need what has arrived any more."""
        self._bounds.held_bytes -= self.nbytes
        self.nbytes = 0

    def _check(self, nbytes: int) -> None:
        limits = self._limits
        if nbytes > limits.body_bytes:
            raise HTTPException(413, f"a request's body may have {limits.body_bytes} bytes; send less")
        if self._bounds.held_bytes - self.nbytes + nbytes > limits.bodies_bytes:
            raise HTTPException(
                503, "the daemon holds as many requests' bodies as it may; send this again", {"Retry-After": "1"}
            )


async def _send_in_pieces(send: Send, message: Message) -> None:
    body = message.get("body", b"")
    if len(body) <= _PIECE_BYTES:
        await send(message)
        return
    for start in range(0, len(body), _PIECE_BYTES):
        more = start + _PIECE_BYTES < len(body) or message.get("more_body", False)
        await send({**message, "body": body[start : start + _PIECE_BYTES], "more_body": more})


def _length(scope: Scope) -> int:
    """Returns the body's length as its sender has announced it, which the parser has checked; 0 if it has not."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
