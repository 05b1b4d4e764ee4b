"""The durable tier's side of the mover: blocks written, read and removed, and what the index is told of each.

One lock orders whatever changes the store, so that a removal and a later write of the same block cannot pass each
other. It is held for one batch at a time, and the most urgent batch is next; its holder moves bytes as urgently as the
most urgent that waits. A call that is cancelled still ends in order: whoever reads or writes a slot must be done before
the slot is given back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.damaged_blocks import DamagedBlocks
from prefixd.cache.disk.health import DiskHealth
from prefixd.cache.disk.metadata import DiskMetadata
from prefixd.cache.disk.reads import DiskReads
from prefixd.cache.disk.records import DiskRecords
from prefixd.cache.disk.removals import DiskRemovals
from prefixd.cache.disk.writes import DiskWrites
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.movement import Movement, UrgentLock
from prefixd.cache.placement.placement import Placement
from prefixd_swap.transfers import Urgency


class DiskCopies:
    """Copies of blocks in the durable tier, by what is done with them.

    Args:
        placement: where copies are entered.
        tries: all tries, by ordinal.
        namespaces: for the ids on disk.
        checksums: of what is in memory.
    """

    def __init__(
        self, placement: Placement, tries: list[Trie], namespaces: NamespaceRegistry, checksums: Checksums
    ) -> None:
        self._durable = placement.tiers.durable
        self._lock = lock = UrgentLock(urgency_enabled=placement.tiers.transfers.urgency_enabled)
        self.records = records = DiskRecords(placement.tiers, namespaces)
        self.removals = DiskRemovals(placement, records, lock, lambda error: self.health.write_failed(error))
        self.damaged = DamagedBlocks(placement, records, self.removals)
        self.reads = DiskReads(
            placement, records, self.damaged.drop, lambda *read: self.health.read_failed(*read), lock
        )
        self.metadata = DiskMetadata(
            placement, namespaces, records, self.still, lambda error: self.health.write_failed(error)
        )
        self.health = DiskHealth(
            placement, tries, self.still, self.damaged.drop, self.reads.reread, self.metadata.saved.clear
        )
        self.writes = DiskWrites(placement, records, checksums, self.metadata, self.health, lock)

    @property
    def changing(self) -> bool:
        """Whether a write or a removal is under way."""
        return self._lock.locked()

    @asynccontextmanager
    async def still(self) -> AsyncGenerator[None, None]:
        """Within it no write or removal is under way; those that come wait."""
        async with self._lock.hold(Movement(Urgency.DEMAND)):
            yield

    def missing(self, trie: Trie, rows: Rows) -> int:
        """How many of `rows` are not complete in the durable tier."""
        return len(rows) if self._durable is None else len(trie.missing(rows, self._durable.level))
