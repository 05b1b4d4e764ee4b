"""Asks a daemon again and again, also after it was restarted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prefixd.cli.connect import connected
from prefixd.cli.failures import CommandFailed, WrongUsage
from prefixd.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from prefixd.client import AsyncClient


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A daemon's answer.

    Attributes:
        stats: its figures.
        at_s: when they came, of a clock without jumps.
    """

    stats: pb.StatsResponse
    at_s: float


async def ask(client: AsyncClient) -> Snapshot:
    """Asks a daemon once. Raises ClientError."""
    return Snapshot(await client.stats(), time.monotonic())


async def watch(address: str | None, interval_s: float) -> AsyncIterator[Snapshot | CommandFailed]:
    """Yields a daemon's answers without end, `interval_s` apart; where it does not answer, the error.

    After an error it connects anew: the daemon may have been restarted.

    Raises:
        WrongUsage: the address and the credentials do not fit each other.
    """
    while True:
        try:
            async with connected(address) as client:
                while True:
                    yield await ask(client)
                    await asyncio.sleep(interval_s)
        except WrongUsage:
            raise
        except CommandFailed as error:
            yield error
        await asyncio.sleep(interval_s)
