"""moto's S3 server in a process of its own. It proves that requests are right, not that they are fast."""

from __future__ import annotations

import importlib.util
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store as Bucket

from prefixd_swap.stores import S3Options
from tests.remote.processes import Process, free_port, listens


@dataclass
class S3Server:
    """One that runs, with buckets as they are made."""

    port: int
    process: Process
    buckets: int = 0

    def new_bucket(self) -> str:
        """Makes an empty one."""
        self.buckets += 1
        name = f"bucket{self.buckets}"
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{name}", method="PUT", headers={"Host": f"127.0.0.1:{self.port}"}
        )
        with urllib.request.urlopen(request, timeout=10):
            return name

    def options(self, bucket: str, *, port: int | None = None, refresh_s: float = 0.2, **more: object) -> S3Options:
        """How to reach it; `port` of a proxy in front of it."""
        return S3Options(
            bucket=bucket,
            endpoint=f"http://127.0.0.1:{port or self.port}",
            region="us-east-1",
            access_key_id="key",
            secret_access_key="secret",
            allow_http=True,
            refresh_s=refresh_s,
            **more,  # type: ignore[arg-type]
        )

    def client(self, bucket: str) -> Bucket:
        """To look behind the store's back."""
        return Bucket(
            bucket,
            config={"endpoint": f"http://127.0.0.1:{self.port}", "access_key_id": "key", "secret_access_key": "secret"},
            client_options={"allow_http": True},
        )

    def paths(self, bucket: str) -> list[str]:
        """All objects of a bucket."""
        return [str(item["path"]) for page in obstore.list(self.client(bucket)) for item in page]


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Skips the test where moto is missing."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: make install")
    port = free_port()
    process = Process([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], folder / "log")
    try:
        process.wait_until(lambda: listens(port))
        yield S3Server(port, process)
    finally:
        process.end()
