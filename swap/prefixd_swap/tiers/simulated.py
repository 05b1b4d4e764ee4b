"""Tiers of any speed, with failures: for tests, and to plan a machine before there is one.

Time is passed in: a link asks a clock and waits by a sleeper. On a `SimulatedTimeLoop` a run takes no time and gives
the same figures every time. Chance comes from a seed.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import xxhash

from prefixd_swap.copies.copies import CopyEngine, Pair
from prefixd_swap.errors import (
    ChecksumError,
    IntegrityError,
    LostBytesError,
    MemoryMisuseError,
    RecordDamagedError,
    StorageError,
)
from prefixd_swap.slab.files.file_ops import host_bytes
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
from prefixd_swap.slab.index.record_columns import IndexTable, Records
from prefixd_swap.slab.index.recovery import prefix_closed
from prefixd_swap.slots import round_to_slot
from prefixd_swap.spans import Span
from prefixd_swap.tiers.base import NO_SLOT, Int64s
from prefixd_swap.tiers.store import Identity, Loads, Places, StoreTier
from prefixd_swap.transfers import DeviceLimits, Piece, Transfers, Urgency

Sleep = Callable[[float], Awaitable[object]]
Operation = Literal["read", "write", "remove", "wrong bytes"]

LIMITS = DeviceLimits(in_flight=4, reserved=1)


class SimulatedLink:
    """One way for bytes. What is moved at the same time shares the bandwidth; each movement waits for the latency.

    Args:
        bytes_per_s: bandwidth.
        latency_s: from the end of a movement's bytes to its arrival.
        clock: seconds.
        sleep: waits for a number of seconds of that clock.
    """

    def __init__(self, bytes_per_s: float, latency_s: float, clock: Callable[[], float], sleep: Sleep) -> None:
        if not (bytes_per_s > 0 and latency_s >= 0):
            raise MemoryMisuseError(
                f"a link of {bytes_per_s} bytes/s and {latency_s} s is not possible; give a bandwidth above 0 and a "
                "latency of at least 0"
            )
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.moved_bytes = 0
        self._clock = clock
        self._sleep = sleep
        self._free_at_s = 0.0

    async def move(self, nbytes: int) -> None:
        """Returns when `nbytes` bytes would have arrived."""
        now_s = self._clock()
        self._free_at_s = max(now_s, self._free_at_s) + nbytes / self.bytes_per_s
        self.moved_bytes += nbytes
        await self._sleep(self._free_at_s + self.latency_s - now_s)


@dataclass(slots=True)
class SimulatedFaults:
    """What fails: by chance, or because it is down."""

    rates: Mapping[Operation, float] = field(default_factory=dict)
    """How likely an operation on one block fails, 0 to 1. Of "wrong bytes": that a block is stored altered."""
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    down: set[Operation] = field(default_factory=set)
    """What fails each time, until it is taken out again."""

    def happens(self, operation: Operation) -> bool:
        """Whether `operation` fails now."""
        return operation in self.down or self.chance.random() < self.rates.get(operation, 0.0)

    def check(self, operation: Operation, tier: str) -> None:
        """Let `operation` fail if it is to.

        Raises:
            StorageError: it fails now.
        """
        if self.happens(operation):
            raise StorageError(f"the {operation} failed in the simulated {tier} tier, as its faults order")


class SimulatedCopyEngine(CopyEngine):
    """Copies between simulated memory tiers, as fast as `link` is."""

    def __init__(self, link: SimulatedLink) -> None:
        self._link = link
        self._closed = False

    async def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy all pairs when they would have arrived."""
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        for destination, source in pairs:
            if destination.nbytes != source.nbytes:
                raise MemoryMisuseError(
                    f"cannot copy {source.nbytes} bytes over {destination.nbytes} bytes; sizes must match"
                )
        await self._link.move(sum(source.nbytes for _, source in pairs))
        for destination, source in pairs:
            ctypes.memmove(destination.address, source.address, source.nbytes)

    def close(self) -> None:
        """End it."""
        self._closed = True


class SimulatedStoreTier(StoreTier):
    """A store of any level, size and speed. What it holds is in this process's memory.

    Args:
        transfers: see `StoreTier`.
        name: see `Tier`.
        level: see `Tier`.
        capacity_bytes: the most that slots take together; any part fits into free bytes.
        link: how fast it is, reads and writes together.
        write_link: how fast writes and removals are, where these do not share the way of reads.
        faults: what fails.
        limits: see `StoreTier`.
        durable: see `Tier`.
    """

    def __init__(
        self,
        transfers: Transfers,
        *,
        name: str,
        level: int,
        capacity_bytes: int,
        link: SimulatedLink,
        write_link: SimulatedLink | None = None,
        faults: SimulatedFaults | None = None,
        limits: DeviceLimits = LIMITS,
        durable: bool = True,
    ) -> None:
        super().__init__(name, level, transfers, limits, writes=1, threads=False)
        self.durable = durable
        self.link = link
        self.write_link = link if write_link is None else write_link
        self.faults = SimulatedFaults() if faults is None else faults
        self._capacity_bytes = capacity_bytes
        self._used_bytes = 0
        self._records: dict[bytes, bytes] = {}  # the index: name -> encoded record
        self._bytes: dict[int, bytes] = {}  # slot -> what is stored there
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
        self.faults.check("remove", self.name)
        for name in names:
            self._forget(index_key(*name))

    def discard_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Forgets what namespaces stood for."""
        self.faults.check("remove", self.name)
        for namespace in namespaces:
            self._namespaces.pop(namespace, None)

    async def put_namespace(self, namespace: bytes, spec: bytes) -> None:
        """Stores what a namespace stands for."""
        self.faults.check("write", self.name)
        self._namespaces[namespace] = spec

    async def remove_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Forgets what namespaces stood for."""
        self.discard_namespaces(namespaces)

    async def pin(self, names: Sequence[Identity], pinned: bool) -> int:
        """Stores that blocks are pinned, or not any more."""
        self.faults.check("write", self.name)
        there = {index_key(*name) for name in names}.intersection(self._records)
        self._pins = self._pins | there if pinned else self._pins - there
        return len(there)

    def pins(self) -> list[Identity]:
        """Every block that is pinned."""
        return [(name[:NAMESPACE_BYTES], name[NAMESPACE_BYTES:]) for name in sorted(self._pins)]

    async def try_read(self) -> None:
        """Whether it can be read."""
        self.faults.check("read", self.name)

    async def try_write(self) -> None:
        """Whether it can be written."""
        self.faults.check("write", self.name)

    async def audit(self) -> Records | None:
        """Every record, after `check_integrity`."""
        self.check_integrity()
        table = self._table()
        return table.records(table.readable, table.link())

    async def revive(self, known: Int64s) -> Int64s:
        """Tries whether it takes writes again; removes what the caller does not know."""
        self.faults.check("write", self.name)
        familiar = set(known.tolist())
        for name, value in list(self._records.items()):
            if not all(slot in familiar for slot, _ in record_slots(value)):
                self._forget(name)
        return np.setdiff1d(known, np.array(list(self._bytes), np.int64))

    async def lost_slots(self) -> Int64s:
        """Slots whose bytes were taken away by `lose`."""
        named = self._table().slots()
        return np.setdiff1d(named, np.array(list(self._bytes), np.int64))

    async def has_shrunk(self) -> bool:
        """Never: capacity is only a number here."""
        return False

    def lose(self, slots: Iterable[int]) -> None:
        """Takes the bytes of slots away, as if their file was deleted."""
        for slot in slots:
            del self._bytes[slot]

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

    def _read_piece(self, loads: Loads, nbytes: int) -> Piece[list[StorageError | None]]:
        return Piece(nbytes, partial(self._read, loads), True)

    def _write_piece(self, blocks: list[NewBlock], nbytes: int) -> Piece[list[Places | None]]:
        return Piece(nbytes, partial(self._write, blocks), True)

    def _verify_piece(self, expected: Sequence[BlockRecord], nbytes: int) -> Piece[list[StorageError | None]]:
        return Piece(nbytes, partial(self._verify, expected), True)

    async def _read(self, loads: Loads) -> list[StorageError | None]:
        await self.link.move(len(loads) * sum(loads.nbytes))
        results: list[StorageError | None] = []
        columns = zip(loads.slots.tolist(), loads.checksums.tolist(), loads.addresses.tolist(), strict=True)
        for slots, checksums, addresses in columns:
            try:
                self.faults.check("read", self.name)
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
        for _ in blocks:
            self.faults.check("write", self.name)
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
                self.faults.check("read", self.name)
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
        self.faults.check("remove", self.name)
        for name in names:
            self._forget(name)

    async def _drop_parts(self, items: Sequence[tuple[bytes, bytes, Collection[int]]]) -> None:
        await self.write_link.move(0)
        self.faults.check("remove", self.name)
        for namespace, key, parts in items:
            name = index_key(namespace, key)
            if (value := self._records.get(name)) is not None:
                left = without_parts(value, parts)
                kept = {slot for slot, _ in record_slots(left)}
                for slot, nbytes in record_slots(value):
                    if slot not in kept:
                        self._bytes.pop(slot, None)
                        self._used_bytes -= round_to_slot(nbytes)
                self._records[name] = left

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

    def _contents(self, span: Span, checksum: int | None) -> tuple[bytes, int]:
        """What is kept of a part, and its checksum."""
        data = bytearray(host_bytes(span, span.nbytes))
        taken = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
        if self.faults.happens("wrong bytes"):
            data[0] ^= 1
        return bytes(data), taken

    def _forget(self, name: bytes) -> None:
        value = self._records.pop(name, None)
        self._pins.discard(name)
        if value is not None:
            for slot, nbytes in record_slots(value):
                self._bytes.pop(slot, None)
                self._used_bytes -= round_to_slot(nbytes)

    def _checked(self, part: DiskPart) -> bytes:
        data = self._bytes.get(part.slot)
        if data is None:
            raise LostBytesError(f"slot {part.slot} of the simulated {self.name} tier is gone; drop its block")
        if xxhash.xxh3_64_intdigest(data) != part.checksum:
            raise ChecksumError(
                f"slot {part.slot} of the simulated {self.name} tier has other bytes than were written; remove the "
                "block, it will be computed again"
            )
        return data

    def _copy_out(self, part: DiskPart, into: Span) -> None:
        host_bytes(into, part.nbytes)[:] = self._checked(part)

    def _table(self) -> IndexTable:
        return IndexTable([sorted(self._records.items())])
