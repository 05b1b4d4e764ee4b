"""Blocks that have left the tries leave the index on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

from prefixd.cache.disk_records import DiskRecords, Identity
from prefixd.cache.index.trie import Trie
from prefixd.cache.movement import Movement
from prefixd.cache.tiers import Tiers
from prefixd.cache.uninterrupted import to_the_end
from prefixd.cache.urgent_lock import UrgentLock
from prefixd_swap import StorageError
from prefixd_swap.transfers import Urgency

_REMOVED_AT_ONCE = 1024  # blocks, while the lock is held


class DiskRemovals:
    """Removes blocks from the durable tier, in order with whatever else changes it.

    Args:
        tiers: the durable tier is one of them.
        records: the blocks' names on disk.
        lock: orders whatever changes the store.
        failed: told of an error.
        removed: told when blocks have left the index: their slots are free from then on.
    """

    def __init__(
        self,
        tiers: Tiers,
        records: DiskRecords,
        lock: UrgentLock,
        failed: Callable[[StorageError], None],
        removed: Callable[[], None],
    ) -> None:
        self._tiers = tiers
        self._records = records
        self._lock = lock
        self._failed = failed
        self._removed = removed
        self._leaving: list[Sequence[Identity]] = []

    @property
    def leaving(self) -> Iterable[Identity]:
        """Blocks that have left the tries, and are about to leave the index."""
        return chain.from_iterable(self._leaving)

    @contextmanager
    def leave(self, ids: Sequence[Identity]) -> Iterator[None]:
        """Around the removal from the index of blocks that have left the tries; `ids` may grow meanwhile."""
        self._leaving.append(ids)
        try:
            yield
        finally:
            self._leaving = [each for each in self._leaving if each is not ids]

    async def remove(self, trie: Trie, ids: list[Identity], *, damaged: bool = False) -> None:
        """Removes blocks that have left the trie; returns when that is durable.

        `damaged`: their records in the index are damaged, see `SlabStore.remove`.

        Raises:
            StorageError: I/O failed; the blocks are removed when the disk works again, or come back at the next start.
        """
        if ids:
            with self.leave(ids):
                await to_the_end(self._remove(trie, ids, damaged))

    async def _remove(self, trie: Trie, ids: list[Identity], damaged: bool) -> None:
        movement, store = Movement(Urgency.WRITE_BACK), self._tiers.require_durable()
        for start in range(0, len(ids), _REMOVED_AT_ONCE):
            some = ids[start : start + _REMOVED_AT_ONCE]
            async with self._lock.hold(movement):
                rows = self._records.rows(trie, some)
                back = set(self._records.stored(trie, rows[rows >= 0]).tolist())  # a write has replaced the record
                gone = [each for each, row in zip(some, rows.tolist(), strict=True) if row not in back]
                try:
                    await store.remove(gone, movement.urgency, damaged=damaged)
                except StorageError as error:
                    self._failed(error)
                    raise
            self._removed()
