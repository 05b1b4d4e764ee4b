"""Changes of the index, made durable in groups, and the slots that they free.

The order is: data, then the index, then the slots of replaced and removed blocks become free.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from prefixd_swap.errors import RecordDamagedError, StorageError, SwapError
from prefixd_swap.slab.files.slab_file import SlabFile
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.group_commit import Commit, GroupCommit
from prefixd_swap.slab.index.block_record import record_slots
from prefixd_swap.slab.index.rows import Change

if TYPE_CHECKING:
    from prefixd_swap.slab.index.index import SlabIndex

log = logging.getLogger(__name__)


class StoreChanges:
    """Makes changes durable, and counts those under way.

    Args:
        path: the store's folder, for messages.
        index: has the records.
        slabs: have the slots.
        lock: guards the slabs and this.
        sync: makes what was written to slabs durable.
    """

    def __init__(
        self,
        path: Path,
        index: SlabIndex,
        slabs: SlabFiles,
        lock: threading.Condition,
        sync: Callable[[set[SlabFile]], None],
    ) -> None:
        self.lock = lock
        self.commits = GroupCommit(self._flush)
        self.begun = 0
        """Writes and removals so far, `revive` included."""
        self.active = 0
        """Writes and removals under way."""
        self.orphaned = False
        """Whether slots are taken that no record names, because their record was damaged."""
        self._path = path
        self._index = index
        self._slabs = slabs
        self._sync = sync
        self._reviving = False
        self._closed = False

    @property
    def unsure(self) -> bool:
        """Whether the outcome of a commit is unknown."""
        return self.commits.interrupted or self._index.broken

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Counts a write or removal, so that `close` waits for it.

        Raises:
            StorageError: the store takes no changes now.
        """
        with self.lock:
            self._refuse_closed()
            if self.unsure:
                raise StorageError(f"a commit in {self._path} failed half-way; revive it or open the store again")
            if self._reviving:
                raise StorageError(f"the store in {self._path} is being revived; try again")
            self.active += 1
            self.begun += 1
        try:
            yield
        finally:
            with self.lock:
                self.active -= 1
                self.lock.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Excludes all other changes meanwhile: for `revive`.

        Raises:
            StorageError: the store is closed.
        """
        with self.lock:
            self._refuse_closed()
            self.lock.wait_for(lambda: not self.active)
            self.active = 1
            self.begun += 1
            self._reviving = True
        try:
            yield
        finally:
            with self.lock:
                self.active = 0
                self._reviving = False
                self.lock.notify_all()

    def close(self) -> bool:
        """Waits for changes under way and refuses later ones; False if closed before. The caller holds `lock`."""
        if self._closed:
            return False
        self._closed = True
        self.lock.wait_for(lambda: not self.active)
        return True

    def _refuse_closed(self) -> None:
        if self._closed:
            raise StorageError(f"the store in {self._path} is closed; open it again")

    def _flush(self, batch: Sequence[Commit]) -> None:
        self._sync(set[SlabFile]().union(*(commit.slabs for commit in batch)))
        changes: list[Change] = [change for commit in batch for change in commit.changes]
        gone = iter(self._index.apply(changes))
        for commit in batch:
            replaced = [(change, old) for change, old in zip(commit.changes, gone, strict=False) if old]
            self._free_slots_of(replaced, commit.damaged)

    def _free_slots_of(self, replaced: Sequence[tuple[Change, bytes]], damaged: bool) -> None:
        """Free the slots that records named before the changes and no longer name.

        The commit is durable by now and must not fail: slots of a damaged record stay taken until the store is revived
        or opened again.
        """
        of_records: list[list[int]] = []
        for change, old in () if damaged else replaced:
            try:
                of_records.append(list(_freed(change, old)))
            except RecordDamagedError as error:
                self._orphan(error)
        slots = [slot for of_record in of_records for slot in of_record]
        with self.lock:
            self.orphaned |= damaged and bool(replaced)
            try:
                self._slabs.free(np.array(slots, np.int64))
            except SwapError:  # nothing was freed: one of the records names a slot of another block
                for of_record in of_records:
                    try:
                        self._slabs.free(np.array(of_record, np.int64))
                    except SwapError as error:
                        self._orphan(error)

    def _orphan(self, error: SwapError) -> None:
        with self.lock:
            self.orphaned = True
        log.error("a damaged record has left the index, and its slots are free only after a restart: %s", error)


def _freed(change: Change, old: bytes) -> set[int]:
    """Slots that a record named before a change and does not name after it.

    Raises:
        RecordDamagedError: the record is damaged.
    """
    new = change[1] if change[1] is None or isinstance(change[1], bytes) else change[1](old)
    named = {slot for slot, _ in record_slots(old)}
    return named if new is None else named.difference(slot for slot, _ in record_slots(new))
