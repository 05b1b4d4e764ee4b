"""A daemon with tenants: settings with their quotas, and tokens by which clients call for them over TCP."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prefixd.base.tenancy.tenants import Role
from prefixd.cli.demo.daemon_process import DaemonProcess

Quotas = Mapping[str, Mapping[str, object]]
"""By tenant, settings of `[tenants.NAME]`. Example: {"a": {"cpu_most": "8MiB", "sessions": 4}}."""


class House:
    """Tenants with quotas, each with tokens for each role. The default tenant has the clients at the unix socket.

    Args:
        directory: gets the file of tokens; not the daemon's own.
        quotas: of each tenant.
        port: of the TCP door; 0: any, another after a restart.
        tokens: number of tokens for each tenant and role; each is a caller of its own.
    """

    def __init__(self, directory: Path, quotas: Quotas, port: int = 0, tokens: int = 1) -> None:
        self._file = directory / "tokens"
        self._quotas = quotas
        self._port = port
        self._tokens = {
            (name, role): [secrets.token_hex(16) for _ in range(tokens)] for name in quotas for role in Role
        }
        lines = [
            f"{name}-{role}-{number} {role} {token} {name}\n"
            for (name, role), all_of_them in self._tokens.items()
            for number, token in enumerate(all_of_them)
        ]
        self._file.touch(mode=0o600)
        self._file.write_text("".join(lines))

    @property
    def settings(self) -> dict[str, object]:
        quotas = {
            f"tenants.{name}.{key}": value for name, quota in self._quotas.items() for key, value in quota.items()
        }
        return {
            "server.tcp": f"127.0.0.1:{self._port}",
            "server.insecure_tcp": True,
            "server.tokens": self._file,
            **quotas,
        }

    def token(self, tenant: str, role: Role = Role.CLIENT, number: int = 0) -> str:
        """Returns a token of a tenant with a role."""
        return self._tokens[tenant, role][number]


@contextmanager
def tenanted_daemon(settings: Mapping[str, object], quotas: Quotas) -> Iterator[tuple[DaemonProcess, House]]:
    """Yields a daemon that runs as long as the context, and its tenants."""
    with tempfile.TemporaryDirectory(prefix="prefixd-house-") as folder:
        house = House(Path(folder), quotas)
        with DaemonProcess({**settings, **house.settings}) as daemon:
            yield daemon, house
