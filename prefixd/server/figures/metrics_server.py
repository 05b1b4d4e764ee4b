"""Prometheus metrics over HTTP, on the daemon's event loop and within limits.

A connection carries one request. When there are too many connections, the oldest that has sent no request is closed: a
scraper can always connect, and no number of connections uses up the daemon's descriptors. The event loop takes the
figures, since only it may read the cache; a thread writes the page.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from prefixd.server.figures.metrics import MetricsCollector
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap import started_threads

log = logging.getLogger(__name__)

_CONNECTIONS = 32
_BACKLOG = 128  # connections that the kernel keeps until they are accepted
_SHORTAGE_PAUSE_S = 0.5
_HEAD_BYTES = 8 << 10
_HEAD_S = 5.0
"""Most seconds from the connection to the end of the request's head."""
_SEND_S = 10.0
"""Most seconds to send the page."""
_PATHS = ("/metrics", "/")


class MetricsServer:
    """Serves the figures at http://127.0.0.1/metrics.

    Args:
        take: returns the figures; called on the event loop, once for each scrape.
        refuse: returns why a client that sends this header `Authorization` (empty: none) is refused, or None.
        head_s: seconds after which a connection that has sent no whole request is closed.
        send_s: seconds after which a client that does not read its answer is cut off.

    Raises:
        OutOfMemoryError: the thread that writes the pages cannot be started.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[pb.StatsResponse]],
        refuse: Callable[[str], str | None] = lambda authorization: None,
        *,
        head_s: float = _HEAD_S,
        send_s: float = _SEND_S,
    ) -> None:
        self.head_s = head_s
        self.send_s = send_s
        self._take = take
        self.refuse = refuse
        self._threads = started_threads(1, "prefixd-metrics")
        self._rendering = asyncio.Lock()
        self._listener: socket.socket | None = None
        self._accepting: set[asyncio.Task[object]] = set()
        self._connections: dict[_Connection, None] = {}  # oldest first

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    async def start(self, port: int) -> int:
        """Listens on `port` (0: any free one); returns the port. Raises OSError."""
        listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._listen(listener)
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Closes the port and every connection, and ends the thread."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        await asyncio.gather(*self._accepting, return_exceptions=True)
        answers = [connection.answering for connection in self._connections if connection.answering is not None]
        for connection in list(self._connections):
            connection.abort()
        await asyncio.gather(*answers, return_exceptions=True)
        self._threads.shutdown()

    def _listen(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts one connection; the next one is accepted when this one has been counted."""
        loop = asyncio.get_running_loop()
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # out of descriptors or memory: the port stays readable, and the loop must not spin
            log.debug("no connection for metrics is accepted now: %s", error)
            loop.remove_reader(listener)
            loop.call_later(_SHORTAGE_PAUSE_S, self._listen, listener)
            return
        client.setblocking(False)
        task: asyncio.Task[object] = loop.create_task(loop.connect_accepted_socket(lambda: _Connection(self), client))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    def add_connection(self, connection: _Connection) -> None:
        """Counts a connection. If there are too many, closes the oldest that has sent no request: maybe this one."""
        self._connections[connection] = None
        if len(self._connections) > _CONNECTIONS:
            next(each for each in self._connections if each.answering is None).abort()

    def remove_connection(self, connection: _Connection) -> None:
        """Stops counting a connection."""
        self._connections.pop(connection, None)

    async def page(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics and their content type, in the format that the header `Accept` asks for."""
        async with self._rendering:  # one at a time, so that scrapes do not take the whole event loop
            stats = await self._take()
            encode, content_type = choose_encoder(accept)
            registry = CollectorRegistry()
            registry.register(MetricsCollector(stats))
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode, registry), content_type


class _Connection(asyncio.Protocol):
    """One connection: reads a request, answers it and closes."""

    def __init__(self, server: MetricsServer) -> None:
        self.answering: asyncio.Task[None] | None = None
        """The task that answers the request; None before the request has arrived."""
        self._server = server
        self._head = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for a request, `head_s` seconds at most."""
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(self._server.head_s, self.abort)
        self._server.add_connection(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Cancels the answer and the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self.answering is not None:
            self.answering.cancel()
        self._server.remove_connection(self)

    def data_received(self, data: bytes) -> None:
        """Answers once the head of the request has arrived; ignores all bytes after it."""
        if self.answering is not None or self._transport.is_closing():
            return
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end >= 0:
            head, self._head = self._head[:end].decode("latin-1"), b""
            self.answering = asyncio.get_running_loop().create_task(self._answer(head))
        elif len(self._head) > _HEAD_BYTES:
            self._send(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

    def eof_received(self) -> bool:
        """Keeps the connection open for the answer: a client may close its sending side after its request."""
        return self.answering is not None

    def abort(self) -> None:
        """Closes the connection at once and drops unsent data."""
        self._transport.abort()

    async def _answer(self, head: str) -> None:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        if rest.partition(" ")[0].partition("?")[0] not in _PATHS:
            self._send(HTTPStatus.NOT_FOUND)
        elif method not in ("GET", "HEAD"):
            self._send(HTTPStatus.METHOD_NOT_ALLOWED)
        elif (why := self._server.refuse(_field(lines, "authorization"))) is not None:
            self._send(HTTPStatus.UNAUTHORIZED, f"{why}\n".encode())
        else:
            accept = _field(lines, "accept")
            try:
                page, content_type = await self._server.page(accept)
            except Exception as error:
                log.error("the metrics could not be written", exc_info=error)
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR)
            else:
                self._send(HTTPStatus.OK, page, content_type, head_only=method == "HEAD")

    def _send(
        self, status: HTTPStatus, page: bytes = b"", content_type: str = "text/plain", *, head_only: bool = False
    ) -> None:
        page = page or f"{status.phrase}; GET {_PATHS[0]}\n".encode()
        allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
        allow = 'WWW-Authenticate: Bearer realm="prefixd"\r\n' if status is HTTPStatus.UNAUTHORIZED else allow
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(page)}\r\n{allow}Connection: close\r\n\r\n"
        )
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = asyncio.get_running_loop().call_later(self._server.send_s, self.abort)
        self._transport.write(head.encode("latin-1") + (b"" if head_only else page))
        self._transport.close()  # once everything is sent


def _field(lines: Sequence[str], wanted: str) -> str:
    """Returns all values of a header field, separated by commas."""
    fields = (line.partition(":") for line in lines)
    return ",".join(value.strip() for name, _, value in fields if name.lower() == wanted)
