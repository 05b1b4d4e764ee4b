"""All slabs of a data directory: allocates their slots, within a capacity. Not thread-safe; the store locks.

A slot's number consists of the number of its slab and the unit of 4096 bytes at which it begins. The sizes of slots,
and so the pages, are rebuilt at a start from the records that name the slots.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prefixd_swap.errors import DiskFullError, IntegrityError, LostBytesError, ShrinkError, StorageError
from prefixd_swap.pages.mixed_eviction import choose_mixed_victims
from prefixd_swap.pages.page_eviction import Allow, Victims, Worths, choose_victims
from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.files.free_space import FreeSpace
from prefixd_swap.slab.files.io import DiskIo
from prefixd_swap.slab.files.slab_file import INDEX_BITS, MAX_NUMBER, SlabFile, UnreadableSlabError
from prefixd_swap.slab.files.striping import Striping
from prefixd_swap.slots import PAGE_BYTES, round_to_slot

SLAB_BYTES = 64 << 20
MAX_SLABS = 256
"""Larger capacities have larger slabs: each slab is an open file, and a process may have few."""
INDEX_RESERVE_BYTES = 16 << 20
"""Bytes that stay free on the file system when a slab is made, so that the index can still record removals."""

log = logging.getLogger(__name__)
_INDEX_MASK = (1 << INDEX_BITS) - 1
_LEAST_SLABS = 16  # in the capacity, so that a slab with a failed sync is a small part of the tier
_LEAST_SLOTS = 16  # in a smaller slab that is made when the file system is nearly full
_SHIFT = (PAGE_BYTES - 1).bit_length()  # from a slot's number to its address in the allocator

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


class SlabFiles:
    """Slots on disk. Files are made when needed; together they have at most `capacity_bytes`.

    An empty slab is kept and serves any size. It is deleted when a slot larger than the slab is needed.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        capacity_bytes: int,
        ops: FileOps,
        slab_bytes: int | None = None,
        io: DiskIo = "buffered",
        *,
        holding: Collection[int] = (),
        shrink: bool = True,
    ) -> None:
        """Open the existing slabs with every slot free; the caller then calls `claim` for the slots in use.

        `folders` have the slabs, each on a drive of its own. `slab_bytes` is by default 64 MiB, or the size that cuts
        the capacity into about 256 slabs. `io`: the way to read and write them.

        If the slabs exceed the capacity, because it was lowered, slabs are deleted: first those that are not in
        `holding` (the numbers of slabs with blocks), then the newest. A slab that alone cannot be opened is left alone,
        as if it were gone.

        Raises:
            ShrinkError: a slab in `holding` would be deleted and `shrink` is false; nothing was deleted.
            StorageError: no slab can be opened, a slab cannot be deleted, or two folders have a slab of one number.
        """
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = 0  # of all files
        self.freed = 0  # slots freed so far
        self._folders = folders
        self._slab_bytes = slab_bytes or max(SLAB_BYTES, capacity_bytes // MAX_SLABS)
        self.io = io
        self._ops = ops
        self._slabs: dict[int, SlabFile] = {}
        self._pages = PageAllocator(capacity_bytes)
        self._next_number = 1
        self._striping = Striping(len(folders))
        self._space = FreeSpace(folders, ops)
        found: list[SlabFile] = []
        for path in sorted((path for folder in folders for path in folder.iterdir()), key=lambda path: path.name):
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
            if not slab.count:  # a crash came before its space was allocated
                slab.unlink()
            else:
                found.append(slab)
        self._keep(found, holding, shrink)

    @property
    def used_bytes(self) -> int:
        return self._pages.used_bytes

    @property
    def page_bytes(self) -> int:
        return self._pages.page_bytes

    def allocate(self, nbytes: int, near: int | None = None, *, mixed: bool = False) -> int | None:
        """Take a slot for `nbytes` bytes; None when the capacity or the disk has no room for this size.

        Args:
            nbytes: rounded up to 4096.
            near: another slot of the same prefix; the new one is close to it if possible.
            mixed: in a page with slots of any sizes.

        Raises:
            DiskFullError: the file system refused a new slab. Until it has more space, later calls return None.
            StorageError: a slab could not be made or deleted for another reason.
        """
        address = None if near is None else near << _SHIFT
        offset = self._striping.allocate(self._pages, nbytes, address, mixed=mixed)
        if offset is None and self._add_slabs(round_to_slot(nbytes)):
            offset = self._striping.allocate(self._pages, nbytes, address, mixed=mixed)
        return None if offset is None else offset >> _SHIFT

    def allocate_many(self, nbytes: int, count: int, near: int | None = None) -> Int64s | None:
        """Take `count` slots for `nbytes` bytes each, adjacent where possible.

        None, and nothing is taken, if there is no room for all, or if the slots have to alternate between drives.

        Raises:
            StorageError: as `allocate`; nothing is taken.
        """
        if len(self._folders) > 1:
            return None
        slot = round_to_slot(nbytes)
        while self._pages.room(slot) < count:
            if not self._add_slabs(slot):
                return None
        offsets = self._pages.allocate_many(slot, count, None if near is None else near << _SHIFT)
        return None if offsets is None else offsets >> _SHIFT

    def free(self, slots: Int64s) -> None:
        """Make slots free; none of them if this raises.

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

    def exist(self, slots: Int64s, sizes: Int64s) -> Bools:
        """Whether each of `slots` has its bytes in a file; `sizes` [n]: bytes of each slot."""
        numbers = np.array(sorted(self._slabs), np.int64)
        if not len(numbers):
            return np.zeros(len(slots), np.bool_)
        slabs = [self._slabs[number] for number in numbers.tolist()]
        counts = np.array([slab.count for slab in slabs], np.int64)
        at = np.minimum(np.searchsorted(numbers, slots >> INDEX_BITS), len(slabs) - 1)
        fits = (sizes > 0) & ((slots & _INDEX_MASK) + (sizes >> _SHIFT) <= counts[at])
        there: Bools = (numbers[at] == slots >> INDEX_BITS) & fits
        return there

    def claim(self, slots: Int64s, sizes: Int64s, mixed: Bools) -> None:
        """Take all slots that records name, [n] with their bytes [n], and which are mixed, [n]. Nothing may be taken
        yet, and they must exist.

        Raises:
            MemoryMisuseError: some overlap, or do not exist.
        """
        self._pages.claim(slots << _SHIFT, sizes, mixed)

    def lost_slots(self) -> Int64s:
        """Slots with lost bytes, in files that were deleted or cut off while in use. Such files get no more blocks.

        Raises:
            StorageError: a file cannot be inspected.
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

    def reclaim(self, slots: Int64s, sizes: Int64s, mixed: Bools) -> None:
        """Take exactly these slots, as `claim`, and use slabs with a failed sync again. No write may run.

        Raises:
            StorageError: a slab still cannot be synced; only slabs that can be synced have changed.
        """
        for slab in self._slabs.values():
            if slab.lost_from is not None:
                slab.failed = True  # a write may have found the loss before `lost_slots`
            elif slab.failed:
                slab.sync_again()
        self._pages.clear()
        self._pages.reopen()
        for slab in self._slabs.values():
            if slab.failed:
                self._pages.close(_address(slab))
        self.freed += 1
        self.claim(slots, sizes, mixed)

    def find(self, slot: int) -> tuple[SlabFile, int]:
        """The slab and the unit of a slot number. Any thread may call this.

        Raises:
            LostBytesError: the slab is gone.
        """
        slab = self._slabs.get(slot >> INDEX_BITS)
        if slab is None:
            raise LostBytesError(f"slot {slot:#x} is in slab {slot >> INDEX_BITS}, which is gone; drop the block")
        return slab, slot & _INDEX_MASK

    def quarantine(self, slab: SlabFile) -> None:
        """Allocate no more slots in a slab with a failed sync; it is deleted with its last block."""
        slab.failed = True
        if self._slabs.get(slab.number) is slab:
            self._pages.close(_address(slab))

    def room(self, nbytes: int) -> int:
        """Number of slots for `nbytes` bytes each that can be allocated."""
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
        *,
        mixed: bool = False,
    ) -> Victims:
        """Choose slots to evict so that `count` more slots for `nbytes` bytes each become free.

        As `choose_victims`, or `choose_mixed_victims` if `mixed`; for slots larger than whole slabs it empties slabs,
        which larger slabs then replace.

        Raises:
            MemoryMisuseError: `nbytes` is not positive, or a slot does not exist.
        """
        choose = choose_mixed_victims if mixed else choose_victims
        found = choose(self._pages, nbytes, count, slots << _SHIFT, worth, evictable, allow)
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
        """Check that counters agree with slots, and files with the capacity.

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

    def _add_slabs(self, slot: int) -> bool:
        """Make a slab for slots of `slot` bytes in each of the folders with the fewest bytes of slabs.

        False if there is no room. Deletes empty slabs that are too small if space is missing.
        """
        wanted = self._new_slab_bytes(slot)
        for small in self._too_small(slot):
            if self._unassigned() >= wanted:
                break
            self._delete(small)
        allocated = {folder: 0 for folder in range(len(self._folders)) if not self._is_full(folder)}
        for slab in self._slabs.values():
            if (folder := self._folder_of(slab)) in allocated:
                allocated[folder] += slab.nbytes
        fewest = [folder for folder, nbytes in allocated.items() if nbytes == min(allocated.values())]
        added = False
        for folder in fewest:
            try:
                added |= self._add_slab(folder, slot, wanted)
            except StorageError as error:
                if not added and folder == fewest[-1]:
                    raise
                log.warning("%s; the other drives go on", error)
        return added

    def _add_slab(self, folder: int, slot: int, wanted: int) -> bool:
        """Make a slab of `wanted` bytes, or fewer if the capacity is used up or the disk nearly full."""
        wanted = min(wanted, self._unassigned() // PAGE_BYTES * PAGE_BYTES)
        if wanted < slot or not wanted:
            return False
        left = self._space.left(folder)
        nbytes = min(wanted, (left - INDEX_RESERVE_BYTES) // PAGE_BYTES * PAGE_BYTES)
        try:
            if nbytes < min(wanted, _LEAST_SLOTS * slot):
                raise DiskFullError(
                    f"the file system of {self._folders[folder]} has {left} bytes left, too few for another slab; "
                    "free space or lower the disk capacity"
                )
            if self._next_number > MAX_NUMBER:
                raise StorageError(
                    f"{self._folders[folder]} has had {MAX_NUMBER} slabs; empty the directory to start again"
                )
            number, self._next_number = self._next_number, self._next_number + 1
            slab = SlabFile.create(self._folders[folder], number, nbytes // PAGE_BYTES, self._ops, self.io)
        except DiskFullError:
            self._space.refused(folder, left)
            raise
        self._space.granted(folder)
        self._add([slab])
        return True

    def _new_slab_bytes(self, slot: int) -> int:
        """Bytes of a new slab for slots of this size, in whole pages; 0 for a size that never fits."""
        if not self._pages.slots_per_page(slot):
            return 0
        page = self._pages.page_bytes
        wanted = min(self._slab_bytes, self.capacity_bytes // _LEAST_SLABS)
        return min(max(page, wanted // page * page), PAGE_BYTES << INDEX_BITS)

    def _slots_in(self, nbytes: int, slot: int) -> int:
        pages, rest = divmod(nbytes, self._pages.page_bytes)
        return pages * (self._pages.page_bytes // slot) + rest // slot

    def disk_is_full(self) -> bool:
        """Whether every file system refused a slab and has not gained a slab's worth of space since."""
        return all(map(self._is_full, range(len(self._folders))))

    def _is_full(self, folder: int) -> bool:
        return self._space.is_full(folder, min(self._slab_bytes, self._unassigned()))

    def _unassigned(self) -> int:
        return self.capacity_bytes - self.allocated_bytes

    def _too_small(self, slot: int) -> list[SlabFile]:
        """Slabs without a block that are shorter than one slot."""
        small: Iterable[SlabFile] = (slab for slab in self._slabs.values() if slab.nbytes < slot and not slab.failed)
        return [slab for slab in small if not self._used_in(slab)]

    def _used_in(self, slab: SlabFile) -> int:
        return self._pages.used_in(_address(slab))

    def _keep(self, found: Sequence[SlabFile], holding: Collection[int], shrink: bool) -> None:
        """Keeps as many slabs as the capacity allows and deletes the others."""
        numbers = Counter(slab.number for slab in found)
        if twins := [str(slab.path) for slab in found if numbers[slab.number] > 1]:
            raise StorageError(f"{' and '.join(twins)} have the same number; delete the copy")
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
        self._add(slab for slab in found if slab not in deleted)

    def _add(self, slabs: Iterable[SlabFile]) -> None:
        """Use slabs, which ascend by number."""
        ranges = []
        for slab in slabs:
            self._slabs[slab.number] = slab
            self.allocated_bytes += slab.nbytes
            ranges.append((_address(slab), slab.nbytes, self._folder_of(slab)))
        self._pages.add_all(ranges)

    def _delete(self, slab: SlabFile) -> None:
        slab.unlink()
        self._pages.remove(_address(slab))
        del self._slabs[slab.number]
        self.allocated_bytes -= slab.nbytes
        self._space.freed()

    def _folder_of(self, slab: SlabFile) -> int:
        return self._folders.index(slab.path.parent)


def _address(slab: SlabFile) -> int:
    """The slab's first address in the allocator: a slot's address is its number times 4096."""
    return slab.number << INDEX_BITS + _SHIFT
