"""Who watches the blocks: each session at most once at a time, and no longer than it is open."""

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
"""For a session's former watch to end, which its client has cancelled just now."""
_LOOK_S = 0.02


class Watches:
    """Watches of open sessions.

    Args:
        cache: the cache.
    """

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._share = LoopShare()
        self._until: dict[str, asyncio.Timeout] = {}  # by the ids of the sessions that are watched

    @asynccontextmanager
    async def watch(self, session: Session) -> AsyncGenerator[BlockWatch]:
        """The only watch of a session.

        Raises:
            ExhaustedError: it has another one.
            SessionEndedError: the session ended meanwhile, whatever was waited for inside.
        """
        end_s = time.monotonic() + _REPLACED_S
        while session.id in self._until:
            if time.monotonic() > end_s:
                session.tenant.refused["watches"] += 1
                raise ExhaustedError(
                    f"session {session.id[:8]} of tenant {session.tenant.name} has a call of WatchBlocks under way, "
                    "and a session may have one; read that one, end it first, or open another session"
                )
            await asyncio.sleep(_LOOK_S)
        self._cache.leases.session(session.id)
        try:
            async with asyncio.timeout(None) as until:
                self._until[session.id] = until
                try:
                    yield BlockWatch(self._cache, session, self._share)
                finally:
                    del self._until[session.id]
        except TimeoutError:
            raise SessionEndedError(f"session {session.id[:8]}, whose blocks were watched, has ended") from None

    def end(self, session: Session) -> None:
        """The session has ended: so does its watch, also one that waits for its client to read."""
        if (until := self._until.get(session.id)) is not None:
            until.reschedule(asyncio.get_running_loop().time())
