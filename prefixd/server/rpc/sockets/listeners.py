"""The daemon's gRPC servers: one on the unix socket, and one on TCP where settings say so."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from prefixd.base.errors import ConfigError
from prefixd.base.tenancy.tenants import Tenants
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.identities import Identities
from prefixd.server.access.local_credentials import LocalCredentials
from prefixd.server.access.socket_access import SocketAccess
from prefixd.server.access.token_file import TokenFile
from prefixd.server.rpc import anonymous
from prefixd.server.rpc.call_limits import CALLS, HEALTH_CALLS, WAITING, CallLimits
from prefixd.server.rpc.door import Door, ServiceTable
from prefixd.server.rpc.receiving import OPENING
from prefixd.server.rpc.sockets.tcp_connections import MOST, TcpConnections
from prefixd.server.rpc.sockets.tls import tls_credentials
from prefixd.settings import MEMORY_SOCKET_SUFFIX, Settings

log = logging.getLogger(__name__)

MESSAGE_BYTES = 16 << 20
"""The most of one message; gRPC refuses a longer one with RESOURCE_EXHAUSTED."""
_ENDING = 64
"""Calls of Generate beside those that wait and run: the daemon is reading their text or sending their answer."""
_LATE_S = 5.0
"""Time for connections to close when the daemon ends, after the time that calls have to finish."""
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
    # A prompt of 131,072 tokens is 512 KiB, which must arrive without a pause. A larger window would let each waiting
    # call hold that much memory, and a probed window (bdp_probe) would grow with the caller's messages.
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.bdp_probe", 0),
    # The daemon detects after half a minute that a client on another host has vanished without closing.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# Anonymous callers can connect to the TCP port: it bounds the memory of a connection and the number of connections.
_TCP_OPTIONS = [
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_allowed_incoming_connections", MOST),
    ("grpc.server_handshake_timeout_ms", 10_000),
    # A connection without a call is closed to make room for others; a session is a call.
    ("grpc.max_connection_idle_ms", 60_000),
]


class _CallerHungUp(logging.Filter):
    """Drops the traceback that gRPC logs when a caller disconnects while its answer is being sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for that record."""
        return not str(record.msg).startswith("ExecuteBatchError raised in core by servicer method")


_caller_hung_up = _CallerHungUp()


class Listeners:
    """The unix socket and the TCP port. Services are added to `services` before `open`.

    The kernel checks which users may connect to the unix socket, by the socket's permissions and access control list.
    Local credentials prove which user calls: gRPC accepts connections itself, gives no access to their SO_PEERCRED and
    takes no connection that another listener has accepted, and a proxy in front of it would copy every byte. On TCP,
    tokens and certificates identify callers. Each listener has a `Door`.

    Args:
        settings: all settings.
        tenants: all tenants of the daemon.
        credentials: reads the credentials that local clients send.
        audit: logs callers that are let in or refused.

    Raises:
        ConfigError: a certificate or a key cannot be used.
    """

    def __init__(self, settings: Settings, tenants: Tenants, credentials: LocalCredentials, audit: AuditLog) -> None:
        server = settings.server
        self.access = _socket_access(settings)
        """The users that may connect to the unix sockets now."""
        self._settings = server
        logging.getLogger("grpc._cython.cygrpc").addFilter(_caller_hung_up)
        self.tokens = TokenFile(server.tokens) if server.tokens is not None else None
        """The caller must load it before `open`, and watch it from then on."""
        self.identities = Identities(server, settings.tenants, tenants, self.tokens, credentials)
        self.generations = generations = _most_generations(settings)
        """Calls of Generate at once, of all tenants."""
        self.limits = CallLimits(tenants, generations)
        self._unix = grpc.aio.server(options=_OPTIONS)
        self._tcp: grpc.aio.Server | None = None
        if server.tcp is not None:
            self._credentials = tls_credentials(server)
            lasting = server.max_sessions + generations + HEALTH_CALLS + anonymous.CALLS
            self._tcp = grpc.aio.server(
                options=_OPTIONS + _TCP_OPTIONS,
                maximum_concurrent_rpcs=lasting + CALLS + WAITING + OPENING,
            )
        self._connections: TcpConnections | None = None
        doors = {"unix": self._unix} | ({} if self._tcp is None else {"tcp": self._tcp})
        self._servers = list(doors.values())
        self.services: Any = ServiceTable(  # generated code asks for a grpc.aio.Server by type
            [(server, Door(self.identities, self.limits, audit, name)) for name, server in doors.items()]
        )

    async def open(self) -> str | None:
        """Begins to take calls; returns host:port of the TCP port, if there is one.

        Raises:
            ConfigError: the socket or the port cannot be bound, or the thread that watches connections cannot be
                started.
        """
        path: Path = self._settings.socket
        try:
            self._unix.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise ConfigError(f"server.socket = {path} cannot be bound ({error}); choose another path") from error
        tcp = self._bind_tcp()
        self.access.open(path)
        for server in self._servers:
            await server.start()
        if self._connections is not None:
            self._connections.start()
        return tcp

    def update(self, settings: Settings) -> None:
        """Identifies callers by these settings from now on, and gives the users that they name access to the sockets.

        The sockets keep the mode that they were created with: only a restart changes it.

        Raises:
            ConfigError: the socket's file system takes no access control list; nothing has changed then.
            OSError: a socket's file is missing; nothing has changed then.
        """
        access = replace(_socket_access(settings), mode=self.access.mode)
        if access.uids != self.access.uids:
            try:
                self._give_access(access)
            except (ConfigError, OSError):
                with suppress(ConfigError, OSError):  # if this fails too, some of the new users keep access
                    self._give_access(self.access)
                raise
            self.access = access
        server = settings.server.model_copy(update={"socket_mode": self._settings.socket_mode})
        self.identities.update(server, settings.tenants)

    def _give_access(self, access: SocketAccess) -> None:
        access.make_directory(self._settings.socket.parent)
        for path in (self._settings.socket, local_door(self._settings.socket)):
            access.open(path)

    async def close(self, grace_s: float) -> None:
        """Takes no more calls, and ends those that still run after `grace_s`.

        gRPC does not close a connection before it has written all pending data to it. `close` waits 5 s for a caller
        that does not read: the daemon must still write cached blocks to disk.
        """
        if self._connections is not None:
            self._connections.stop()
        stops = [asyncio.create_task(server.stop(grace_s)) for server in self._servers]
        stopped, late = await asyncio.wait(stops, timeout=grace_s + _LATE_S)
        for stop in stopped:
            stop.result()
        if late:
            log.warning("some callers do not read their answers: their connections end with the process")

    def _bind_tcp(self) -> str | None:
        address = self._settings.tcp
        if self._tcp is None or address is None:
            return None
        try:
            if self._credentials is None:
                port = self._tcp.add_insecure_port(address)
            else:
                port = self._tcp.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(f"server.tcp = {address} cannot be bound; choose another address or port 0") from error
        self._connections = TcpConnections(port)
        return f"{address.rpartition(':')[0]}:{port}"


def _most_generations(settings: Settings) -> int:
    """Returns the most calls of Generate at once: those that may wait and run, and 64 more."""
    worker = settings.worker
    models = 1 + len(worker.more_models) if worker.enabled else 0
    return models * (settings.scheduler.queue_limit + 2 * worker.max_running) + _ENDING


def local_door(path: Path) -> Path:
    """Returns the path of the local door of the daemon with this socket."""
    return path.with_name(path.name + MEMORY_SOCKET_SUFFIX)


def _socket_access(settings: Settings) -> SocketAccess:
    """Returns the users that may connect to the unix sockets: those that the settings allow, operators and tenants'."""
    server = settings.server
    uids = dict.fromkeys((*server.allow_uids, *server.admin_uids))
    uids |= dict.fromkeys(uid for tenant in settings.tenants.values() for uid in tenant.uids)
    return SocketAccess(int(server.socket_mode, 8), tuple(uids))
