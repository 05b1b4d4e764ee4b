"""A store without bytes, for plans: it counts its contents, and a movement takes the time of its link."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy as np

from prefixd.planner.simulation.link import SimulatedLink
from prefixd_swap.codecs.coded_part import CodedPart
from prefixd_swap.errors import IntegrityError, LostBytesError, RecordDamagedError, StorageError
from prefixd_swap.sealing.rest_keys import RestKey
from prefixd_swap.slab.index.block_record import (
    NAMESPACE_BYTES,
    BlockRecord,
    DiskPart,
    NewBlock,
    decode_record,
    encode_record,
    index_key,
    record_slots,
    without_parts,
)
from prefixd_swap.slab.index.record_columns import Encryption, IndexTable, Records
from prefixd_swap.slab.index.recovery import prefix_closed
from prefixd_swap.slots import round_to_slot
from prefixd_swap.spans import Span
from prefixd_swap.tiers import NO_SLOT, Identity, Int64s, Loads, Places, StoreTier
from prefixd_swap.tiers.store_tier import BlockRead
from prefixd_swap.transfers import DeviceLimits, Piece, Transfers, Urgency

LIMITS = DeviceLimits(in_flight=4, reserved=1)


class UnbackedStoreTier(StoreTier):
    """A store of any level, size and speed that keeps records and places, and no bytes. Its checksums are 0.

    Args:
        transfers: see `StoreTier`.
        name: see `Tier`.
        level: see `Tier`.
        capacity_bytes: the most that slots take together; any part fits into free bytes.
        link: how fast it is, reads and writes together.
        write_link: how fast writes and removals are, where these do not share the way of reads.
        limits: see `StoreTier`.
        durable: see `Tier`.
    """

    backed = False

    def __init__(
        self,
        transfers: Transfers,
        *,
        name: str,
        level: int,
        capacity_bytes: int,
        link: SimulatedLink,
        write_link: SimulatedLink | None = None,
        limits: DeviceLimits = LIMITS,
        durable: bool = True,
    ) -> None:
        super().__init__(name, level, transfers, limits, writes=1, threads=False)
        self.durable = durable
        self.link = link
        self.write_link = link if write_link is None else write_link
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._records: dict[bytes, bytes] = {}  # the index: name -> encoded record
        self._bytes: dict[int, bytes] = {}  # slot -> what is kept of it
        self._namespaces: dict[bytes, bytes] = {}
        self._pins: set[bytes] = set()
        self._next_slot = 0

    @property
    def capacity_bytes(self) -> int:
        """The most that slots take together."""
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots taken."""
        return self._used_bytes

    async def remove(self, names: Sequence[Identity], urgency: Urgency, *, damaged: bool = False) -> None:
        """Removes blocks, all of them or none. No record is ever damaged here."""
        del damaged
        piece: Piece[None] = Piece(0, partial(self._remove, [index_key(*name) for name in names]), True)
        (await self.transfers.submit(self.write_path, [piece], urgency).finish()).values()

    async def drop_parts(self, parts: Sequence[tuple[bytes, bytes, Collection[int]]], urgency: Urgency) -> None:
        """Gives back the slots of some parts of blocks, of all of them or none."""
        piece: Piece[None] = Piece(0, partial(self._drop_parts, parts), True)
        (await self.transfers.submit(self.write_path, [piece], urgency).finish()).values()

    def room(self, nbytes: int) -> int:
        """How many more parts of `nbytes` bytes each could be written now."""
        return (self._capacity_bytes - self._used_bytes) // round_to_slot(nbytes)

    def load(self) -> Records:
        """Every block, in columns."""
        table = self._table()
        parent = table.link()
        return table.records(prefix_closed(table.depth, parent, table.readable), parent)

    def namespaces(self) -> dict[bytes, bytes]:
        """What every namespace stands for, by its id."""
        return dict(self._namespaces)

    def discard(self, names: Sequence[Identity], reason: str) -> None:
        """Removes blocks; nothing is kept of what is simulated."""
        for name in names:
            self._forget(index_key(*name))

    def forget(self, names: Sequence[Identity], parts: Sequence[tuple[bytes, bytes, int]]) -> None:
        """Removes blocks, and the bytes of others."""
        for name in names:
            self._forget(index_key(*name))
        for namespace, key, count in parts:
            self._forget_parts(index_key(namespace, key), range(count))

    def discard_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Forgets what namespaces stood for."""
        for namespace in namespaces:
            self._namespaces.pop(namespace, None)

    async def encryption(self) -> Encryption:
        """Nothing is encrypted here."""
        return self._table().encryption

    def reseal_namespaces(self, encryption: Mapping[bytes, RestKey | None]) -> None:
        """Nothing is encrypted here."""

    async def put_namespace(self, namespace: bytes, spec: bytes, encryption: RestKey | None = None) -> None:
        """Stores what a namespace stands for."""
        self._namespaces[namespace] = spec

    async def remove_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Forgets what namespaces stood for."""
        self.discard_namespaces(namespaces)

    async def pin(self, names: Sequence[Identity], pinned: bool) -> int:
        """Stores that blocks are pinned, or not any more."""
        there = {index_key(*name) for name in names}.intersection(self._records)
        self._pins = self._pins | there if pinned else self._pins - there
        return len(there)

    def pins(self) -> list[Identity]:
        """Every block that is pinned."""
        return [(name[:NAMESPACE_BYTES], name[NAMESPACE_BYTES:]) for name in sorted(self._pins)]

    async def try_read(self) -> None:
        """Whether it can be read."""

    async def try_write(self) -> None:
        """Whether it can be written."""

    async def audit(self) -> Records | None:
        """Every record, after `check_integrity`."""
        self.check_integrity()
        table = self._table()
        return table.records(table.readable, table.link())

    async def revive(self, known: Int64s) -> Int64s:
        """Tries whether it takes writes again; removes what the caller does not know."""
        familiar = set(known.tolist())
        for name, value in list(self._records.items()):
            if not all(slot in familiar for slot, _ in record_slots(value)):
                self._forget(name)
        return np.setdiff1d(known, np.array(list(self._bytes), np.int64))

    async def lost_slots(self) -> Int64s:
        """Slots that records name and that are not there."""
        named = self._table().slots()
        return np.setdiff1d(named, np.array(list(self._bytes), np.int64))

    async def has_shrunk(self) -> bool:
        """Never: capacity is only a number here."""
        return False

    def check_integrity(self) -> None:
        """Count again."""
        named = self._table().slots()
        if len(np.unique(named)) != len(named) or not set(self._bytes) <= set(named.tolist()):
            raise IntegrityError(f"{len(named)} slots are named in the {self.name} tier, {len(self._bytes)} are taken")
        used = sum(round_to_slot(size) for value in self._records.values() for _, size in record_slots(value))
        if used != self._used_bytes:
            raise IntegrityError(f"{used} bytes are used in the {self.name} tier and {self._used_bytes} counted")

    def close(self) -> None:
        """Ends nothing: it has started nothing."""

    # -- pieces ---------------------------------------------------------------------------------------------------

    def _read_piece(self, loads: Loads, nbytes: int) -> Piece[list[BlockRead]]:
        return Piece(nbytes, partial(self._read, loads), True)

    def _write_piece(self, blocks: list[NewBlock], nbytes: int) -> Piece[list[Places | None]]:
        return Piece(nbytes, partial(self._write, blocks), True)

    def _verify_piece(self, expected: Sequence[BlockRecord], nbytes: int) -> Piece[list[StorageError | None]]:
        return Piece(nbytes, partial(self._verify, expected), True)

    async def _read(self, loads: Loads) -> list[BlockRead]:
        await self.link.move(len(loads) * sum(loads.nbytes))
        results: list[BlockRead] = []
        columns = zip(loads.slots.tolist(), loads.checksums.tolist(), loads.addresses.tolist(), strict=True)
        for slots, checksums, addresses in columns:
            try:
                for slot, checksum, address, size in zip(slots, checksums, addresses, loads.nbytes, strict=True):
                    if slot != NO_SLOT:
                        self._copy_out(DiskPart(slot, size, checksum), Span(address, size))
            except StorageError as error:
                results.append(error)
            else:
                results.append(None)
        return results

    async def _write(self, blocks: Sequence[NewBlock]) -> list[Places | None]:
        for block in blocks:
            block.check()
        await self.write_link.move(sum(part.nbytes for block in blocks for part in block.parts if part is not None))
        return [self._store(block) for block in blocks]

    async def _verify(self, expected: Sequence[BlockRecord]) -> list[StorageError | None]:
        await self.link.move(sum(part.nbytes for record in expected for part in record.parts if part is not None))
        results: list[StorageError | None] = []
        for record in expected:
            name = index_key(record.namespace, record.key)
            try:
                if name not in self._records:
                    raise LostBytesError("the index has lost the block")
                if decode_record(name, self._records[name]) != record:
                    raise RecordDamagedError(
                        f"the index record of block {record.key.hex()} is not what was written; remove the block, it "
                        "will be computed again"
                    )
                for part in record.parts:
                    if part is not None:
                        self._checked(part)
            except StorageError as error:
                results.append(error)
            else:
                results.append(None)
        return results

    async def _remove(self, names: Sequence[bytes]) -> None:
        await self.write_link.move(0)
        for name in names:
            self._forget(name)

    async def _drop_parts(self, items: Sequence[tuple[bytes, bytes, Collection[int]]]) -> None:
        await self.write_link.move(0)
        for namespace, key, parts in items:
            self._forget_parts(index_key(namespace, key), parts)

    # -- bytes ----------------------------------------------------------------------------------------------------

    def _store(self, block: NewBlock) -> Places | None:
        name = index_key(block.namespace, block.key)
        kept = {part.slot: self._checked(part) for part in block.parts if isinstance(part, DiskPart)}
        pins = self._pins & {name}
        self._forget(name)
        needed = sum(round_to_slot(part.nbytes) for part in block.parts if part is not None)
        if needed > self._capacity_bytes - self._used_bytes:
            return None
        places: list[DiskPart | None] = []
        for span, checksum in zip(block.parts, block.checksums or (None,) * len(block.parts), strict=True):
            if span is None or isinstance(span, DiskPart):
                places.append(span)
                continue
            self._bytes[self._next_slot], taken = self._contents(span, checksum)
            places.append(DiskPart(self._next_slot, span.nbytes, taken))
            self._next_slot += 1
        self._bytes.update(kept)
        self._used_bytes += needed
        self._records[name] = encode_record(block, places)
        self._pins |= pins
        return tuple(places)

    def _contents(self, span: Span | CodedPart, checksum: int | None) -> tuple[bytes, int]:
        """What is kept of a part, and its checksum."""
        del span
        return b"", 0 if checksum is None else checksum

    def _forget_parts(self, name: bytes, parts: Collection[int]) -> None:
        if (value := self._records.get(name)) is not None:
            left = without_parts(value, parts)
            kept = {slot for slot, _ in record_slots(left)}
            for slot, nbytes in record_slots(value):
                if slot not in kept:
                    self._bytes.pop(slot, None)
                    self._used_bytes -= round_to_slot(nbytes)
            self._records[name] = left

    def _forget(self, name: bytes) -> None:
        value = self._records.pop(name, None)
        self._pins.discard(name)
        if value is not None:
            for slot, nbytes in record_slots(value):
                self._bytes.pop(slot, None)
                self._used_bytes -= round_to_slot(nbytes)

    def _checked(self, part: DiskPart) -> bytes:
        """What is kept of a part.

        Raises:
            StorageError: it is gone, or not what was written.
        """
        data = self._bytes.get(part.slot)
        if data is None:
            raise LostBytesError(f"slot {part.slot} of the simulated {self.name} tier is gone; drop its block")
        return data

    def _copy_out(self, part: DiskPart, into: Span) -> None:
        """Puts a part where it is read to."""
        del into
        self._checked(part)

    def _table(self) -> IndexTable:
        return IndexTable([sorted(self._records.items())])
