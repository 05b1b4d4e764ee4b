"""Writes, reads and removes blocks of the durable tier for the mover.

One lock serializes changes of the store, so that a removal and a later write of the same block keep their order. It is
held for one batch at a time; the most urgent batch gets it next, and the holder moves bytes at the urgency of the most
urgent waiter. A cancelled call still finishes: its reads and writes end before their slots are freed.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.disk.damaged_blocks import DamagedBlocks
from prefixd.cache.disk.health import DiskHealth
from prefixd.cache.disk.metadata import DiskMetadata
from prefixd.cache.disk.part_coder import PartCoder
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
    """The parts of the durable tier's code, connected.

    Args:
        placement: records where blocks are.
        tries: all tries, by ordinal.
        namespaces: for the ids on disk.
        checksums: computes checksums of blocks in memory.
        coder: makes fewer bytes of blocks.
    """

    def __init__(
        self,
        placement: Placement,
        tries: list[Trie],
        namespaces: NamespaceRegistry,
        checksums: Checksums,
        coder: PartCoder,
    ) -> None:
        self._durable = placement.tiers.durable
        self.dropped_altered = 0
        """Blocks that the start has dropped, since lossy codecs had altered them more than is wanted now."""
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
        self.writes = DiskWrites(placement, records, checksums, self.metadata, self.health, coder, lock)

    @property
    def changing(self) -> bool:
        """Whether a write or a removal is under way."""
        return self._lock.locked()

    @asynccontextmanager
    async def still(self) -> AsyncGenerator[None, None]:
        """A context in which no write or removal runs; new ones wait for its end."""
        async with self._lock.hold(Movement(Urgency.DEMAND)):
            yield

    def missing(self, trie: Trie, rows: Rows) -> int:
        """How many of `rows` are not complete in the durable tier."""
        return len(rows) if self._durable is None else len(trie.missing(rows, self._durable.level))
