"""The figures as pages: Prometheus' formats and JSON.

The event loop takes the figures, since only it may read the cache; a thread writes the page. One page at a time is
made, so that scrapers together do not take the whole event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prefixd.base.plain_messages import to_plain
from prefixd.server.figures.metrics import metrics_page
from prefixd.v1 import admin_pb2 as pb
from prefixd_swap import started_threads

Page = TypeVar("Page")


class FigurePages:
    """Writes the figures as pages.

    Args:
        take: returns the figures (`Snapshot.take`); called on the event loop, once for each page.

    Raises:
        OutOfMemoryError: the thread that writes the pages cannot be started.
    """

    def __init__(self, take: Callable[[float], Awaitable[pb.StatsResponse]]) -> None:
        self._take = take
        self._threads = started_threads(1, "prefixd-metrics")
        self._rendering = asyncio.Lock()

    def close(self) -> None:
        """Ends the thread."""
        self._threads.shutdown()

    async def metrics(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics and their content type, in the format that the header `Accept` asks for."""
        return await self._page(lambda stats: metrics_page(stats, accept))

    async def stats(self, last_s: float = 0.0) -> bytes:
        """Returns the figures as JSON, as `prefixd stats --json --last` prints them.

        Raises:
            InvalidArgumentError: so long a period is not kept.
        """
        return await self._page(lambda stats: json.dumps(to_plain(stats)).encode(), last_s)

    async def _page(self, write: Callable[[pb.StatsResponse], Page], last_s: float = 0.0) -> Page:
        async with self._rendering:
            stats = await self._take(last_s)
            return await asyncio.get_running_loop().run_in_executor(self._threads, write, stats)
