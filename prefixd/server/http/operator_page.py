"""The page for people at `/`: one file without anything from elsewhere, which the browser may not load either."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse, Response


class OperatorPage:
    """The page. It has no figures: its script asks `/api/stats` for them, with the token that its reader enters."""

    def __init__(self) -> None:
        self._html = files("prefixd.server.http").joinpath("page.html").read_text(encoding="utf-8")
        scripts, styles = (_hashes(self._html, tag) for tag in ("script", "style"))
        policy = (
            f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
            "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
        )
        self._headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    def response(self) -> Response:
        """Returns the page."""
        return HTMLResponse(self._html, headers=self._headers)


def _hashes(html: str, tag: str) -> str:
    """Returns the sources of a policy that allow exactly the elements of this name that the page has."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
