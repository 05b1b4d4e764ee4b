"""Watches of sessions: a session has at most one at a time, and the watch ends with the session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefixd.base.errors import ExhaustedError, SessionEndedError
from prefixd.cache import Session, TieredCache
from prefixd.server.kv_events.block_watch import BlockWatch
from prefixd.server.kv_events.loop_share import LoopShare

_REPLACED_S = 1.0
"""Time for a session's former watch to end after its client has cancelled it."""
_CHECK_S = 0.02


class Watches:
    """Watches of open sessions.

    Args:
        cache: the cache.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._share = LoopShare()
        self._timeouts: dict[str, asyncio.Timeout] = {}  # that end the watches, by session id

    @asynccontextmanager
    async def watch(self, session: Session) -> AsyncGenerator[BlockWatch]:
        """Opens the only watch of a session.

        Raises:
            ExhaustedError: the session has another watch.
            SessionEndedError: the session ended; also raised inside the block, at any await.
        """
        end_s = time.monotonic() + _REPLACED_S
        while session.id in self._timeouts:
            if time.monotonic() > end_s:
                session.tenant.refused["watches"] += 1
                raise ExhaustedError(
                    f"session {session.id[:8]} of tenant {session.tenant.name} has a call of WatchBlocks under way, "
                    "and a session may have one; read that one, end it first, or open another session"
                )
            await asyncio.sleep(_CHECK_S)
        self._cache.leases.session(session.id)
        try:
            async with asyncio.timeout(None) as timeout:
                self._timeouts[session.id] = timeout
                try:
                    yield BlockWatch(self._cache, session, self._share)
                finally:
                    del self._timeouts[session.id]
        except TimeoutError:
            raise SessionEndedError(f"session {session.id[:8]}, whose blocks were watched, has ended") from None

    def end(self, session: Session) -> None:
        """Ends the watch of a session that has ended, even while the watch waits for its client to read."""
        if (timeout := self._timeouts.get(session.id)) is not None:
            timeout.reschedule(asyncio.get_running_loop().time())
