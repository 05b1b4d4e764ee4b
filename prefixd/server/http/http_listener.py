"""One HTTP port on the daemon's event loop, within limits: it serves a Starlette app by uvicorn's protocol.

uvicorn's own server would take over signals and logs, and it accepts connections without a limit on their number, their
age, or how slowly they read. Here a connection is accepted only when the one before has been counted. If there are too
many, the oldest that waits for a request is closed, or else the oldest that waits for a refusal: a client can always
connect unless answers take all connections, and no number of connections uses up the daemon's descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from starlette.types import ASGIApp
from uvicorn.config import Config

from prefixd.server.http.http_connection import HttpConnection, HttpLimits
from prefixd.server.http.request_bounds import RequestBounds

log = logging.getLogger(__name__)

_BACKLOG = 1024  # connections that the kernel keeps until they are accepted
_SHORTAGE_PAUSE_S = 0.5


class HttpListener:
    """Serves an app at one port.

    A handler of the app may rely on this:

    - It is cancelled when its client disconnects, or when the daemon ends and `close`'s time is over.
    - Reading the body raises Starlette's HTTPException 413, 408 or 503 for one that is too large or too slow, or if all
      requests together have too many bytes; the app's exception handlers turn it into an answer. The bytes count until
      the handler has returned and the answer is sent, or calls `request.state.free_body()` since it needs them no more.
    - `send` waits while the client does not read. One that does not read for `send_s` seconds is cut off.
    - `request.state.certificate_names` has the names in the client's certificate, where it sent one that the port's
      `tls` verified; else it is empty. `HttpCallers` turns it into a caller.

    Args:
        app: the app.
        limits: of the port.
        tls: the port's certificate; None: no TLS.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._limits = limits or HttpLimits()
        self._tls = tls
        self._bounds = RequestBounds(app, self._limits)
        self._config = Config(
            self._bounds,
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=self._limits.keep_alive_s,  # type: ignore[arg-type]  # seconds of call_later
        )
        self._config.load()
        self._listener: socket.socket | None = None
        self._connections: dict[HttpConnection, None] = {}  # oldest first
        self._all_closed = asyncio.Event()

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    @property
    def held_bytes(self) -> int:
        """Bytes of the bodies of all requests that are being answered."""
        return self._bounds.held_bytes

    async def start(self, host: str, port: int) -> int:
        """Listens at `host` (a name or an address) and `port` (0: any free one); returns the port. Raises OSError."""
        listener = await asyncio.to_thread(_bind, host, port)
        listener.setblocking(False)
        self._listener = listener
        self._listen(listener)
        return int(listener.getsockname()[1])

    async def close(self, grace_s: float = 0.0) -> None:
        """Closes the port and every idle connection, and those that are still answering after `grace_s`."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        tasks = [task for connection in self._connections for task in connection.tasks]
        for connection in list(self._connections):
            if connection.answering:
                connection.shutdown()
            else:
                connection.abort()
        self._all_closed.clear()
        if self._connections and grace_s:
            try:
                await asyncio.wait_for(self._all_closed.wait(), grace_s)
            except TimeoutError:
                log.info("%d HTTP requests were still running: their connections are closed", self.connections)
        for connection in list(self._connections):
            connection.abort()
        if self._connections:
            await self._all_closed.wait()
        await asyncio.gather(*tasks, return_exceptions=True)

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
            log.debug("no HTTP connection is accepted now: %s", error)
            loop.remove_reader(listener)
            loop.call_later(_SHORTAGE_PAUSE_S, self._listen, listener)
            return
        client.setblocking(False)
        connection = HttpConnection(self._config, self._limits, self._forget)
        self._connections[connection] = None
        connection.accept(loop.create_task(self._connect(connection, client)))
        if len(self._connections) > self._limits.connections:
            self._close_one()

    def _close_one(self) -> None:
        """Closes the oldest connection that waits for a request, the newest apart; else the oldest that is refused;
        else the newest."""
        *others, newest = self._connections
        idle = (each for each in others if not each.answering)
        refused = (each for each in others if each.answering and each.refusing)
        next(idle, next(refused, newest)).abort()

    async def _connect(self, connection: HttpConnection, client: socket.socket) -> None:
        limits, tls = self._limits, self._tls
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                client,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else limits.head_s,
                ssl_shutdown_timeout=None if tls is None else limits.send_s,
            )
        except OSError as error:  # ssl.SSLError is one
            log.debug("an HTTP connection failed before its first request: %s", error)
            raise
        finally:
            if not connection.connected:
                client.close()

    def _forget(self, connection: HttpConnection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._all_closed.set()


def _bind(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_ADDRCONFIG
    )[0]
    both = family is socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=both)
