"""Whether a daemon accounts for everything."""

from __future__ import annotations

from prefixd.client import Client


def violations_of(client: Client) -> list[str]:
    """What `Admin.CheckIntegrity` has to say, a line each."""
    return list(client.check_integrity().violations)
