"""Prometheus metrics over HTTP, on the daemon's event loop and within limits.

A connection carries one request. When there are too many connections, the oldest that has sent no request is closed: a
scraper always gets in, and no number of connections takes the daemon's descriptors. Figures are taken on the event
loop, since only it may look at the cache; the page is written in a thread of its own.
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
"""From the connection to the end of the request's head."""
_SEND_S = 10.0
"""For the page to be sent, to a client that reads it."""
_PATHS = ("/metrics", "/")


class MetricsServer:
    """Serves what `take` gives at http://127.0.0.1/metrics.

    Args:
        take: the figures; called on the event loop, once a scrape.
        refuse: says why not to whoever sends this `Authorization` (empty: none); None: welcome.
        head_s: seconds after which a connection that has sent no whole request is closed.
        send_s: seconds after which a client that does not read its answer is cut off.

    Raises:
        OutOfMemoryError: the system gives no thread to write the pages in.
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
        """Connections that are open."""
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
        """Takes one connection: those that wait are taken when it has been counted."""
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

    def opened(self, connection: _Connection) -> None:
        """Counts a connection; one that is too many costs the oldest that has not asked, or else itself."""
        self._connections[connection] = None
        if len(self._connections) > _CONNECTIONS:
            next(each for each in self._connections if each.answering is None).abort()

    def closed(self, connection: _Connection) -> None:
        """Forgets a connection."""
        self._connections.pop(connection, None)

    async def page(self, accept: str) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that the header `Accept` asks for."""
        async with self._rendering:  # one at a time: scrapes must not crowd out everything else
            stats = await self._take()
            encode, content_type = choose_encoder(accept)
            registry = CollectorRegistry()
            registry.register(MetricsCollector(stats))
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode, registry), content_type


class _Connection(asyncio.Protocol):
    """One connection: a request, its answer, the end."""

    def __init__(self, server: MetricsServer) -> None:
        self.answering: asyncio.Task[None] | None = None
        """The answer to its request, once that is there."""
        self._server = server
        self._head = b""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Waits for a request, not for ever."""
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(self._server.head_s, self.abort)
        self._server.opened(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends what is done for it."""
        if self._deadline is not None:
            self._deadline.cancel()
        if self.answering is not None:
            self.answering.cancel()
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        """Answers when the head of the request is there; anything behind it is ignored."""
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
        """A client may say that it sends no more, and still wait for its answer."""
        return self.answering is not None

    def abort(self) -> None:
        """Closes the connection at once, whatever is still to be sent."""
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
    """The values of a header's field, separated by commas."""
    fields = (line.partition(":") for line in lines)
    return ",".join(value.strip() for name, _, value in fields if name.lower() == wanted)
