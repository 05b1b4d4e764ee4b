"""Reads parts of blocks from the slabs into memory, and verifies them there."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import xxhash

from prefixd_swap.errors import ChecksumError, StorageError
from prefixd_swap.slab.files.adjacent import SMALL_BYTES, are_adjacent, copy_bytes, join_spans
from prefixd_swap.slab.files.file_ops import host_bytes
from prefixd_swap.slab.files.pread_io import STEP_BYTES
from prefixd_swap.slab.files.slab_file import INDEX_BITS, SlabFile
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.index.block_record import DiskPart
from prefixd_swap.slab.index.record_columns import Int64s
from prefixd_swap.slots import PAGE_BYTES, round_to_slot
from prefixd_swap.spans import Span


class SlabReader:
    """Reads parts. Any thread may call it."""

    def __init__(self, slabs: SlabFiles) -> None:
        self._slabs = slabs

    def read(self, part: DiskPart, into: Span) -> None:
        """As `SlabStore.read`."""
        buffer = host_bytes(into, part.nbytes)
        slab, index = self._slabs.find(part.slot)
        slab.read(index, buffer)
        verify(part, slab, index, xxhash.xxh3_64_intdigest(buffer))

    def read_all(
        self, slots: Int64s, checksums: Sequence[int], addresses: Sequence[int], nbytes: int
    ) -> list[StorageError | None]:
        """As `SlabStore.read_all`.

        Parts in adjacent slots are read together if they are small or their memory is adjacent too: a call for each
        costs more than a copy, and threads that make thousands of calls a second delay all others by the interpreter's
        lock.
        """
        parts = [DiskPart(slot, nbytes, checksum) for slot, checksum in zip(slots.tolist(), checksums, strict=True)]
        slot_bytes = round_to_slot(nbytes)
        at_once = max(1, STEP_BYTES // slot_bytes)
        is_gap = np.diff(slots) != slot_bytes // PAGE_BYTES
        if nbytes > SMALL_BYTES:
            is_gap |= np.diff(np.array(addresses, np.int64)) != slot_bytes
        gaps = 1 + np.flatnonzero(is_gap)
        results: list[StorageError | None] = []
        for start, end in pairwise([0, *gaps.tolist(), len(parts)]):
            for first in range(start, end, at_once):
                some = slice(first, min(first + at_once, end))
                results += self._read_run(parts[some], addresses[some], slot_bytes)
        return results

    def _read_run(
        self, parts: Sequence[DiskPart], addresses: Sequence[int], slot_bytes: int
    ) -> list[StorageError | None]:
        """Read parts in adjacent slots."""
        spans = [Span(address, part.nbytes) for part, address in zip(parts, addresses, strict=True)]
        if len(parts) > 1:
            with contextlib.suppress(StorageError):  # then each part is read alone, for its own error
                slab, index = self._slabs.find(parts[0].slot)
                if are_adjacent(spans):
                    slab.read(index, join_spans(spans, len(parts) * slot_bytes))
                    return [_judge(part, slab, into) for part, into in zip(parts, spans, strict=True)]
                run = slab.read_run(index, len(parts) * slot_bytes)
                return [
                    _copy(part, slab, run[at:], into)
                    for at, part, into in zip(range(0, len(run), slot_bytes), parts, spans, strict=True)
                ]
        return [self._try_read(part, into) for part, into in zip(parts, spans, strict=True)]

    def _try_read(self, part: DiskPart, into: Span) -> StorageError | None:
        try:
            self.read(part, into)
        except StorageError as error:
            return error
        return None


def verify(part: DiskPart, slab: SlabFile, index: int, found: int) -> None:
    """Compare the checksum `found` of the bytes in a part's slot with the recorded one.

    Raises:
        ChecksumError: they differ.
    """
    if found != part.checksum:
        raise ChecksumError(
            f"the slot at byte {index * PAGE_BYTES} of {slab.path}: {part.nbytes} bytes have checksum {found:016x}, "
            f"written were {part.checksum:016x}; remove the block, it will be computed again"
        )


def _copy(part: DiskPart, slab: SlabFile, data: memoryview, into: Span) -> ChecksumError | None:
    """Copies a part that was read and verifies the copy; returns the error, or None."""
    copy_bytes(data[: part.nbytes], host_bytes(into, part.nbytes))
    return _judge(part, slab, into)


def _judge(part: DiskPart, slab: SlabFile, into: Span) -> ChecksumError | None:
    """Verifies a part that was read; returns the error, or None."""
    try:
        verify(part, slab, part.slot % (1 << INDEX_BITS), xxhash.xxh3_64_intdigest(host_bytes(into, part.nbytes)))
    except ChecksumError as error:
        return error
    return None
