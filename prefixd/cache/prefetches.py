"""Prefixes that clients have asked for ahead of need: each has an owner, and each tenant has a limit.

What is brought up takes the event loop, about half a millisecond a block where others have to go for it, though nobody
waits for it. So where there are several tenants those of one tenant are brought up some blocks at a time, one after the
other, and not for more than half of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import numpy as np

from prefixd.cache.groups import GroupMask
from prefixd.cache.holds import Hold
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.mover import Mover
from prefixd.cache.sessions import Session
from prefixd.tenants import Tenant
from prefixd_swap import round_to_slot
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

BLOCKS_AT_ONCE = 128
_LONGEST_PAUSE_S = 10.0
"""However long some blocks took, where a disk does not answer for example."""


class Prefetches:
    """Brings prefixes to the shared tier, when nobody waits for a block, until their owners' sessions end.

    Args:
        mover: brings them.
        limit_bytes: the most that one tenant may have on its way, all sessions together.
    """

    def __init__(self, mover: Mover, limit_bytes: int) -> None:
        self._mover = mover
        self._limit_bytes = limit_bytes
        self._under_way: dict[str, set[asyncio.Task[None]]] = {}  # by session
        self._turns: dict[Tenant, _Turns] = {}
        self._bytes_of: Counter[Tenant] = Counter()  # on their way

    def begin(self, session: Session, trie: Trie, path: Rows) -> int:
        """Starts to bring up what a reader of the prefix `path` needs, from its beginning on as far as the limit goes.

        Returns how many blocks are on their way for it.
        """
        shared, block_bytes = self._mover.tiers.shared, sum(map(round_to_slot, trie.part_bytes))
        if not self._mover.tiers.exists(shared):
            return 0
        most = max(0, self._limit_bytes - self._bytes_of[session.tenant]) // block_bytes
        lacking = np.flatnonzero(trie.lacking(path, shared.level, trie.needed(len(path))))
        if len(lacking) > most:
            path = trie.usable(path[: lacking[most]])
            lacking = np.flatnonzero(trie.lacking(path, shared.level, trie.needed(len(path))))
        if not len(lacking):
            return 0
        wanted = trie.needed(len(path))
        hold = self._mover.placement.holds.hold(f"prefetch of session {session.id[:8]}", trie, path, shared, wanted)
        task = self._mover.spawn(self._bring(session.tenant, trie, path, wanted))
        nbytes = len(lacking) * block_bytes
        self._under_way.setdefault(session.id, set()).add(task)
        self._bytes_of[session.tenant] += nbytes
        task.add_done_callback(lambda task: self._ended(session, hold, task, nbytes))
        return len(lacking)

    async def _bring(self, tenant: Tenant, trie: Trie, path: Rows, wanted: GroupMask) -> None:
        mover, shared = self._mover, self._mover.tiers.shared
        if mover.use.tenants.calling == 1:
            await mover.bring(trie, path, shared, wanted, urgency=Urgency.PREFETCH)
            return
        turns = self._turns.setdefault(tenant, _Turns())
        for start in range(0, len(path), BLOCKS_AT_ONCE):
            some = slice(start, start + BLOCKS_AT_ONCE)
            async with turns.turn():
                came = await mover.bring(trie, path[some], shared, wanted[some], urgency=Urgency.PREFETCH)
            if came < len(path[some]):
                break  # no later one takes room that these lack

    def end(self, session: Session) -> None:
        """Drops what has not been moved yet of a session's."""
        for task in self._under_way.get(session.id, ()):
            task.cancel()

    def _ended(self, session: Session, hold: Hold, task: asyncio.Task[None], nbytes: int) -> None:
        hold.end()
        self._bytes_of[session.tenant] -= nbytes
        under_way = self._under_way[session.id]
        under_way.remove(task)
        if not under_way:
            del self._under_way[session.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a prefix could not be brought up ahead of need: %s", error)


class _Turns:
    """Of one tenant's prefetches: after each there is a pause, as long as it took."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._next_s = 0.0

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Waits for a turn, and has it."""
        time = asyncio.get_running_loop().time
        async with self._turn:
            await asyncio.sleep(self._next_s - time())
            begun_s = time()
            try:
                yield
            finally:
                self._next_s = time() + min(time() - begun_s, _LONGEST_PAUSE_S)
