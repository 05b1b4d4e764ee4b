"""Keeps web pages of other sites out of a port that lets in every program of this host.

A browser on this host can reach such a port, and any site that it shows may use the browser: a page can send a POST
anywhere, and a site that lets its own name point to 127.0.0.1 (DNS rebinding) can even read the answers. What a browser
sends for them tells: `Origin` names the page's site, and `Host` the name that the page was loaded from.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from prefixd.settings import HttpAddress

_SHOWN = 100  # characters of a header
_REMEDY = "set server.tokens to let in whoever sends a token"


class BrowserGuard:
    """The app of a loopback port without TLS, behind the checks.

    Args:
        app: the app.
        is_open: whether everyone who reaches the port is let in now.
    """

    def __init__(self, app: ASGIApp, is_open: Callable[[], bool]) -> None:
        self._app = app
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        why = _foreign(Headers(scope=scope)) if self._is_open() else None
        if why is None:
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse(f"{why}; {_REMEDY}\n", 403)(scope, receive, send)


def _foreign(headers: Headers) -> str | None:
    """Why a request may come from another site's page; None if it does not."""
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_here(f"//{host}"):
        return f"Host is {host[:_SHOWN]!r}, and this port is for this host alone: use 127.0.0.1 or localhost"
    if origin is not None and not _is_here(origin):
        return f"Origin is {origin[:_SHOWN]!r}: web pages of other sites may not use this port"
    return None


def _is_here(url: str) -> bool:
    try:
        name = urlsplit(url).hostname or ""
    except ValueError:
        return False
    return HttpAddress(tls=False, host=name, port=0).is_loopback or name.endswith(".localhost")
