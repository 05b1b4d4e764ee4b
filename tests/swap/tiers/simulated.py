"""Tiers of any speed, with bytes and with failures. Chance comes from a seed."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import xxhash

from prefixd.planner.simulation.link import SimulatedLink
from prefixd.planner.simulation.store import UnbackedStoreTier
from prefixd_swap.copies.address_columns import Pair
from prefixd_swap.copies.copy_engine import CopyEngine
from prefixd_swap.errors import ChecksumError, MemoryMisuseError, StorageError
from prefixd_swap.sealing.rest_keys import RestKey
from prefixd_swap.slab.files.file_ops import host_bytes
from prefixd_swap.slab.index.block_record import BlockRecord, DiskPart, NewBlock
from prefixd_swap.spans import Span
from prefixd_swap.tiers import Identity, Int64s, Loads, Places

T = TypeVar("T")
Operation = Literal["read", "write", "remove", "wrong bytes"]


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


class FaultyStoreTier(UnbackedStoreTier):
    """A simulated store whose operations fail as its faults say."""

    def __init__(self, *args: Any, faults: SimulatedFaults | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.faults = SimulatedFaults() if faults is None else faults

    def lose(self, slots: Iterable[int]) -> None:
        """Takes the bytes of slots away, as if their file was deleted."""
        for slot in slots:
            del self._bytes[slot]

    def discard(self, names: Sequence[Identity], reason: str) -> None:
        self.faults.check("remove", self.name)
        super().discard(names, reason)

    def discard_namespaces(self, namespaces: Collection[bytes]) -> None:
        self.faults.check("remove", self.name)
        super().discard_namespaces(namespaces)

    async def put_namespace(self, namespace: bytes, spec: bytes, encryption: RestKey | None = None) -> None:
        self.faults.check("write", self.name)
        await super().put_namespace(namespace, spec, encryption)

    async def pin(self, names: Sequence[Identity], pinned: bool) -> int:
        self.faults.check("write", self.name)
        return await super().pin(names, pinned)

    async def try_read(self) -> None:
        self.faults.check("read", self.name)

    async def try_write(self) -> None:
        self.faults.check("write", self.name)

    async def revive(self, known: Int64s) -> Int64s:
        self.faults.check("write", self.name)
        return await super().revive(known)

    async def _read(self, loads: Loads) -> list[StorageError | None]:
        return self._failing(await super()._read(loads))

    async def _verify(self, expected: Sequence[BlockRecord]) -> list[StorageError | None]:
        return self._failing(await super()._verify(expected))

    async def _write(self, blocks: Sequence[NewBlock]) -> list[Places | None]:
        for _ in blocks:
            self.faults.check("write", self.name)
        return await super()._write(blocks)

    async def _remove(self, names: Sequence[bytes]) -> None:
        self.faults.check("remove", self.name)
        await super()._remove(names)

    async def _drop_parts(self, items: Sequence[tuple[bytes, bytes, Collection[int]]]) -> None:
        self.faults.check("remove", self.name)
        await super()._drop_parts(items)

    def _failing(self, results: Sequence[StorageError | None]) -> list[StorageError | None]:
        """The results of a read, with those that are to fail."""
        failing: list[StorageError | None] = []
        for result in results:
            try:
                self.faults.check("read", self.name)
            except StorageError as error:
                failing.append(error)
            else:
                failing.append(result)
        return failing


class SimulatedStoreTier(FaultyStoreTier):
    """A simulated store with bytes, in this process's memory."""

    backed = True

    def _contents(self, span: Span, checksum: int | None) -> tuple[bytes, int]:
        data = bytearray(host_bytes(span, span.nbytes))
        taken = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
        if self.faults.happens("wrong bytes"):
            data[0] ^= 1
        return bytes(data), taken

    def _checked(self, part: DiskPart) -> bytes:
        data = super()._checked(part)
        if xxhash.xxh3_64_intdigest(data) != part.checksum:
            raise ChecksumError(
                f"slot {part.slot} of the simulated {self.name} tier has other bytes than were written; remove the "
                "block, it will be computed again"
            )
        return data

    def _copy_out(self, part: DiskPart, into: Span) -> None:
        host_bytes(into, part.nbytes)[:] = self._checked(part)
