"""Writes new blocks into slabs: takes slots, writes the bytes with several threads, syncs; frees slots on failure."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import numpy as np

from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.errors import OutOfMemoryError, StorageError
from prefixd_swap.slab.files.slab_file import SlabFile
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.group_commit import Commit
from prefixd_swap.slab.index.block_record import BlockRecord, DiskPart, NewBlock, encode_record, index_key
from prefixd_swap.slab.index.rows import Change
from prefixd_swap.slab.part_writes import PartWrite, stored_parts, write_parts
from prefixd_swap.spans import Span
from prefixd_swap.threads import started_threads

log = logging.getLogger(__name__)


class SlabWriter:
    """Writes blocks to slabs. Thread-safe."""

    def __init__(self, slabs: SlabFiles, lock: threading.Condition, io_threads: int) -> None:
        """`lock` guards the slabs; one call writes `io_threads` parts at a time."""
        self._slabs = slabs
        self._lock = lock
        self._io_threads = io_threads
        self._pool: ThreadPoolExecutor | None = None
        self._warned = False  # that no threads can be started

    def take(self, blocks: Sequence[NewBlock]) -> list[list[int | None] | None]:
        """Take a slot for each part to write of each block; None for a block without room for all parts.

        The slots lie close to the parent's slots; the parent may be an earlier block of the call.

        Raises:
            DiskFullError: the file system has no room for a slab; nothing is taken.
            StorageError: a slab could not be made; nothing is taken.
        """
        taken: list[list[int | None] | None] = []
        by_key: dict[tuple[bytes, bytes], list[int | None] | None] = {}
        with self._lock:
            try:
                for chain in _chains(blocks):
                    close = by_key.get((chain[0].namespace, chain[0].parent)) or chain[0].near
                    of_chain = self._take_chain(chain, close) if len(chain) > 1 else None
                    for at, block in enumerate(chain):
                        if of_chain is None:
                            near = by_key.get((block.namespace, block.parent)) or block.near
                            slots = self._take_block(block, near)
                        else:
                            slots = of_chain[at]
                        taken.append(slots)
                        by_key[block.namespace, block.key] = slots
            except Exception:
                self._free_slots([slot for slots in taken for slot in slots or ()])
                raise
        return taken

    def write(
        self, blocks: Sequence[NewBlock], slots: Sequence[Sequence[int | None] | None]
    ) -> tuple[list[BlockRecord | None], Commit]:
        """Write blocks to their slots; returns their records, and the commit that makes them durable.

        Raises:
            StorageError: a write failed; no thread writes to the slots any more.
        """
        parts = [
            _part_write(part, slot, checksum)
            for block, taken in zip(blocks, slots, strict=True)
            for part, slot, checksum in zip(
                block.parts, taken or (), block.checksums or (None,) * len(block.parts), strict=False
            )
            if isinstance(part, Span | CodedPart) and slot is not None
        ]
        threads = self._threads() if len(parts) > 1 else None
        describe = partial(_describe, blocks, slots, parts)
        (records, changes), slabs = write_parts(parts, self._slabs, threads, self._io_threads, describe)
        return records, Commit(changes, slabs)

    def sync(self, slabs: set[SlabFile]) -> None:
        """Return when all bytes written to these slabs are durable.

        Raises:
            StorageError: a sync failed; no more slots of that slab are allocated.
        """
        threads = self._threads() if len(slabs) > 1 else None
        in_order = sorted(slabs, key=lambda slab: slab.number)
        errors = map(self._sync, in_order) if threads is None else threads.map(self._sync, in_order)
        error = next(filter(None, list(errors)), None)
        if error is not None:
            try:
                raise error
            finally:
                del error  # else its traceback, this frame and the error are a cycle that keeps slabs open

    def free(self, slots: Sequence[int]) -> None:
        """Make slots free."""
        with self._lock:
            self._free_slots(slots)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _take_chain(
        self, chain: Sequence[NewBlock], near: Sequence[int | None] | None
    ) -> list[list[int | None]] | None:
        """As `take`, for a chain of `_chains`, at once: taking its blocks one by one takes as long as writing small
        blocks. None if they have to be taken one by one."""
        sizes = _sizes(chain[0])
        if sizes is None:
            return None
        close = near if near is not None and len(near) == len(sizes) else (None,) * len(sizes)
        columns: list[list[int | None]] = []
        taken: list[int | None] = []
        try:
            for nbytes, other in zip(sizes, close, strict=True):
                column: list[int | None] = [None] * len(chain)
                if nbytes:
                    slots = self._slabs.allocate_many(nbytes, len(chain), other)
                    if slots is None:
                        self._free_slots(taken)
                        return None
                    column = slots.tolist()
                columns.append(column)
                taken += column
        except Exception:
            self._free_slots(taken)
            raise
        return [list(slots) for slots in zip(*columns, strict=True)]

    def _take_block(self, block: NewBlock, near: Sequence[int | None] | None) -> list[int | None] | None:
        slots: list[int | None] = []
        close = near if near is not None and len(near) == len(block.parts) else (None,) * len(block.parts)
        try:
            for part, other in zip(block.parts, close, strict=True):
                if not isinstance(part, Span | CodedPart):
                    slots.append(None)
                    continue
                mixed = block.mixed or isinstance(part, CodedPart)
                slot = self._slabs.allocate(part.nbytes, other, mixed=mixed)
                if slot is None:
                    self._free_slots(slots)
                    return None
                slots.append(slot)
        except Exception:
            self._free_slots(slots)
            raise
        return slots

    def _sync(self, slab: SlabFile) -> StorageError | None:
        try:
            slab.sync()
        except StorageError as error:
            with self._lock:
                self._slabs.quarantine(slab)
            return error
        return None

    def _threads(self) -> ThreadPoolExecutor | None:
        """The threads, started by the first write that needs them; None if there is to be one, or while the system
        refuses them."""
        with self._lock:
            if self._pool is None and self._io_threads > 1:
                try:
                    self._pool = started_threads(self._io_threads, "prefixd-slabs")
                except OutOfMemoryError as error:
                    if not self._warned:
                        log.warning("parts are written one after the other for now: %s", error)
                    self._warned = True
            return self._pool

    def _free_slots(self, slots: Sequence[int | None]) -> None:
        self._slabs.free(np.array([slot for slot in slots if slot is not None], np.int64))


def _chains(blocks: Sequence[NewBlock]) -> Iterator[Sequence[NewBlock]]:
    """The blocks in chains: of one shape of raw parts, and each continues the one before."""
    start, sizes = 0, [_sizes(block) for block in blocks]
    for at, (before, block) in enumerate(pairwise(blocks), 1):
        continues = block.parent == before.key and block.namespace == before.namespace
        if not continues or sizes[at] != sizes[at - 1]:
            yield blocks[start:at]
            start = at
    if blocks:
        yield blocks[start:]


def _sizes(block: NewBlock) -> list[int] | None:
    """Bytes of each part, 0 for one that is not given; None for a block with other parts than raw ones."""
    if block.mixed or not all(part is None or isinstance(part, Span) for part in block.parts):
        return None
    return [0 if part is None else part.nbytes for part in block.parts]


def _part_write(part: Span | CodedPart, slot: int, checksum: int | None) -> PartWrite:
    if isinstance(part, CodedPart):
        return PartWrite(part.span, slot, part.checksum, coded=True, key_id=part.key_id)
    return PartWrite(part, slot, checksum)


def _describe(
    blocks: Sequence[NewBlock], slots: Sequence[Sequence[int | None] | None], parts: Sequence[PartWrite]
) -> tuple[list[BlockRecord | None], list[Change]]:
    """The blocks' records, and the changes that enter them into the index. `parts`: those that are written."""
    written = iter(stored_parts(parts))
    records: list[BlockRecord | None] = []
    changes: list[Change] = []
    for block, taken in zip(blocks, slots, strict=True):
        if taken is None:
            records.append(None)
            continue
        stored = tuple(
            next(written) if slot is not None else part if isinstance(part, DiskPart) else None
            for part, slot in zip(block.parts, taken, strict=True)
        )
        changes.append((index_key(block.namespace, block.key), encode_record(block, stored)))
        records.append(
            BlockRecord(block.namespace, block.key, block.parent, block.tokens, stored, block.depth, block.errors)
        )
    return records, changes
