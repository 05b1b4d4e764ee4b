"""Brings prefixes up that clients have asked for ahead of need; each has an owner, and each tenant has a limit.

A prefetch takes time of the event loop, about half a millisecond a block if others are evicted for it. So if there are
several tenants, the prefetches of each run one after the other, some blocks at a time, for at most half of the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
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
"""The longest pause, however long some blocks took, for example if a disk does not answer."""


class Prefetches:
    """Brings prefixes to the shared tier at low urgency, until the sessions of their owners end.

    Args:
        mover: brings blocks.
        limit_bytes: the most bytes that one tenant's sessions may prefetch at once; half of the shared tier by default.
    """

    def __init__(self, mover: Mover, limit_bytes: int | None) -> None:
        self._mover = mover
        self._limit_bytes = mover.tiers.shared.capacity_bytes // 2 if limit_bytes is None else limit_bytes
        self._under_way: dict[Tenant, dict[str, set[asyncio.Task[None]]]] = {}  # by tenant and owner
        self._turns: dict[Tenant, PacedLine] = {}
        self._bytes_of: Counter[Tenant] = Counter()  # being brought

    def begin(self, session: Session, trie: Trie, path: Rows, brought: Callable[[], None]) -> int:
        """Starts bringing the bytes that a reader of the prefix `path` needs, from its beginning, up to the limit.

        Returns how many blocks are being brought; `brought` is called when they have been.
        """
        return self._begin(session.tenant, session.id, f"prefetch of session {session.id[:8]}", trie, path, brought)[0]

    async def bring(self, tenant: Tenant, owner: str, trie: Trie, path: Rows) -> None:
        """As `begin`, for a caller without a session; returns when they have been brought, or when somebody who needs
        the room has ended it."""
        _, task = self._begin(tenant, owner, owner, trie, path, lambda: None)
        if task is None:
            return
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            raise

    def _begin(
        self, tenant: Tenant, owner: str, hold: str, trie: Trie, path: Rows, brought: Callable[[], None]
    ) -> tuple[int, asyncio.Task[None] | None]:
        shared, block_bytes = self._mover.tiers.shared, sum(map(round_to_slot, trie.part_bytes))
        if not self._mover.tiers.exists(shared):
            return 0, None
        most = max(0, self._limit_bytes - self._bytes_of[tenant]) // block_bytes
        lacking = np.flatnonzero(trie.lacking(path, shared.level, trie.needed(len(path))))
        if len(lacking) > most:
            path = trie.usable(path[: lacking[most]])
            lacking = np.flatnonzero(trie.lacking(path, shared.level, trie.needed(len(path))))
        if not len(lacking):
            return 0, None
        beginning = Beginning(self._mover, hold, Reader(trie, path, 0, len(path)), set())
        task = self._mover.spawn(beginning.bring(partial(self._bring, tenant)))
        nbytes = len(lacking) * block_bytes
        self._under_way.setdefault(tenant, {}).setdefault(owner, set()).add(task)
        self._bytes_of[tenant] += nbytes
        task.add_done_callback(lambda task: self._ended(tenant, owner, beginning, task, nbytes, brought))
        return len(lacking), task

    async def _bring(self, tenant: Tenant, trie: Trie, rows: Rows, tier: MemoryTier, wanted: GroupMask | None) -> int:
        """As `Mover.bring`; if there are several tenants, in turns with the tenant's other prefetches."""
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
                break  # later blocks must not take room that these lack
        return there

    def end(self, session: Session) -> None:
        """Cancels a session's prefetches."""
        for task in self._under_way.get(session.tenant, {}).get(session.id, ()):
            task.cancel()

    async def end_of(self, tenant: Tenant) -> bool:
        """Ends a tenant's prefetches and their holds, for a caller that needs room; returns whether there were any."""
        tasks = [task for some in self._under_way.get(tenant, {}).values() for task in some]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        return bool(tasks)

    def _ended(
        self,
        tenant: Tenant,
        owner: str,
        beginning: Beginning,
        task: asyncio.Task[None],
        nbytes: int,
        brought: Callable[[], None],
    ) -> None:
        beginning.hold.end()
        self._bytes_of[tenant] -= nbytes
        of_tenant = self._under_way[tenant]
        of_tenant[owner].remove(task)
        if not of_tenant[owner]:
            del of_tenant[owner]
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("a prefix could not be brought up ahead of need: %s", error)
        else:
            brought()
