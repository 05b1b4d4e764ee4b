"""Completes keys, tenants and models in a shell, by what the daemon of `PREFIXD_ADDRESS`, or of this host, has.

Without an answer within a second there is nothing to complete, and no error: the shell shows what this prints.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from prefixd.base.setting_sources import find_socket

if TYPE_CHECKING:
    from prefixd.client import AsyncClient

_MOST_KEYS = 50
_TIMEOUT_S = 1.0


def complete_keys(incomplete: str) -> list[str]:
    """Returns keys of the most recently used prefixes."""

    async def keys(client: AsyncClient) -> Iterable[str]:
        return [prefix.key for prefix in (await client.prefixes(limit=_MOST_KEYS)).prefixes]

    return _beginning_with(incomplete, keys)


def complete_tenants(incomplete: str) -> list[str]:
    """Returns names of tenants."""

    async def names(client: AsyncClient) -> Iterable[str]:
        return [tenant.name for tenant in await client.tenants()]

    return _beginning_with(incomplete, names)


def complete_models(incomplete: str) -> list[str]:
    """Returns names of the daemon's models."""

    async def names(client: AsyncClient) -> Iterable[str]:
        return [model.name for model in (await client.stats()).models]

    return _beginning_with(incomplete, names)


def complete_namespaces(incomplete: str) -> list[str]:
    """Returns names of namespaces."""

    async def names(client: AsyncClient) -> Iterable[str]:
        stats = await client.stats()
        models = {model.namespace: model.name for model in stats.models}
        return dict.fromkeys(models.get(each.namespace.name, each.namespace.name) for each in stats.namespaces)

    return _beginning_with(incomplete, names)


def _beginning_with(incomplete: str, look: Callable[[AsyncClient], Awaitable[Iterable[str]]]) -> list[str]:
    from prefixd.client import AsyncClient, ClientError

    async def ask() -> Iterable[str]:
        address = os.environ.get("PREFIXD_ADDRESS") or f"unix:{find_socket(os.environ)}"
        async with AsyncClient(address, name="prefixd completion", memory="streamed", timeout_s=_TIMEOUT_S) as client:
            return await look(client)

    try:
        found = asyncio.run(ask())
    except (ClientError, OSError, ValueError):
        return []
    return [name for name in found if name.startswith(incomplete) and name.isprintable()]
