"""Takes the disk tier out of service after failures, and puts it back when a probe succeeds.

Writing and reading fail separately. A disk that refuses writes (full, read-only, failing) is still read; blocks on one
that refuses reads are not matched. A probe tries the device, so that the tier comes back without requests. Unwritten
blocks stay in memory while there is room, and unreadable ones are matched again when the disk can be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from typing import cast

import numpy as np

from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.placement import Placement
from prefixd.cache.troubles import tier_part
from prefixd_swap import LostBytesError, StorageError
from prefixd_swap.tiers import Int64s, StoreTier

FIRST_PROBE_S = 0.25
LONGEST_PROBE_S = 4.0
INSPECT_S = 1.0

_SHRUNK = "the file system has no room for more of it; free space or lower disk.bytes"

Drop = Callable[[Trie, Rows, StorageError], int]
"""(trie, rows, error): drops lost blocks and returns their number."""
Reread = Callable[[Trie, int], Awaitable[StorageError | None]]
"""(trie, row): the error of reading the block again, or None."""


class DiskHealth:
    """Decides whether the disk tier is read and written.

    Args:
        placement: records where blocks are.
        tries: all tries, by ordinal.
        still: a context in which the store does not change.
        drop: called with lost blocks.
        reread: tries to read a block again.
        revived: called when the store is written to again.
    """

    def __init__(
        self,
        placement: Placement,
        tries: list[Trie],
        still: Callable[[], AbstractAsyncContextManager[None]],
        drop: Drop,
        reread: Reread,
        revived: Callable[[], None],
    ) -> None:
        self._placement = placement
        self._troubles = placement.tiers.troubles
        self._store = cast("StoreTier", placement.tiers.durable)  # without one, nothing here is called
        self._tries = tries
        self._still = still
        self._drop = drop
        self._reread = reread
        self._revived = revived
        self._suspects: dict[tuple[int, int], int] = {}  # (trie, row) -> generation of blocks that could not be read
        self._failed = asyncio.Event()

    def write_failed(self, error: StorageError) -> None:
        """Stops writing until a probe succeeds."""
        self._store.writable = False
        self._begin(error)

    def shrunk(self, error: StorageError) -> None:
        """Reports that the tier cannot grow; it continues with its current room."""
        self._begin(error)

    def read_failed(self, trie: Trie, row: int, error: StorageError) -> None:
        """Stops matching blocks on disk until a probe succeeds, which reads this block again."""
        self._suspects[trie.ordinal, row] = int(trie.generation[row])
        self._set_readable(False)
        self._begin(error)

    async def watch(self) -> None:
        """Inspects the disk's files, and probes the disk after a failure; runs for ever."""
        wait_s = FIRST_PROBE_S
        while True:
            while not self._failed.is_set():
                await self.inspect()
                with suppress(TimeoutError):
                    async with asyncio.timeout(INSPECT_S):  # not wait_for: see RemoteHealth._try_writing
                        await self._failed.wait()
            await asyncio.sleep(wait_s)
            await self.inspect()
            well = await self.revive()
            wait_s = FIRST_PROBE_S if well else min(2 * wait_s, LONGEST_PROBE_S)

    async def inspect(self) -> None:
        """Drops blocks whose file was deleted or cut off; those that are in memory are written again."""
        try:
            gone = await self._store.lost_slots()
        except StorageError as error:
            self.write_failed(error)
            return
        if len(gone):
            self._drop_all(gone, "its file was deleted or cut off")

    async def revive(self) -> bool:
        """Probes the disk now; returns whether it works."""
        async with self._still():
            return await self.revive_locked()

    async def revive_locked(self) -> bool:
        """As `revive`, for a caller that has the lock."""
        if not self._failed.is_set():
            return True
        try:
            if not self._store.readable:
                await self._store.try_read()
                await self._judge_suspects()
                self._set_readable(True)
            if not self._store.writable:
                await self._revive_writing()
            if await self._store.has_shrunk():
                return False
        except StorageError as error:
            self._begin(error)
            return False
        if not (self._store.readable and self._store.writable):  # it failed again meanwhile
            return False
        self._failed.clear()
        self._troubles.end(tier_part(self._store))
        self._placement.changed.set()
        return True

    async def _revive_writing(self) -> None:
        slots = [trie.slots[rows, self._store.level].ravel().astype(np.int64) for trie, rows in self._stored()]
        known = np.concatenate([np.zeros(0, np.int64), *slots])
        gone = await self._store.revive(known[known != NO_SLOT])
        self._store.writable = True
        self._troubles.begin(tier_part(self._store), _SHRUNK)  # the caller ends it if the tier can grow
        self._revived()
        self._placement.changed.set()
        if len(gone):
            self._drop_all(gone, "the index has lost the block")

    def _stored(self) -> list[tuple[Trie, Rows]]:
        """All blocks on disk."""
        return [
            (trie, np.flatnonzero(trie.any_part[: trie.rows] & np.uint8(1 << self._store.level)))
            for trie in self._tries
        ]

    def _drop_all(self, slots: Int64s, why: str) -> None:
        """Drops the blocks in `slots`."""
        for trie, rows in self._stored():
            lost: Rows = rows[np.isin(trie.slots[rows, self._store.level], slots).any(axis=1)]
            if len(lost):
                self._drop(trie, lost, LostBytesError(why))

    async def _judge_suspects(self) -> None:
        """Reads suspects again now that the device works, and drops those that still cannot be read."""
        while self._suspects:
            (ordinal, row), generation = next(iter(self._suspects.items()))
            trie = self._tries[ordinal]
            if trie.generation[row] == generation and trie.any_part[row] & (1 << self._store.level):
                error = await self._reread(trie, row)
                if (
                    error is not None
                    and trie.generation[row] == generation
                    and trie.any_part[row] & (1 << self._store.level)
                ):
                    self._drop(trie, np.array([row]), error)
            self._suspects.pop((ordinal, row), None)

    def _set_readable(self, readable: bool) -> None:
        if self._store.readable != readable:
            self._store.readable = readable
            for trie in self._tries:
                trie.offer(self._store.level, readable)
            self._placement.epoch += 1

    def _begin(self, error: StorageError) -> None:
        self._troubles.begin(tier_part(self._store), str(error))
        self._failed.set()
