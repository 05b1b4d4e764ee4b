"""Addresses of HTTP ports: 127.0.0.1:9470, https://[::]:8443."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class HttpAddress:
    """Where an HTTP port listens; `port` 0: any free one."""

    tls: bool
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses host:port, http://host:port or https://host:port. Raises ValueError."""
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or port is None or parts.scheme not in ("http", "https") or parts.path.strip("/") or parts.query:
            raise ValueError(
                "write host:port, such as 127.0.0.1:9470, or https://host:port for TLS (port 0: any free one)"
            )
        return cls(parts.scheme == "https", host, port)

    @property
    def is_loopback(self) -> bool:
        """True if only processes of this host reach the port."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def url(self, port: int) -> str:
        """Returns the URL of the port, once it is known."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{port}"
