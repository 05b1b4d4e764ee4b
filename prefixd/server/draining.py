"""Drains the daemon: it takes no new work, finishes running requests and writes all blocks that are not on disk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from prefixd.base.errors import PreconditionError, UnavailableError
from prefixd.cache import TieredCache
from prefixd.server.drain_state import Draining
from prefixd.serving.models.models import Models

log = logging.getLogger(__name__)


class Drain:
    """Drains the daemon. `run` can be called again while calls still store blocks.

    Args:
        cache: its blocks are written to disk.
        models: their requests are finished; None in a sidecar.
        draining: set by the first drain, until `undo`.
        timeout_s: returns how long running requests and calls may take; called when a drain waits for them.
        on_change: called when `draining` has been set or cleared.
    """

    def __init__(
        self,
        cache: TieredCache,
        models: Models | None,
        draining: Draining,
        timeout_s: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._cache = cache
        self._models = models
        self._draining = draining
        self._on_change = on_change
        self._drained: asyncio.Task[tuple[int, int]] | None = None
        self._before = (0, 0)  # blocks written to disk and requests finished when the first drain began

    async def run(self) -> tuple[int, int]:
        """Drains the daemon; a call during a drain waits for that drain.

        Returns the numbers of blocks written to disk and of requests finished since the first drain began.
        """
        if self._drained is None or self._drained.done():
            self._drained = asyncio.create_task(self._drain(), name="drain")
        return await asyncio.shield(self._drained)

    def undo(self) -> bool:
        """Takes new work again; returns False if the daemon was not drained.

        Raises:
            PreconditionError: a drain is under way.
        """
        if self._drained is not None and not self._drained.done():
            raise PreconditionError("a drain is under way; undrain the daemon when it has ended")
        was_draining = self._draining.is_set()
        self._draining.clear()
        self._on_change()
        if was_draining:
            log.info("undrained: the daemon takes new work again")
        return was_draining

    async def _drain(self) -> tuple[int, int]:
        again = self._draining.is_set()
        if not again:
            self._before = self._count_done()
        self._draining.set()
        self._on_change()
        if self._models is not None:
            await self._finish_requests(self._models)
        timeout_s = self._timeout_s()
        try:
            await asyncio.wait_for(self._cache.mover.idle(), timeout_s)  # mostly for commits
        except TimeoutError:
            log.warning("calls that store or lease blocks still run after %g s; the daemon ends them", timeout_s)
        await self._cache.write_back.flush()
        written, finished = (now - before for now, before in zip(self._count_done(), self._before, strict=True))
        log.info("drained: %d requests finished, %d blocks written to disk", finished, written)
        return written, finished

    async def _finish_requests(self, models: Models) -> None:
        timeout_s = self._timeout_s()
        try:
            await asyncio.wait_for(models.idle(), timeout_s)
        except TimeoutError:
            log.warning("requests still run after %g s; the daemon ends them", timeout_s)
            error = UnavailableError(f"the daemon drained for {timeout_s:g} s and ended the request; send it again")
            await asyncio.gather(*(host.dispatcher.end_all(error) for host in models.hosts.values()))

    def _count_done(self) -> tuple[int, int]:
        return self._cache.write_back.written, 0 if self._models is None else self._models.finished
