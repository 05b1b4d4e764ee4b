"""The options of an S3 bucket."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class S3Options:
    """A bucket of S3 or of a server that speaks its protocol.

    Args:
        bucket: its name.
        prefix: the beginning of every object's name; ends with "/".
        endpoint: URL of a server that is not AWS, for example "https://minio.example:9000".
        region: None for AWS_REGION, else us-east-1.
        access_key_id: None: credentials come from the environment (AWS_ACCESS_KEY_ID ..., roles of containers and
            instances).
        secret_access_key: belongs to access_key_id.
        session_token: for temporary credentials.
        allow_http: whether the endpoint may be plain HTTP.
        pack_bytes: approximate size of a pack.
        refresh_s: seconds between two listings of other hosts' packs.
        history_s: the first listing goes back this many seconds.
        most_entries: the most objects that are known at a time, about 400 bytes of memory each.

    Raises:
        ValueError: a value is not possible.
    """

    bucket: str
    prefix: str = "prefixd/"
    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    allow_http: bool = False
    pack_bytes: int = 4 << 20
    refresh_s: float = 5.0
    history_s: float = 86400.0
    most_entries: int = 500_000

    def __post_init__(self) -> None:
        if not self.bucket:
            raise ValueError("bucket is empty; set its name")
        if not self.prefix.endswith("/") or self.prefix.startswith("/") or "//" in self.prefix:
            raise ValueError(f"prefix is {self.prefix!r}; set something like 'prefixd/'")
        if (self.access_key_id is None) != (self.secret_access_key is None):
            raise ValueError("one of access_key_id and secret_access_key is missing; set both or none")
        if self.endpoint is not None:
            self._check_endpoint(self.endpoint)
        for name in ("pack_bytes", "refresh_s", "history_s", "most_entries"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; set more than 0")

    def _check_endpoint(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[^!-~]", endpoint):
            raise ValueError(f"endpoint is {endpoint!r}; set a URL like 'https://minio.example:9000'")
        if parts.username is not None or parts.password is not None:
            raise ValueError("endpoint has a user or password; set access_key_id and secret_access_key")
        if parts.scheme == "http" and not self.allow_http:
            raise ValueError(f"endpoint is {endpoint!r}, which is not encrypted; use https or set allow_http")

    @property
    def address(self) -> str:
        """For messages: "s3://bucket/prefix", or the endpoint before bucket and prefix."""
        return f"{self.endpoint.rstrip('/') if self.endpoint else 's3:/'}/{self.bucket}/{self.prefix}"
