"""The CPU tier's memory: one memfd, cut into slots.

Slots of equal size come from slabs (Bonwick 1994): a run of equal slots, cut from the free part of the arena
when the first slot is asked for and returned when its last slot is freed, so that another size can have it.
A slab at the end of a free run is as long as the run allows, so one size alone fills the arena exactly.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import resource
import threading
from bisect import bisect_right, insort
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from prefixd_swap.errors import IntegrityError, MemoryMisuseError, OutOfMemoryError
from prefixd_swap.extents import FreeExtents
from prefixd_swap.slots import PAGE_BYTES, SlotRun, round_to_slot, slots_per_slab
from prefixd_swap.spans import Span

SLAB_BYTES = 32 << 20
POPULATE_STEP_BYTES = 16 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
MLOCK_ONFAULT = 1  # absent from the resource module
MADV_POPULATE_WRITE = 23  # Linux 5.14; absent from the mmap module

log = logging.getLogger(__name__)
libc = ctypes.CDLL(None, use_errno=True)


class _Slab:
    __slots__ = ("base", "run", "slot_bytes")

    def __init__(self, base: int, slot_bytes: int, count: int) -> None:
        self.base = base
        self.slot_bytes = slot_bytes
        self.run = SlotRun(count)


class CpuArena:
    """`nbytes` of shared memory in slots. One thread allocates and frees; any thread may use the bytes."""

    def __init__(self, nbytes: int, *, huge_pages: bool = False, populate: bool = False) -> None:
        """Create the memory; whole pages of 4096 bytes are used, the rest of `nbytes` is not.

        Args:
            nbytes: capacity in bytes.
            huge_pages: ask for transparent huge pages; the kernel's `shmem_enabled` decides.
            populate: have a background thread touch every page, see `wait_populated`.

        Raises:
            OutOfMemoryError: the memory cannot be made.
        """
        self.capacity_bytes = nbytes // PAGE_BYTES * PAGE_BYTES
        if self.capacity_bytes <= 0:
            raise OutOfMemoryError(f"a CPU arena of {nbytes} bytes holds nothing; give at least {PAGE_BYTES}")
        self.fd = -1
        try:
            self.fd = os.memfd_create("prefixd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, self.capacity_bytes)
            # Others map this memory too: were one able to shrink the file, reads here would be SIGBUS.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self.fd, self.capacity_bytes)
        except (OSError, OverflowError, ValueError) as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise OutOfMemoryError(
                f"a CPU arena of {self.capacity_bytes} bytes cannot be made ({error}); lower its capacity"
            ) from error
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(self._map, dtype=np.uint8)
        self._address = int(self._bytes.ctypes.data)
        if huge_pages:
            self._advise_huge()
        self._extents = FreeExtents(self.capacity_bytes)
        self._slabs: dict[int, _Slab] = {}
        self._bases: list[int] = []  # of all slabs, sorted
        self._partial: defaultdict[int, list[int]] = defaultdict(list)  # slot bytes -> bases with room
        self.used_bytes = 0
        self._stop = threading.Event()
        self._populated = threading.Event()
        self._populator: threading.Thread | None = None
        if populate:
            populator = threading.Thread(target=self._populate, name="prefixd-populate", daemon=True)
            try:
                populator.start()
                self._populator = populator
            except RuntimeError as error:
                log.warning(
                    "the CPU arena's pages are touched on first use: no thread can be started (%s); raise the limit of "
                    "processes (`ulimit -u`, TasksMax= of systemd)",
                    error,
                )

    def lock(self) -> None:
        """Keep every page in memory once it was touched: none of it is ever swapped out.

        Raises:
            OutOfMemoryError: this process may not lock so much; the arena works as before.
        """
        if libc.mlock2(ctypes.c_void_p(self._address), ctypes.c_size_t(self.capacity_bytes), MLOCK_ONFAULT):
            code = ctypes.get_errno()
            soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            raise OutOfMemoryError(
                f"the CPU arena of {self.capacity_bytes} bytes is not locked in memory and may be swapped out "
                f"({os.strerror(code)}, {soft} bytes may be locked); raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK= "
                "of systemd) or set cpu.lock = false"
            )

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot; a size can have them unless they lie in another size's slab, see `room`."""
        return self.capacity_bytes - self.used_bytes

    @property
    def slots_used(self) -> int:
        """Slots allocated and not freed, of all sizes."""
        return sum(slab.run.used for slab in self._slabs.values())

    def allocate(self, nbytes: int) -> int | None:
        """Offset of a free slot for `nbytes` bytes, now taken; None when there is no room for this size.

        Raises:
            MemoryMisuseError: `nbytes` is not positive.
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
        return slab.base + index * slot_bytes

    def free(self, offset: int) -> None:
        """Make the slot at `offset` free.

        Raises:
            MemoryMisuseError: no slot begins there, or it is free already.
        """
        at = bisect_right(self._bases, offset) - 1
        slab = self._slabs[self._bases[at]] if at >= 0 else None
        index, inside = divmod(offset - slab.base, slab.slot_bytes) if slab else (0, 1)
        if slab is None or inside:
            raise MemoryMisuseError(f"no slot begins at offset {offset}; free what `allocate` returned")
        was_full = slab.run.full
        slab.run.give(index)
        self.used_bytes -= slab.slot_bytes
        partial = self._partial[slab.slot_bytes]
        if was_full:
            insort(partial, slab.base)
        if not slab.run.used:
            partial.remove(slab.base)
            del self._slabs[slab.base], self._bases[at]
            self._extents.give(slab.base, slab.run.count * slab.slot_bytes)

    def allocated(self) -> NDArray[np.int64]:
        """Offsets of all slots that are taken, ascending."""
        slabs = [self._slabs[base] for base in self._bases]
        return np.concatenate([np.zeros(0, np.int64), *(s.base + s.run.taken() * s.slot_bytes for s in slabs)])

    def room(self, nbytes: int) -> int:
        """How many more slots for `nbytes` bytes each can be allocated now."""
        slot_bytes = round_to_slot(nbytes)
        in_slabs = sum(self._slabs[base].run.free for base in self._partial[slot_bytes])
        return in_slabs + self._extents.count(slot_bytes)

    def span(self, offset: int, nbytes: int) -> Span:
        """The bytes at `offset` as raw memory, good until `close`.

        Raises:
            MemoryMisuseError: they reach outside the arena, or it is closed.
        """
        self._check_inside(offset, nbytes)
        return Span(self._address + offset, nbytes)

    def array(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes at `offset` as a writable array without a copy, uint8 [nbytes]; keeps the memory alive.

        Raises:
            MemoryMisuseError: they reach outside the arena, or it is closed.
        """
        return self._check_inside(offset, nbytes)[offset : offset + nbytes]

    def wait_populated(self, timeout_s: float | None = None) -> bool:
        """Whether every page is there, after waiting at most `timeout_s` seconds for it."""
        return self._populated.wait(timeout_s) if self._populator else False

    def check_integrity(self) -> None:
        """Slabs and free runs cover the arena once, and the counters agree with them.

        Raises:
            IntegrityError: they do not.
        """
        regions = [(base, self._slabs[base].run.count * self._slabs[base].slot_bytes) for base in self._bases]
        end = 0
        for start, length in sorted(regions + self._extents.runs()):
            if start != end:
                how = "twice" if start < end else "by nothing"
                raise IntegrityError(f"arena byte {min(start, end)} is covered {how}")
            end = start + length
        used = 0
        for slab in self._slabs.values():
            slab.run.check_integrity()
            used += slab.run.used * slab.slot_bytes
            if (slab.base in self._partial[slab.slot_bytes]) == slab.run.full or not slab.run.used:
                raise IntegrityError(f"the slab at {slab.base} is filed wrongly, {slab.run.used} slots used")
        if end != self.capacity_bytes or used != self.used_bytes:
            raise IntegrityError(
                f"{used} bytes are used and {self.used_bytes} counted; {end} of {self.capacity_bytes} covered"
            )

    def close(self) -> None:
        """Give the memory back; it goes when the last array from `array` does. Spans are dead at once."""
        if self._bytes is None:
            return
        self._stop.set()
        if self._populator:
            self._populator.join()
        self._bytes = None
        os.close(self.fd)
        self.fd = -1
        try:
            self._map.close()
        except BufferError:
            log.debug("arrays still refer to the arena; its memory goes with them")

    def _check_inside(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        if self._bytes is None:
            raise MemoryMisuseError("the arena is closed; end every copy before closing it")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.capacity_bytes:
            raise MemoryMisuseError(
                f"{nbytes} bytes at offset {offset} reach outside the arena of {self.capacity_bytes} bytes"
            )
        return self._bytes

    def _new_slab(self, slot_bytes: int) -> _Slab | None:
        count = slots_per_slab(slot_bytes, self.capacity_bytes, SLAB_BYTES)
        region = self._extents.take(count * slot_bytes, slot_bytes)
        if region is None:
            return None
        base, nbytes = region
        slab = self._slabs[base] = _Slab(base, slot_bytes, nbytes // slot_bytes)
        insort(self._bases, base)
        insort(self._partial[slot_bytes], base)
        return slab

    def _advise_huge(self) -> None:
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            log.warning("no huge pages for the CPU arena (%s); it works with small ones", error)

    def _populate(self) -> None:
        """Touch all pages in steps, so that first stores take no page faults (0.4 ms per 2 MiB).

        Through ctypes because it releases the GIL, which `mmap.madvise` does not.
        """
        for offset in range(0, self.capacity_bytes, POPULATE_STEP_BYTES):
            if self._stop.is_set():
                return
            step = min(POPULATE_STEP_BYTES, self.capacity_bytes - offset)
            address = ctypes.c_void_p(self._address + offset)
            if libc.madvise(address, ctypes.c_size_t(step), MADV_POPULATE_WRITE) == 0:
                continue
            try:
                os.posix_fallocate(self.fd, offset, step)  # before Linux 5.14: pages without their mapping
            except OSError as error:
                log.warning("the CPU arena is populated only to byte %d: %s", offset, error)
                return
        self._populated.set()
