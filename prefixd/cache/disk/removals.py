"""Removes blocks from the durable tier: evicted, forgotten, or damaged ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import cast

import numpy as np

from prefixd.cache.disk.records import DiskRecords, Identity
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.placement.movement import Movement, UrgentLock, to_the_end
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd_swap import StorageError
from prefixd_swap.tiers import StoreTier
from prefixd_swap.transfers import Urgency

_REMOVED_AT_ONCE = 1024  # blocks, while the lock is held


class DiskRemovals:
    """Removes blocks from the durable tier.

    Args:
        placement: records where blocks are.
        records: names blocks on disk.
        lock: serializes changes of the store.
        failed: called with an error.
    """

    def __init__(
        self,
        placement: Placement,
        records: DiskRecords,
        lock: UrgentLock,
        failed: Callable[[StorageError], None],
    ) -> None:
        self._placement = placement
        self._store = cast("StoreTier", placement.tiers.durable)  # without one, nothing is removed
        self._records = records
        self._lock = lock
        self._failed = failed
        self._leaving: list[Sequence[Identity]] = []

    @property
    def leaving(self) -> Iterable[Identity]:
        """Blocks that have left the tries and are about to leave the index."""
        return chain.from_iterable(self._leaving)

    @contextmanager
    def leave(self, ids: Sequence[Identity]) -> Iterator[None]:
        """A context for removing blocks from the index that have left the tries; `ids` may grow meanwhile."""
        self._leaving.append(ids)
        try:
            yield
        finally:
            self._leaving = [each for each in self._leaving if each is not ids]

    async def remove(self, trie: Trie, ids: list[Identity], *, damaged: bool = False) -> None:
        """Removes blocks that have left the trie; returns when that is durable.

        `damaged`: their index records are damaged, see `SlabStore.remove`.

        Raises:
            StorageError: I/O failed; blocks are removed when the disk works again, or return at the next start.
        """
        if ids:
            with self.leave(ids):
                await to_the_end(self._remove(trie, ids, damaged))

    async def _remove(self, trie: Trie, ids: list[Identity], damaged: bool) -> None:
        movement, store = Movement(Urgency.WRITE_BACK), self._store
        for start in range(0, len(ids), _REMOVED_AT_ONCE):
            some = ids[start : start + _REMOVED_AT_ONCE]
            async with self._lock.hold(movement):
                rows = self._records.rows(trie, some)
                back = set(self._records.stored(trie, rows[rows >= 0]).tolist())  # written again since
                gone = [each for each, row in zip(some, rows.tolist(), strict=True) if row not in back]
                try:
                    await store.remove(gone, movement.urgency, damaged=damaged)
                except StorageError as error:
                    self._failed(error)
                    raise
            self._placement.retry_without_room()  # the slots are free now

    def forget_in_memory(self, trie: Trie, rows: Sequence[int]) -> tuple[int, list[Identity]]:
        """Drops different blocks, children before parents, from the trie and all tiers; skips those that are held,
        kept, pinned or have other children.

        Returns how many went, and those that the index still has: the caller removes them there.
        """
        going = trie.all_removable(rows)
        identities = self._records.identities(trie, self._records.stored(trie, going))
        self._placement.discard(trie, going)
        return len(going), identities

    # -- making room for a write ---------------------------------------------------------------------------------

    async def drop_groups(self, expired: Sequence[tuple[Trie, Rows, GroupMask]], movement: Movement) -> int:
        """Drops bytes of some KV groups that are not held, from the trie and then from the store.

        Returns the number of blocks that lost bytes.
        """
        gone = [
            (trie, rows, groups)
            for trie, rows, groups in expired
            if self._placement.drop(trie, rows, self._store, groups)
        ]
        if gone:
            await self._store.drop_parts(self._parts_of(gone), movement.urgency)
        return sum(len(rows) for _, rows, _ in gone)

    async def evict(self, victims: Sequence[tuple[Trie, Rows]], with_page: bool, movement: Movement) -> int:
        """Drops blocks that are not held, children before parents, from the trie and then from the store.

        A block with children on disk keeps its record without bytes. Returns the number of blocks that lost bytes.
        """
        store, removed = self._store, list[Identity]()
        emptied: list[tuple[Trie, Rows, GroupMask]] = []
        for trie, rows in victims:
            leaves, inner = _leaves_first(trie, rows, store.level) if with_page else (rows, rows[:0])
            identities = self._records.identities(trie, leaves)
            if self._placement.drop(trie, leaves, store, with_page=with_page):
                left = trie.any_part[leaves] & np.uint8(1 << store.level)
                removed += [each for each, stays in zip(identities, left.tolist(), strict=True) if not stays]
            groups = trie.there[inner, store.level].copy()
            if self._placement.drop(trie, inner, store, groups):
                gone = trie.there[inner, store.level] == 0
                emptied.append((trie, inner[gone], groups[gone]))
        if emptied:
            await store.drop_parts(self._parts_of(emptied), movement.urgency)
        if removed:
            await store.remove(removed, movement.urgency)
        return len(removed) + sum(len(rows) for _, rows, _ in emptied)

    def _parts_of(self, dropped: Sequence[tuple[Trie, Rows, GroupMask]]) -> list[tuple[bytes, bytes, list[int]]]:
        """The argument of `StoreTier.drop_parts` for groups that were dropped."""
        return [
            (*self._records.identity(trie, row), np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist())
            for trie, rows, groups in dropped
            for row, mask in zip(rows.tolist(), groups.tolist(), strict=True)
        ]


def _leaves_first(trie: Trie, rows: Rows, level: int) -> tuple[Rows, Rows]:
    """Splits `rows`, children before parents: those without children on that level once earlier rows are gone;
    others."""
    gone: Counter[int] = Counter()
    leaves, inner = [], []
    for row, children, parent in zip(
        rows.tolist(), trie.tier_children[rows, level].tolist(), trie.parent[rows].tolist(), strict=True
    ):
        if children == gone[row]:
            leaves.append(row)
            gone[parent] += 1
        else:
            inner.append(row)
    return np.array(leaves, np.int64), np.array(inner, np.int64)
