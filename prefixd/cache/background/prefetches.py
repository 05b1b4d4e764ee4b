"""Prefixes that clients have asked for ahead of need: each has an owner, and each tenant has a limit.

What is brought up takes the event loop, about half a millisecond a block where others have to go for it, though nobody
waits for it. So where there are several tenants those of one tenant are brought up some blocks at a time, one after the
other, and not for more than half of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from functools import partial

import numpy as np

from prefixd.base.tenancy.fairness import PacedLine
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.beginnings import Beginning, Reader
from prefixd.cache.moving.mover import Mover
from prefixd.cache.rules import GroupMask
from prefixd.cache.sessions.sessions import Session
from prefixd_swap import round_to_slot
from prefixd_swap.tiers import MemoryTier
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

BLOCKS_AT_ONCE = 128
_LONGEST_PAUSE_S = 10.0
"""However long some blocks took, where a disk does not answer for example."""


class Prefetches:
    """Brings prefixes to the shared tier, when nobody waits for a block, until their owners' sessions end.

    Args:
        mover: brings them.
        limit_bytes: the most that one tenant may have on its way, all sessions together; half of the shared tier by
            default.
    """

    def __init__(self, mover: Mover, limit_bytes: int | None) -> None:
        self._mover = mover
        self._limit_bytes = mover.tiers.shared.capacity_bytes // 2 if limit_bytes is None else limit_bytes
        self._under_way: dict[str, set[asyncio.Task[None]]] = {}  # by session
        self._tasks_of: dict[Tenant, set[asyncio.Task[None]]] = {}
        self._turns: dict[Tenant, PacedLine] = {}
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
        owner, reader = f"prefetch of session {session.id[:8]}", Reader(trie, path, 0, len(path))
        beginning = Beginning(self._mover, owner, reader, set())
        task = self._mover.spawn(beginning.bring(partial(self._bring, session.tenant)))
        nbytes = len(lacking) * block_bytes
        self._under_way.setdefault(session.id, set()).add(task)
        self._tasks_of.setdefault(session.tenant, set()).add(task)
        self._bytes_of[session.tenant] += nbytes
        task.add_done_callback(lambda task: self._ended(session, beginning, task, nbytes))
        return len(lacking)

    async def _bring(self, tenant: Tenant, trie: Trie, rows: Rows, tier: MemoryTier, wanted: GroupMask | None) -> int:
        """As `Mover.bring`, in turns with the tenant's other prefetches where there are several tenants."""
        mover = self._mover
        if mover.use.tenants.calling == 1:
            return await mover.bring(trie, rows, tier, wanted, urgency=Urgency.PREFETCH)
        turns, time = self._turns.setdefault(tenant, PacedLine()), asyncio.get_running_loop().time
        there = 0
        for start in range(0, len(rows), BLOCKS_AT_ONCE):
            some = slice(start, start + BLOCKS_AT_ONCE)
            async with turns:
                begun_s = time()
                try:
                    groups = None if wanted is None else wanted[some]
                    came = await mover.bring(trie, rows[some], tier, groups, urgency=Urgency.PREFETCH)
                finally:  # a pause as long as that took
                    turns.pay(min(time() - begun_s, _LONGEST_PAUSE_S))
            there += came
            if came < len(rows[some]):
                break  # no later one takes room that these lack
        return there

    def end(self, session: Session) -> None:
        """Drops what has not been moved yet of a session's."""
        for task in self._under_way.get(session.id, ()):
            task.cancel()

    async def end_of(self, tenant: Tenant) -> bool:
        """Lets go of what a tenant's prefetches hold, for somebody who waits for room; whether there were any."""
        tasks = list(self._tasks_of.get(tenant, ()))
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return bool(tasks)

    def _ended(self, session: Session, beginning: Beginning, task: asyncio.Task[None], nbytes: int) -> None:
        beginning.hold.end()
        self._bytes_of[session.tenant] -= nbytes
        self._tasks_of[session.tenant].discard(task)
        under_way = self._under_way[session.id]
        under_way.remove(task)
        if not under_way:
            del self._under_way[session.id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a prefix could not be brought up ahead of need: %s", error)
