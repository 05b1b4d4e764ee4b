"""Daemons that stand for hosts, each with its own data directory, and the store that they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.common import harness
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.v1 import admin_pb2
from prefixd_swap.stores.sealed import Seal

_WAIT_S = 120.0


class Secrets:
    """Files with a secret that the hosts share, and a key for those that encrypt."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.secret = b"a secret of this benchmark's hosts"
        self.key = b"a key with which they may encrypt"
        self.secret_file = _secret_file(folder / "secret", self.secret)
        self.key_file = _secret_file(folder / "key", self.key)

    def seal(self, *, encrypt: bool = False) -> Seal:
        return Seal(self.secret, self.key if encrypt else None)


def sharing(port: int, secrets: Secrets, *, encrypt: bool = False) -> dict[str, object]:
    """The settings of a host that shares the Valkey at that port of the loopback."""
    settings: dict[str, object] = {
        "remote.url": f"valkey://127.0.0.1:{port}",
        "remote.secret_file": secrets.secret_file,
    }
    if encrypt:
        settings["remote.encryption_key_file"] = secrets.key_file
    return settings


def cache_host(cpu_bytes: int, settings: Mapping[str, object], folder: Path | None = None) -> DaemonProcess:
    """A daemon that only caches, with a CPU tier and no disk. Without `folder` it is cold."""
    return DaemonProcess({"cpu.bytes": cpu_bytes, "disk.bytes": 0, **settings}, directory=folder)


def remote_stats(client: Client) -> admin_pb2.RemoteStats:
    """Returns the daemon's figures of the store. Raises BenchmarkError: it has none."""
    stats = client.stats()
    if not stats.HasField("remote"):
        raise harness.BenchmarkError("the daemon has no remote tier")
    return stats.remote


def wait_until_shared(client: Client, blocks: int) -> None:
    """Waits until the daemon has written `blocks` blocks to the store since its start.

    Raises BenchmarkError: it takes too long.
    """
    if not harness.wait_until(lambda: remote_stats(client).shared_blocks >= blocks, _WAIT_S):
        shared = remote_stats(client).shared_blocks
        raise harness.BenchmarkError(f"{shared} of {blocks} blocks were shared within {_WAIT_S:g} s")


def lost_in_store(client: Client) -> int:
    """Blocks that were missing or wrong when the daemon read them from the store, since its start."""
    return sum(count for reason, count in client.stats().lost_blocks.items() if "shared store" in reason)


def _secret_file(path: Path, secret: bytes) -> Path:
    path.write_bytes(secret)
    path.chmod(0o600)
    return path
