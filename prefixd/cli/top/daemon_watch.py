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

LAST_S = 3600.0
"""The stretch of time whose hits are shown."""
_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A daemon's answer.

    Attributes:
        stats: its figures, with those of the last hour in `period`.
        requests: the last requests, engines' calls among them; None of a daemon that does not tell.
        at_s: when they came, of a clock without jumps.
    """

    stats: pb.StatsResponse
    at_s: float
    requests: list[pb.RequestInfo] | None = None


async def ask(client: AsyncClient) -> Snapshot:
    """Asks a daemon once. Raises ClientError."""
    from prefixd.client import UnsupportedError

    stats = await client.stats(last_s=LAST_S)
    try:
        requests = await client.why(last=_REQUESTS, calls=True)
    except UnsupportedError:  # of an earlier version
        requests = None
    return Snapshot(stats, time.monotonic(), requests)


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
