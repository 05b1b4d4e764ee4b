"""The HTTP ports that the settings ask for: the operators' and the users'."""

from __future__ import annotations

import logging
import os
import resource
import socket
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from prefixd.base.errors import ConfigError
from prefixd.server.access.audit import AuditLog
from prefixd.server.access.identities import Identities
from prefixd.server.http.browser_guard import BrowserGuard
from prefixd.server.http.http_callers import HttpCallers
from prefixd.server.http.http_connection import HttpLimits
from prefixd.server.http.http_listener import HttpListener
from prefixd.server.http.openai.openai_routes import BODIES, MOST_BODY
from prefixd.server.http.operator_routes import OperatorRoutes
from prefixd.server.rpc.call_limits import Refusals
from prefixd.server.rpc.sockets.tls import tls_context
from prefixd.settings import HttpAddress, ServerSettings

log = logging.getLogger(__name__)

_BESIDE_GENERATIONS = 256
"""Connections of the users' port beside those on which requests wait and run: idle ones, and operators'."""


def users_limits(generations: int) -> HttpLimits:
    """Returns the limits of the users' port: prompts with images, and answers that take minutes.

    Each request that waits or runs takes a connection. There are more than calls of Generate may be under way, and one
    tenant may have a part of these calls only, so it keeps no other out. They take half of the descriptors at most.

    Args:
        generations: calls of Generate at once, of all tenants.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = generations + _BESIDE_GENERATIONS
    connections = most if descriptors == resource.RLIM_INFINITY else min(most, descriptors // 2)
    return HttpLimits(connections=connections, send_s=30.0, body_bytes=MOST_BODY, bodies_bytes=BODIES)


class HttpPorts:
    """Opens the ports and closes them.

    Args:
        settings: the server's.
        identities: tells callers' tenants and roles.
        refusals: paces refusals.
        audit: logs callers.
        operator: the operators' routes, which both ports have.
        generations: calls of Generate at once, of all tenants.
    """

    def __init__(
        self,
        settings: ServerSettings,
        identities: Identities,
        refusals: Refusals,
        audit: AuditLog,
        operator: OperatorRoutes,
        generations: int,
    ) -> None:
        self._generations = generations
        self._settings = settings
        self._identities = identities
        self._refusals = refusals
        self._audit = audit
        self._operator = operator
        self._listeners: list[HttpListener] = []

    async def open_metrics(self) -> str | None:
        """Opens the operators' port, `server.metrics`; returns host:port, or None without that setting.

        Raises:
            ConfigError: the address or a certificate cannot be used.
        """
        text = self._settings.metrics
        return None if text is None else await self._open("server.metrics", text, [], HttpLimits())

    async def open_users(self, routes: Callable[[HttpCallers], Sequence[BaseRoute]]) -> str | None:
        """Opens the users' port, `server.http`, with the operators' routes and those that `routes` returns for its
        callers. Returns and raises as `open_metrics`."""
        text = self._settings.http
        if text is None:
            return None
        limits = users_limits(self._generations)
        return await self._open("server.http", text, routes(self.callers(text)), limits)

    async def close(self, grace_s: float) -> None:
        """Closes the ports; requests have this long to finish."""
        for listener in self._listeners:
            await listener.close(grace_s)

    def callers(self, address: str) -> HttpCallers:
        """Returns who identifies the callers of the port at this address."""
        asks = HttpAddress.parse(address).tls and self._settings.tls_client_ca is not None
        return HttpCallers(self._identities, self._refusals, self._audit, asks_certificates=asks)

    async def _open(self, name: str, text: str, routes: Sequence[BaseRoute], limits: HttpLimits) -> str:
        callers, address = self.callers(text), HttpAddress.parse(text)
        app = Starlette(
            routes=[*self._operator.routes(callers), *routes],
            exception_handlers={404: _not_found, 500: _failed},
        )
        guarded = BrowserGuard(app, lambda: callers.open) if address.is_loopback and not address.tls else app
        listener = HttpListener(guarded, limits, tls_context(self._settings) if address.tls else None)
        try:
            port = await listener.start(address.host, address.port)
        except OSError as error:
            why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
            raise ConfigError(f"{name} = {text} cannot be used ({why}); choose another") from error
        self._listeners.append(listener)
        if callers.open and not address.is_loopback:
            log.warning(
                "%s = %s: everyone who reaches the port may use it; set server.tokens, or server.tls_client_ca and "
                "https://, to let in only those whom you know",
                name,
                text,
            )
        return address.url(port)


async def _not_found(request: Request, error: Exception) -> Response:
    return PlainTextResponse(
        "Not Found; GET /, /metrics, /api/stats, /api/requests, /api/why/ID, /healthz or /readyz\n", 404
    )


async def _failed(request: Request, error: Exception) -> Response:
    return PlainTextResponse("Internal Server Error; the daemon's log says where. Please report it\n", 500)
