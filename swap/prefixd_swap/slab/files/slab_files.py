"""All slabs of a data directory: who has which slot, within a capacity. Not thread-safe; the store locks.

A slot's number is the number of its slab and the unit of 4096 bytes in the slab at which it begins. How long slots are,
and so which pages they make up, is rebuilt at a start from the records that name them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import DiskFullError, IntegrityError, LostBytesError, ShrinkError, StorageError
from prefixd_swap.pages.page_eviction import Allow, Victims, Worths, choose_victims
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slab.files.file_ops import FileOps, storage_error
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_file import INDEX_BITS, MAX_NUMBER, SlabFile, UnreadableSlabError
from prefixd_swap.slots import PAGE_BYTES, round_to_slot

SLAB_BYTES = 64 << 20
MAX_SLABS = 256
"""Larger capacities have larger slabs: each is an open file, and a process may have few."""
INDEX_RESERVE_BYTES = 16 << 20
"""Left free on the file system when a slab is made, so that the index can still record removals."""

log = logging.getLogger(__name__)
_INDEX_MASK = (1 << INDEX_BITS) - 1
_LEAST_SLABS = 16  # in the capacity, so that a slab whose sync fails is a small part of the tier
_LEAST_SLOTS = 16  # in a slab that a full file system has still room for
_SHIFT = (PAGE_BYTES - 1).bit_length()  # from a slot's number to its address in the allocator

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class SlabFiles:
    """Slots on disk. Files are made when needed, never more than `capacity_bytes` of them together.

    A slab that lost its last block is kept for any size. It is deleted when a slot that is larger than it is wanted.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        ops: FileOps,
        slab_bytes: int | None = None,
        io: DiskIo = "buffered",
        *,
        holding: Collection[int] = (),
        shrink: bool = True,
    ) -> None:
        """Open the slabs there are, every slot free; `claim` those in use next.

        `slab_bytes` is 64 MiB or what makes about 256 slabs of the capacity. `io`: how they are read and
        written.

        If there is more than the capacity, which was lowered then, slabs are deleted: those that are not in `holding`
        (the numbers of slabs that hold blocks), then the newest. A slab that cannot be opened by itself is left alone,
        as if it were gone.

        Raises:
            ShrinkError: a slab in `holding` would be deleted, and not `shrink`; none was.
            StorageError: no slab can be opened, or one not deleted.
        """
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0  # of all files
        self.freed = 0  # slots freed so far
        self._folder = folder
        self._slab_bytes = slab_bytes or max(SLAB_BYTES, capacity_bytes // MAX_SLABS)
        self.io = io
        self._ops = ops
        self._slabs: dict[int, SlabFile] = {}
        self._pages = PageAllocator(capacity_bytes)
        self._next_number = 1
        self._full_at: int | None = None  # bytes the file system had left when it last refused a slab
        found: list[SlabFile] = []
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
            if not slab.count:  # a crash came before its space
                slab.unlink()
            else:
                found.append(slab)
        self._keep(found, holding, shrink)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are taken."""
        return self._pages.used_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page as it is cut now."""
        return self._pages.page_bytes

    def allocate(self, nbytes: int, near: int | None = None) -> int | None:
        """A slot for `nbytes` bytes, now taken; None when the capacity or the disk has no room for this size.

        Args:
            nbytes: rounded up to 4096.
            near: another slot of the same prefix, to which it lies close if that can be.

        Raises:
            DiskFullError: the file system refused a new slab. Until it has more space, None is given instead.
            StorageError: a slab could not be made or deleted for another reason.
        """
        address = None if near is None else near << _SHIFT
        offset = self._pages.allocate(nbytes, address)
        if offset is None and self._add_slab(round_to_slot(nbytes)):
            offset = self._pages.allocate(nbytes, address)
        return None if offset is None else offset >> _SHIFT

    def free(self, slots: Int64s) -> None:
        """Make slots free, or none of them where an error is raised.

        Raises:
            MemoryMisuseError: one of them is free, or given twice.
        """
        self._pages.free_many(slots << _SHIFT)
        self.freed += len(slots)
        for slab in [slab for slab in self._slabs.values() if slab.failed]:
            if not self._used_in(slab):
                try:
                    self._delete(slab)
                except StorageError as error:
                    log.warning("%s; its space is lost until the next start", error)

    def exist(self, slots: Int64s, nbytes: int) -> Bools:
        """Which of `slots` lie in files that have their `nbytes` bytes."""
        numbers = np.array(sorted(self._slabs), np.int64)
        if not len(numbers):
            return np.zeros(len(slots), np.bool_)
        slabs = [self._slabs[number] for number in numbers.tolist()]
        units = round_to_slot(nbytes) >> _SHIFT
        last = np.array([max(slab.count - units, -1) for slab in slabs], np.int64)
        at = np.minimum(np.searchsorted(numbers, slots >> INDEX_BITS), len(slabs) - 1)
        there: Bools = (numbers[at] == slots >> INDEX_BITS) & ((slots & _INDEX_MASK) <= last[at])
        return there

    def claim(self, slots: Int64s, sizes: Int64s) -> None:
        """Take all slots that records name, [n] with their bytes [n], where nothing is taken. They must exist.

        Raises:
            MemoryMisuseError: some overlap, or do not exist.
        """
        self._pages.claim(slots << _SHIFT, sizes)

    def lost_slots(self) -> Int64s:
        """Slots whose bytes files that were deleted or cut off under us have lost. Such files get no more blocks.

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
            if self._used_in(slab):
                offsets, sizes = self._pages.occupied(_address(slab))
                kept = _address(slab) + slab.lost_from * PAGE_BYTES
                lost.append(offsets[offsets + sizes > kept] >> _SHIFT)
            else:
                self._delete(slab)
        return np.concatenate(lost)

    def reclaim(self, slots: Int64s, sizes: Int64s) -> None:
        """Take these slots [n], with their bytes [n], and no others, and use slabs again whose sync had failed. Nobody
        may be writing.

        Raises:
            StorageError: a slab still cannot be synced; nothing has changed but slabs that can be.
        """
        for slab in self._slabs.values():
            if slab.lost_from is not None:
                slab.failed = True  # a write may have found the loss, before `lost_slots`
            elif slab.failed:
                slab.sync_again()
        self._pages.clear()
        self._pages.reopen()
        for slab in self._slabs.values():
            if slab.failed:
                self._pages.close(_address(slab))
        self.freed += 1
        self.claim(slots, sizes)

    def find(self, slot: int) -> tuple[SlabFile, int]:
        """The slab, and the unit in it, that a slot number names. Any thread may call this.

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
        if self._slabs.get(slab.number) is slab:
            self._pages.close(_address(slab))

    def room(self, nbytes: int) -> int:
        """How many more slots for `nbytes` bytes each can be had."""
        slot = round_to_slot(nbytes)
        each = self._new_slab_bytes(slot)
        if not each:
            return 0
        pool = sum(slab.nbytes for slab in self._too_small(slot))
        pool += 0 if self.disk_is_full() else self._unassigned()
        full, rest = divmod(pool, each)
        return self._pages.room(slot) + full * self._slots_in(each, slot) + self._slots_in(rest, slot)

    def choose_victims(
        self,
        nbytes: int,
        count: int,
        slots: Int64s,
        worth: Worths,
        evictable: Bools | None = None,
        allow: Allow | None = None,
    ) -> Victims:
        """Which of `slots` to evict so that `count` more slots for `nbytes` bytes each are free.

        As `page_eviction.choose_victims`; slots that are larger than whole slabs are made room for by emptying slabs,
        whose place then goes to larger ones.

        Raises:
            MemoryMisuseError: `nbytes` is not positive, or a slot does not exist.
        """
        found = choose_victims(self._pages, nbytes, count, slots << _SHIFT, worth, evictable, allow)
        slot = round_to_slot(nbytes)
        small = [slab for slab in self._slabs.values() if slab.nbytes < slot and not slab.failed]
        if found.slots >= count or not small:
            return found
        may = np.arange(len(slots)) if evictable is None else np.flatnonzero(evictable)
        homes = slots[may] >> INDEX_BITS
        whole: list[tuple[float, SlabFile]] = []
        for slab in small:
            inside = homes == slab.number
            mine = may[inside]
            if 0 < len(mine) == len(self._pages.occupied(_address(slab))[0]):
                whole.append((float(worth[mine].max()), slab))
        pool = self._unassigned() + sum(slab.nbytes for slab in self._too_small(slot))
        positions, gained = [found.positions], found.slots
        for _, slab in sorted(whole, key=lambda each: (each[0], each[1].number)):
            if found.slots + pool // slot >= count:
                break
            inside = may[homes == slab.number]
            if allow is None or allow(inside):
                positions.append(inside)
                pool += slab.nbytes
        gained += pool // slot
        return Victims(np.unique(np.concatenate(positions)), gained)

    def taken(self) -> int:
        """Slots taken in all slabs."""
        return self._pages.slots_used

    def check_integrity(self) -> None:
        """Counters agree with slots, and files with the capacity.

        Raises:
            IntegrityError: they do not.
        """
        self._pages.check_integrity()
        slabs = self._slabs.values()
        ranges = {start: nbytes for start, nbytes, _ in self._pages.ranges()}
        if ranges != {_address(slab): slab.nbytes for slab in slabs}:
            raise IntegrityError(f"the slabs are {sorted(self._slabs)} and pages are kept for {sorted(ranges)}")
        closed = {start for start, _, is_open in self._pages.ranges() if not is_open}
        for slab in slabs:
            if (_address(slab) in closed) != slab.failed:
                raise IntegrityError(f"{slab.path}: failed is {slab.failed}, and its slots are given out otherwise")
        allocated = sum(slab.nbytes for slab in slabs)
        if allocated != self.allocated_bytes or allocated > self.capacity_bytes:
            raise IntegrityError(
                f"{allocated} bytes are allocated ({self.allocated_bytes} counted) of {self.capacity_bytes}"
            )

    def close(self) -> None:
        """Forget the slabs; each file is closed when its last reader is done."""
        self._slabs.clear()
        self._pages = PageAllocator(self.capacity_bytes)

    def _add_slab(self, slot: int) -> bool:
        """Make a slab for slots of `slot` bytes, in place of empty ones that are too small where there is no space."""
        wanted = self._new_slab_bytes(slot)
        for small in self._too_small(slot):
            if self._unassigned() >= wanted:
                break
            self._delete(small)
        wanted = min(wanted, self._unassigned() // PAGE_BYTES * PAGE_BYTES)
        if wanted < slot or not wanted or self.disk_is_full():
            return False
        left = self._left_on_disk()
        nbytes = min(wanted, (left - INDEX_RESERVE_BYTES) // PAGE_BYTES * PAGE_BYTES)
        try:
            if nbytes < min(wanted, _LEAST_SLOTS * slot):
                raise DiskFullError(
                    f"the file system of {self._folder} has {left} bytes left, too few for another slab; "
                    "free space or lower the disk capacity"
                )
            if self._next_number > MAX_NUMBER:
                raise StorageError(f"{self._folder} has had {MAX_NUMBER} slabs; empty the directory to start again")
            number, self._next_number = self._next_number, self._next_number + 1
            slab = SlabFile.create(self._folder, number, nbytes // PAGE_BYTES, self._ops, self.io)
        except DiskFullError:
            self._full_at = left
            raise
        self._full_at = None
        self._add(slab)
        return True

    def _new_slab_bytes(self, slot: int) -> int:
        """Bytes of a new slab for slots of this size: whole pages where there is space; 0 for one that never fits."""
        if not self._pages.slots_per_page(slot):
            return 0
        page = self._pages.page_bytes
        wanted = min(self._slab_bytes, self.capacity_bytes // _LEAST_SLABS)
        return min(max(page, wanted // page * page), PAGE_BYTES << INDEX_BITS)

    def _slots_in(self, nbytes: int, slot: int) -> int:
        pages, rest = divmod(nbytes, self._pages.page_bytes)
        return pages * (self._pages.page_bytes // slot) + rest // slot

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

    def _too_small(self, slot: int) -> list[SlabFile]:
        """Slabs without a block that are shorter than one slot."""
        small: Iterable[SlabFile] = (slab for slab in self._slabs.values() if slab.nbytes < slot and not slab.failed)
        return [slab for slab in small if not self._used_in(slab)]

    def _used_in(self, slab: SlabFile) -> int:
        return self._pages.used_in(_address(slab))

    def _keep(self, found: Sequence[SlabFile], holding: Collection[int], shrink: bool) -> None:
        """Takes in as many slabs as the capacity allows and deletes the others."""
        kept_bytes, deleted = 0, []
        for slab in sorted(found, key=lambda slab: (slab.number not in holding, slab.number)):
            if kept_bytes + slab.nbytes > self.capacity_bytes:
                deleted.append(slab)
            else:
                kept_bytes += slab.nbytes
        full = [slab for slab in deleted if slab.number in holding]
        if full and not shrink:
            raise ShrinkError(
                f"a capacity of {self.capacity_bytes} bytes deletes {len(full)} slabs that hold blocks, "
                f"{sum(slab.nbytes for slab in full)} of the {sum(slab.nbytes for slab in found)} bytes there are"
            )
        for slab in deleted:
            log.warning("deleting %s: the capacity is %d bytes now", slab.path, self.capacity_bytes)
            slab.unlink()
        for slab in found:
            if slab not in deleted:
                self._add(slab)

    def _add(self, slab: SlabFile) -> None:
        self._slabs[slab.number] = slab
        self.allocated_bytes += slab.nbytes
        self._pages.add(_address(slab), slab.nbytes)

    def _delete(self, slab: SlabFile) -> None:
        slab.unlink()
        self._pages.remove(_address(slab))
        del self._slabs[slab.number]
        self.allocated_bytes -= slab.nbytes
        self._full_at = None


def _address(slab: SlabFile) -> int:
    """Where the slab begins in the allocator's addresses: those of its slots are their numbers times 4096."""
    return slab.number << INDEX_BITS + _SHIFT
