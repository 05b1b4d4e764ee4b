"""The daemon's gRPC servers: one on the unix socket, and one on TCP where settings say so."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import grpc

from prefixd.errors import ConfigError
from prefixd.server.access import SocketAccess
from prefixd.server.messages import ServiceTable
from prefixd.server.tcp_listener import TokenCheck, tls_credentials
from prefixd.server.tokens import TokenFile
from prefixd.settings import ServerSettings

_MESSAGE_BYTES = 16 << 20
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.max_frame_size", 1 << 20),
    # A client on another host that vanishes without a word is dead after half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]
# A prompt of 131,072 tokens is 512 KiB: let it come in one go.
_UNIX_OPTIONS = [("grpc.http2.lookahead_bytes", 8 << 20)]
# Strangers reach this one: what a connection can make us keep is bounded, and so is their number.
_TCP_OPTIONS = [
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_allowed_incoming_connections", 512),
    ("grpc.server_handshake_timeout_ms", 10_000),
]
_TCP_CALLS = 1024  # under way at once, beside the streams of sessions


class _CallerHungUp(logging.Filter):
    """Keeps a traceback out of the log that gRPC writes when a caller goes away while its answer is being sent."""

    def filter(self, record: logging.LogRecord) -> bool:
        """False for that."""
        return not str(record.msg).startswith("ExecuteBatchError raised in core by servicer method")


_caller_hung_up = _CallerHungUp()


class Listeners:
    """Where calls come in. Services are added to `services` before it is opened.

    The unix socket's peers are checked by the kernel alone, against the socket's permissions and access control list:
    gRPC accepts the connections itself and can neither be asked for their SO_PEERCRED nor be handed accepted ones, and
    a listener of ours in front of it would copy every byte. Who gets the memory is checked by SO_PEERCRED, by
    `MemoryListener`. On TCP, TLS and tokens say who comes in.

    Raises:
        ConfigError: a certificate or a key that cannot be used.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.access = SocketAccess(int(settings.socket_mode, 8), settings.allow_uids)
        self._settings = settings
        logging.getLogger("grpc._cython.cygrpc").addFilter(_caller_hung_up)
        self._unix = grpc.aio.server(options=_OPTIONS + _UNIX_OPTIONS)
        self._tcp: grpc.aio.Server | None = None
        self.tokens: TokenFile | None = None
        """To be loaded before the TCP listener is opened, and watched from then on."""
        if settings.tcp is not None:
            self._credentials = tls_credentials(settings)
            self.tokens = TokenFile(settings.tokens) if settings.tokens is not None else None
            self._tcp = grpc.aio.server(
                interceptors=[TokenCheck(self.tokens)] if self.tokens is not None else None,
                options=_OPTIONS + _TCP_OPTIONS,
                maximum_concurrent_rpcs=settings.max_sessions + _TCP_CALLS,
            )
        self._servers = [self._unix] if self._tcp is None else [self._unix, self._tcp]
        self.services: Any = ServiceTable(self._servers)  # generated code asks for a grpc.aio.Server by type

    async def open(self) -> str | None:
        """Takes calls; returns host:port of the TCP door, if there is one.

        Raises:
            ConfigError: the socket or the port cannot be bound.
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
        return tcp

    async def close(self, grace_s: float) -> None:
        """Takes no more calls, and ends those that still run after `grace_s`."""
        for server in self._servers:
            await server.stop(grace_s)

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
        return f"{address.rpartition(':')[0]}:{port}"
