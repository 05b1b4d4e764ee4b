"""Drops blocks that cannot be read from disk, with their descendants."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.cache.disk.records import DiskRecords, Identity
from prefixd.cache.disk.removals import DiskRemovals
from prefixd.cache.index.children import Descendants, MovedError
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.placement.placement import Placement
from prefixd.observability.eviction_journal import Reason, because
from prefixd_swap import ChecksumError, RecordDamagedError, StorageError

log = logging.getLogger(__name__)

_DROPPED_AT_ONCE = 512  # descendants of damaged blocks


@dataclass(frozen=True, slots=True)
class Damage:
    """A block with damaged bytes on disk."""

    identity: Identity
    error: StorageError
    dropped: int
    """Blocks that left the disk: this one and descendants."""


class DamagedBlocks:
    """Drops damaged blocks.

    Args:
        placement: records where blocks are.
        records: names blocks on disk.
        removals: removes blocks from the index.
    """

    def __init__(self, placement: Placement, records: DiskRecords, removals: DiskRemovals) -> None:
        self._placement = placement
        self._records = records
        self._removals = removals
        self.busy: set[asyncio.Task[None]] = set()
        """Removals of damaged blocks under way."""

    def drop(self, trie: Trie, rows: Rows, error: StorageError) -> int:
        """Drops copies on disk that cannot be read, even if they are held.

        A block without another copy is no longer matched and is dropped with its descendants that are not held; one in
        memory is written again by write-back. The index records are removed in the background, see `busy`. Counts the
        blocks under `lost`.

        Args:
            trie: the blocks' trie.
            rows: rows that have a copy on disk.
            error: why they cannot be read.

        Returns:
            The number of blocks that left the disk, without descendants if more than 512 of them leave it later.
        """
        with because(Reason.DAMAGED):
            return self._drop(trie, rows, error)

    def _drop(self, trie: Trie, rows: Rows, error: StorageError) -> int:
        placement = self._placement
        why = "disk read failed"
        if isinstance(error, ChecksumError):
            why = "checksum mismatch on disk"
        elif isinstance(error, RecordDamagedError):
            why = "damaged index record"
        placement.lost[why] += len(rows)
        more = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
        log.error("block %s%s dropped, to be computed again: %s", trie.key(int(rows[0])).hex(), more, error)
        damaged = [self._records.identity(trie, row) for row in rows.tolist()]
        children: list[Identity] = []
        placement.discard_copies(trie, rows, placement.tiers.require_durable())
        emptied = rows[trie.any_part[rows] == 0]
        if len(emptied) < len(rows):
            placement.changed.set()  # so that write-back writes the others again
        walk = Descendants(trie, emptied)
        descendants = walk.take(_DROPPED_AT_ONCE)
        if walk.done:
            children += self._removals.forget_in_memory(trie, descendants[::-1])[1]
        else:
            self._in_background(self._drop_descendants(trie, emptied, trie.generation[emptied]))
        placement.sweep(trie, emptied)
        self._in_background(self._remove_damaged(trie, children, damaged, isinstance(error, RecordDamagedError)))
        return len(damaged) + len(children)

    def _in_background(self, removal: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(removal)
        self.busy.add(task)
        task.add_done_callback(self.busy.discard)

    async def _drop_descendants(self, trie: Trie, roots: Rows, generations: npt.NDArray[np.int32]) -> None:
        """Drops descendants of blocks without a copy, except held ones, a part in each turn of the event loop.

        Stops early if a block is removed meanwhile; the rest is not matched and gets evicted like other blocks.
        """
        found: list[int] = []
        before: list[int] = []  # their generations
        walk = Descendants(trie, roots[trie.generation[roots] == generations])
        with suppress(MovedError):
            while not walk.done:
                await give_way()
                rows = walk.take(_DROPPED_AT_ONCE)
                found += rows
                before += trie.generation[rows].tolist()
        for end in range(len(found), 0, -_DROPPED_AT_ONCE):
            await give_way()
            some = slice(max(end - _DROPPED_AT_ONCE, 0), end)
            rows_now = np.array(found[some], np.int64)
            same = rows_now[trie.generation[rows_now] == np.array(before[some])][::-1].tolist()
            with suppress(StorageError):  # reported; the records are removed when the disk works again
                await self._removals.remove(trie, self._removals.forget_in_memory(trie, same)[1])

    async def _remove_damaged(
        self, trie: Trie, children: list[Identity], damaged: list[Identity], records: bool
    ) -> None:
        """Removes damaged blocks after their descendants; `records`: the damage is in their index records."""
        with (
            self._removals.leave(damaged),
            suppress(StorageError),
        ):  # reported; the records are removed when the disk works again
            await self._removals.remove(trie, children if records else children + damaged)
            await self._removals.remove(trie, damaged if records else [], damaged=True)
