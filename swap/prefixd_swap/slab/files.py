"""All slabs of a data directory: who has which slot, within a capacity. Not thread-safe; the store locks."""

from __future__ import annotations

import logging
from bisect import insort
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import DiskFullError, IntegrityError, LostBytesError, StorageError
from prefixd_swap.slab.file import INDEX_BITS, SlabFile, UnreadableSlabError
from prefixd_swap.slab.file_ops import FileOps, storage_error
from prefixd_swap.slab.io import DiskIo
from prefixd_swap.slots import MIN_SLOTS, SlotRun, round_to_slot, slots_per_slab

SLAB_BYTES = 64 << 20
MAX_SLABS = 256
"""Larger capacities have larger slabs: each is an open file, and a process may have few."""
INDEX_RESERVE_BYTES = 16 << 20
"""Left free on the file system when a slab is made, so that the index can still record removals."""

log = logging.getLogger(__name__)
_INDEX_MASK = (1 << INDEX_BITS) - 1


class SlabFiles:
    """Slots on disk. Files are made when needed, never more than `capacity_bytes` of them together.

    A slab that lost its last block is kept for its size and deleted when another size needs the space.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        ops: FileOps,
        slab_bytes: int | None = None,
        io: DiskIo = "buffered",
    ) -> None:
        """Open the slabs there are, every slot free; `claim` those in use next.

        `slab_bytes` is 64 MiB or what makes about 256 slabs of the capacity. `io`: how they are read and
        written.

        If there is more than the capacity, which was lowered then, the newest slabs are deleted. A slab that cannot be
        opened by itself is left alone, as if it were gone.

        Raises:
            StorageError: no slab can be opened, or one not deleted.
        """
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0  # of all files
        self.used_bytes = 0  # of all slots taken
        self.freed = 0  # slots freed so far
        self._folder = folder
        self._slab_bytes = slab_bytes or max(SLAB_BYTES, capacity_bytes // MAX_SLABS)
        self.io = io
        self._ops = ops
        self._slabs: dict[int, SlabFile] = {}
        self._partial: defaultdict[int, list[int]] = defaultdict(list)  # slot bytes -> slabs with room
        self._next_number = 1
        self._full_at: int | None = None  # bytes the file system had left when it last refused a slab
        for path in sorted(folder.iterdir()):
            try:
                slab = SlabFile.reopen(path, ops, io)
            except UnreadableSlabError as error:
                log.error("%s. Its blocks are lost", error)
                self._next_number = max(self._next_number, error.number + 1)
                continue
            if slab is None:
                log.warning("%s is not a slab; it is left alone", path)
                continue
            self._next_number = max(self._next_number, slab.number + 1)
            if not slab.run.count:  # a crash came before its space
                slab.unlink()
            elif self.allocated_bytes + slab.nbytes > capacity_bytes:
                log.warning("deleting %s: the capacity is %d bytes now", path, capacity_bytes)
                slab.unlink()
            else:
                self._add(slab)

    def allocate(self, nbytes: int) -> int | None:
        """A slot for `nbytes` bytes, now taken; None when the capacity or the disk has no room for this size.

        Raises:
            DiskFullError: the file system refused a new slab. Until it has more space, None is given instead.
            StorageError: a slab could not be made or deleted for another reason.
        """
        slot_bytes = round_to_slot(nbytes)
        partial = self._partial[slot_bytes]
        slab = self._slabs[partial[0]] if partial else self._new_slab(slot_bytes)
        if slab is None:
            return None
        index = slab.run.take()
        if slab.run.full:
            partial.pop(0)
        self.used_bytes += slot_bytes
        return slab.number << INDEX_BITS | index

    def free(self, slot: int) -> None:
        """Make a slot free.

        Raises:
            MemoryMisuseError: it is free.
            StorageError: there is no such slab.
        """
        slab, index = self.find(slot)
        was_full = slab.run.full
        slab.run.give(index)
        self.freed += 1
        self.used_bytes -= slab.slot_bytes
        if slab.failed:
            if not slab.run.used:
                try:
                    self._delete(slab)
                except StorageError as error:
                    log.warning("%s; its space is lost until the next start", error)
        elif was_full:
            insort(self._partial[slab.slot_bytes], slab.number)

    def exist(self, slots: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.bool_]:
        """Which of `slots` exist and can hold `nbytes` bytes."""
        numbers = np.array(sorted(self._slabs), np.int64)
        if not len(numbers):
            return np.zeros(len(slots), np.bool_)
        slabs = [self._slabs[number] for number in numbers.tolist()]
        counts = np.array([slab.run.count if nbytes <= slab.slot_bytes else 0 for slab in slabs], np.int64)
        at = np.minimum(np.searchsorted(numbers, slots >> INDEX_BITS), len(slabs) - 1)
        there: npt.NDArray[np.bool_] = (numbers[at] == slots >> INDEX_BITS) & ((slots & _INDEX_MASK) < counts[at])
        return there

    def claim(self, slots: npt.NDArray[np.int64]) -> None:
        """Take slots that records name. They must exist and be free, each once."""
        slots = np.sort(slots)
        numbers = slots >> INDEX_BITS
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(slots)] if len(slots) else [0]
        for start, end in pairwise(bounds):
            slab = self._slabs[int(numbers[start])]
            slab.run.claim_many(slots[start:end] & _INDEX_MASK)
            self.used_bytes += (end - start) * slab.slot_bytes
            if slab.run.full and not slab.failed:
                self._partial[slab.slot_bytes].remove(slab.number)

    def lost_slots(self) -> npt.NDArray[np.int64]:
        """Slots, taken or not, that files deleted or cut off under us have lost. Such files get no more blocks.

        Raises:
            StorageError: a file cannot be looked at.
        """
        lost = [np.zeros(0, np.int64)]
        for slab in list(self._slabs.values()):
            if not slab.find_loss() or slab.lost_from is None:
                continue
            if not slab.failed:
                log.error(
                    "%s was deleted or cut off while in use; its blocks are dropped and computed again; leave the "
                    "files of a running daemon alone, and check the file system",
                    slab.path,
                )
                self.quarantine(slab)
            if slab.run.used:
                lost.append(slab.number << INDEX_BITS | np.arange(slab.lost_from, slab.run.count, dtype=np.int64))
            else:
                self._delete(slab)
        return np.concatenate(lost)

    def reclaim(self, slots: npt.NDArray[np.int64]) -> None:
        """Take these slots and no others, and use slabs again whose sync had failed. Nobody may be writing.

        Raises:
            StorageError: a slab still cannot be synced; nothing has changed but slabs that can be.
        """
        for slab in self._slabs.values():
            if slab.lost_from is not None:
                slab.failed = True  # a write may have found the loss, before `lost_slots`
            elif slab.failed:
                slab.sync_again()
        self._partial.clear()
        self.used_bytes = 0
        for slab in self._slabs.values():
            slab.run = SlotRun(slab.run.count)
            if not slab.failed:
                insort(self._partial[slab.slot_bytes], slab.number)
        self.freed += 1
        self.claim(slots)

    def find(self, slot: int) -> tuple[SlabFile, int]:
        """The slab and the index in it that a slot number names. Any thread may call this.

        Raises:
            LostBytesError: the slab is gone.
        """
        slab = self._slabs.get(slot >> INDEX_BITS)
        if slab is None:
            raise LostBytesError(f"slot {slot:#x} is in slab {slot >> INDEX_BITS}, which is gone; drop the block")
        return slab, slot & _INDEX_MASK

    def quarantine(self, slab: SlabFile) -> None:
        """Give out no more slots of a slab whose sync failed; delete it when its last block goes."""
        slab.failed = True
        partial = self._partial[slab.slot_bytes]
        if slab.number in partial:
            partial.remove(slab.number)

    def room(self, nbytes: int) -> int:
        """How many more slots for `nbytes` bytes each can be had."""
        slot_bytes = round_to_slot(nbytes)
        in_slabs = sum(self._slabs[number].run.free for number in self._partial[slot_bytes])
        reusable = sum(slab.nbytes for slab in self._empty(other_than=slot_bytes))
        fresh = 0 if self.disk_is_full() else self.capacity_bytes - self.allocated_bytes
        return in_slabs + (fresh + reusable) // slot_bytes

    def taken(self) -> int:
        """Slots taken in all slabs."""
        return sum(slab.run.used for slab in self._slabs.values())

    def check_integrity(self) -> None:
        """Counters agree with slots, and files with the capacity.

        Raises:
            IntegrityError: they do not.
        """
        slabs = self._slabs.values()
        for slab in slabs:
            slab.run.check_integrity()
            listed = slab.number in self._partial[slab.slot_bytes]
            if listed != (not slab.run.full and not slab.failed):
                used_of = f"{slab.run.used} of {slab.run.count}"
                raise IntegrityError(f"{slab.path} is filed wrongly, {used_of} slots used")
        used = sum(slab.run.used * slab.slot_bytes for slab in slabs)
        allocated = sum(slab.nbytes for slab in slabs)
        if (used, allocated) != (self.used_bytes, self.allocated_bytes) or allocated > self.capacity_bytes:
            raise IntegrityError(
                f"{used} bytes used ({self.used_bytes} counted), {allocated} allocated "
                f"({self.allocated_bytes} counted) of {self.capacity_bytes}"
            )

    def close(self) -> None:
        """Forget the slabs; each file is closed when its last reader is done."""
        self._slabs.clear()
        self._partial.clear()

    def _new_slab(self, slot_bytes: int) -> SlabFile | None:
        wanted = min(slots_per_slab(slot_bytes, self.capacity_bytes, self._slab_bytes), 1 << INDEX_BITS)
        self._make_space(wanted * slot_bytes, slot_bytes)
        wanted = min(wanted, self._unassigned() // slot_bytes)
        if not wanted or self.disk_is_full():
            return None
        left = self._left_on_disk()
        count = min(wanted, (left - INDEX_RESERVE_BYTES) // slot_bytes)
        try:
            if count < min(wanted, MIN_SLOTS):
                raise DiskFullError(
                    f"the file system of {self._folder} has {left} bytes left, too few for another slab; "
                    "free space or lower the disk capacity"
                )
            number, self._next_number = self._next_number, self._next_number + 1
            slab = SlabFile.create(self._folder, number, slot_bytes, count, self._ops, self.io)
        except DiskFullError:
            self._full_at = left
            raise
        self._full_at = None
        self._add(slab)
        return slab

    def _make_space(self, nbytes: int, slot_bytes: int) -> None:
        """Delete empty slabs of other slot sizes until `nbytes` of the capacity are unassigned."""
        for slab in self._empty(other_than=slot_bytes):
            if self._unassigned() >= nbytes:
                return
            self._delete(slab)

    def disk_is_full(self) -> bool:
        """Whether the file system refused a slab and has not gained a slab's worth of space since."""
        if self._full_at is None:
            return False
        return self._left_on_disk() < self._full_at + min(self._slab_bytes, self._unassigned())

    def _left_on_disk(self) -> int:
        try:
            return self._ops.free_bytes(self._folder)
        except OSError as error:
            raise storage_error(f"asking for the free space of {self._folder}", error) from error

    def _unassigned(self) -> int:
        return self.capacity_bytes - self.allocated_bytes

    def _empty(self, other_than: int) -> list[SlabFile]:
        """Slabs of other slot sizes that hold no block."""
        return [
            slab
            for slot_bytes, numbers in self._partial.items()
            if slot_bytes != other_than
            for slab in map(self._slabs.__getitem__, numbers)
            if not slab.run.used
        ]

    def _add(self, slab: SlabFile) -> None:
        self._slabs[slab.number] = slab
        self.allocated_bytes += slab.nbytes
        insort(self._partial[slab.slot_bytes], slab.number)

    def _delete(self, slab: SlabFile) -> None:
        slab.unlink()
        del self._slabs[slab.number]
        self.allocated_bytes -= slab.nbytes
        partial = self._partial[slab.slot_bytes]
        if slab.number in partial:
            partial.remove(slab.number)
        self._full_at = None
