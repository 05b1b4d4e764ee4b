"""Verifies the index: one block's record and bytes, or all records against the taken slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from prefixd_swap.errors import IndexUnavailableError, IntegrityError, RecordDamagedError, StorageError
from prefixd_swap.sealing.rest_keys import RestKeys
from prefixd_swap.slab.changes import StoreChanges
from prefixd_swap.slab.files.slab_files import SlabFiles
from prefixd_swap.slab.index.block_record import BlockRecord, decode_record, index_key
from prefixd_swap.slab.index.record_columns import IndexTable, Records
from prefixd_swap.slab.reader import verify
from prefixd_swap.slots import PAGE_BYTES

if TYPE_CHECKING:
    from prefixd_swap.slab.index.index import SlabIndex

_CHECKS = 8  # after this many failed attempts a block is bad, even if slots were freed meanwhile


class Verification:
    """Verifies blocks in their slots. Any thread may call it."""

    def __init__(self, index: SlabIndex, slabs: SlabFiles, changes: StoreChanges, keys: RestKeys) -> None:
        self._index = index
        self._slabs = slabs
        self._changes = changes
        self._keys = keys

    def check_block(self, namespace: bytes, key: bytes, expected: BlockRecord | None = None) -> bool:
        """Verify a stored block in its slots; False if the block is not stored, or no longer.

        A slot that is freed and used again meanwhile does not count as damage.

        Args:
            namespace: its namespace.
            key: its key.
            expected: the record that it must have, if the caller knows it.

        Raises:
            ChecksumError: a part's bytes are damaged.
            RecordDamagedError: the block's record contradicts itself, or `expected`.
            IndexUnavailableError: the index cannot be read; the block's state is unknown.
            StorageError: the bytes cannot be read.
        """
        name = index_key(namespace, key)
        for attempt in range(1, _CHECKS + 1):
            freed, value = self._slabs.freed, self._look_up(name)
            if value is None:
                return False
            try:
                record = decode_record(name, value, self._keys)
                if expected is not None and record != expected:
                    raise RecordDamagedError(
                        f"the index record of block {key.hex()} is damaged: it is {record}, but {expected} was "
                        "written; remove the block, it will be computed again"
                    )
                for part in record.parts:
                    if part is not None:
                        slab, index = self._slabs.find(part.slot)
                        if index * PAGE_BYTES + part.nbytes > slab.nbytes:
                            raise RecordDamagedError(
                                f"an index record names {part.nbytes} bytes in unit {index} of {slab.path}, which ends "
                                "before; remove the block, it will be computed again"
                            )
                        verify(part, slab, index, slab.checksum(index, part.nbytes))
                return True
            except StorageError:
                if self._look_up(name) == value and (self._slabs.freed == freed or attempt == _CHECKS):
                    raise
        return False

    def _look_up(self, name: bytes) -> bytes | None:
        try:
            return self._index.get(name)
        except StorageError as error:
            raise IndexUnavailableError(f"no block can be checked while the index cannot be read: {error}") from error

    def audit_index(self) -> Records | None:
        """Every record of the index as of now, records without a parent included; also checks all taken slots.

        None from a commit of unknown outcome until `revive`.

        Raises:
            IntegrityError: named and taken slots differ, or an entry of the index is not a record.
            StorageError: the index cannot be read.
        """
        with self._changes.lock:
            self._slabs.check_integrity()
            if self._changes.unsure:
                return None
            table = IndexTable(self._index.chunks(), self._keys, self._index.used_keys())
            lost = [name for name in self._index.pins() if self._index.get(name) is None]
            named = np.sort(table.slots())
            taken = self._slabs.taken()
            different = len(named) - int(np.count_nonzero(named[1:] == named[:-1]))
            if (
                different != len(named)
                or different > taken
                or (different < taken and not (self._changes.active or self._changes.orphaned))
            ):
                raise IntegrityError(f"{len(named)} slots are named, {different} different; {taken} are taken")
        if lost:
            raise IntegrityError(f"{len(lost)} pins are of blocks that are not stored, {lost[0].hex()} among them")
        if table.unreadable:
            raise IntegrityError(f"{len(table.unreadable)} entries of the index are no records")
        return table.records(table.readable, table.link())
