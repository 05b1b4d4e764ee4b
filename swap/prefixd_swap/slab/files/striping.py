"""Spreads each prefix over the drives of a store, so that one load reads from all of them.

A prefix goes on in the next drive after each stripe. In each drive it has a page of its own, as far as there is room:

    prefix   | a  b  c  d | e  f  g  h | i  j  k  l | m ..      a stripe is 1 MiB, or a slot that is larger
    drive 0  | a  b  c  d | i  j  k  l | ..
    drive 1  | e  f  g  h | m ..

Within a stripe slots are adjacent, and one call moves them.
"""

from __future__ import annotations

from collections import OrderedDict

from prefixd_swap.pages.pages import PageAllocator
from prefixd_swap.slab.files.pread_io import STEP_BYTES
from prefixd_swap.slots import round_to_slot

_MOST_ENDS = 4096

Ends = dict[int, int]
"""Address of a prefix's last slot in each drive."""


class Striping:
    """Chooses the drive of each slot.

    Where the last slots of a prefix lie is remembered in memory only, of the prefixes that grew last. Another prefix
    goes on in the drive of its last slot, and takes a new page in each of the others.
    """

    def __init__(self, drives: int) -> None:
        self._drives = drives
        self._next = 0  # drive in which the next prefix begins
        self._ends: OrderedDict[int, Ends] = OrderedDict()  # by the last of the addresses

    def allocate(self, pages: PageAllocator, nbytes: int, near: int | None, *, mixed: bool = False) -> int | None:
        """As `PageAllocator.allocate`, or `allocate_mixed`; the lanes are the drives."""
        allocate = pages.allocate_mixed if mixed else pages.allocate
        if self._drives == 1:
            return allocate(nbytes, near)
        drive, ends = None if near is None else pages.lane_of(near), Ends()
        if near is None or drive is None:
            drive = self._next
        else:
            ends = self._ends.get(near, {drive: near})
            if near // STEP_BYTES != (near + round_to_slot(nbytes)) // STEP_BYTES:
                drive = (drive + 1) % self._drives
        offset = allocate(nbytes, ends.get(drive), drive)
        if offset is None:
            return None
        if not ends:
            self._next = (drive + 1) % self._drives
        elif near is not None:
            self._ends.pop(near, None)
        found = pages.lane_of(offset)
        self._ends[offset] = ends | ({} if found is None else {found: offset})
        if len(self._ends) > _MOST_ENDS:
            self._ends.popitem(last=False)
        return offset
