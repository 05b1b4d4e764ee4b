"""The disk tier: the slab store's blocks, read and written in pieces by the threads of one device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from prefixd_swap.codecs.coding import Decoded
from prefixd_swap.errors import IndexUnavailableError, LostBytesError, StorageError
from prefixd_swap.pages.page_eviction import ChooseVictims
from prefixd_swap.sealing.rest_keys import RestKey
from prefixd_swap.sealing.sealed_objects import part_identity
from prefixd_swap.slab.index.block_record import BlockRecord, DiskPart, NewBlock
from prefixd_swap.slab.index.record_columns import Encryption, Records
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.threads import started_threads
from prefixd_swap.tiers.base import NO_SLOT, Int64s
from prefixd_swap.tiers.store_tier import BlockRead, Identity, Loads, Places, StoreTier
from prefixd_swap.transfers import DeviceLimits, Piece, Transfers, Urgency

C = TypeVar("C")
T = TypeVar("T")

REMOVED_AT_ONCE = 1024
PINNED_AT_ONCE = 8192
_CONTROL_THREADS = 2  # one that checks the files, and one for a writer that cannot wait for the check


class DiskTier(StoreTier):
    """The disk tier's blocks. The caller closes the store; for the other arguments see `StoreTier`.

    Args:
        threads: pieces under way of all urgencies; half as many again are for demand alone. Pieces that are ahead of
            demand in the device's own queue delay it.
    """

    durable = True

    def __init__(
        self,
        store: SlabStore,
        transfers: Transfers,
        *,
        name: str = "disk",
        level: int = 2,
        threads: int = 4,
    ) -> None:
        spare = threads // 2
        limits = DeviceLimits(in_flight=threads + spare, reserved=spare)
        super().__init__(name, level, transfers, limits, writes=1, threads=True)
        self.store = store
        self.keys = store.keys
        self._control = started_threads(_CONTROL_THREADS, f"prefixd-{name}-control")

    @property
    def capacity_bytes(self) -> int:
        return self.store.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self.store.used_bytes

    async def remove(self, names: Sequence[Identity], urgency: Urgency, *, damaged: bool = False) -> None:
        """Removes blocks, `REMOVED_AT_ONCE` in one durable transaction."""
        await self._change(partial(self.store.remove, damaged=damaged), names, urgency)

    async def _change(self, change: Callable[[Sequence[C]], None], blocks: Sequence[C], urgency: Urgency) -> None:
        """Changes the index, `REMOVED_AT_ONCE` blocks in one durable transaction."""
        starts = range(0, len(blocks), REMOVED_AT_ONCE)
        pieces = (Piece(0, partial(change, blocks[start : start + REMOVED_AT_ONCE])) for start in starts)
        transfer = self.transfers.submit(self.write_path, pieces, urgency, in_order=True, count=len(starts), nbytes=0)
        (await transfer.finish()).values()

    async def drop_parts(self, parts: Sequence[tuple[bytes, bytes, Collection[int]]], urgency: Urgency) -> None:
        """Removes parts, `REMOVED_AT_ONCE` blocks in one durable transaction."""
        await self._change(self.store.drop_parts, parts, urgency)

    @property
    def choose_victims(self) -> ChooseVictims | None:
        """Single slots, or whole pages of the slab files."""
        return self.store.choose_victims

    @property
    def choose_mixed(self) -> ChooseVictims | None:
        """Stretches of mixed pages of the slab files."""
        return partial(self.store.choose_victims, mixed=True)

    def room(self, nbytes: int) -> int:
        return self.store.room(nbytes)

    def load(self) -> Records:
        return self.store.load()

    def namespaces(self) -> dict[bytes, bytes]:
        return self.store.namespaces()

    def discard(self, names: Sequence[Identity], reason: str) -> None:
        self.store.remove_unusable(names, reason)

    def forget(self, names: Sequence[Identity], parts: Sequence[tuple[bytes, bytes, int]]) -> None:
        for start in range(0, len(names), REMOVED_AT_ONCE):
            self.store.remove(names[start : start + REMOVED_AT_ONCE])
        for start in range(0, len(parts), REMOVED_AT_ONCE):
            some = parts[start : start + REMOVED_AT_ONCE]
            self.store.drop_parts([(namespace, key, range(count)) for namespace, key, count in some])

    def discard_namespaces(self, namespaces: Collection[bytes]) -> None:
        self.store.remove_namespaces(namespaces)

    async def encryption(self) -> Encryption:
        return await self._in_thread(self.store.encryption)

    def reseal_namespaces(self, encryption: Mapping[bytes, RestKey | None]) -> None:
        self.store.reseal_namespaces(encryption)

    async def put_namespace(self, namespace: bytes, spec: bytes, encryption: RestKey | None = None) -> None:
        await self._in_thread(self.store.put_namespace, namespace, spec, encryption)

    async def remove_namespaces(self, namespaces: Collection[bytes]) -> None:
        await self._in_thread(self.store.remove_namespaces, namespaces)

    async def pin(self, names: Sequence[Identity], pinned: bool) -> int:
        """Pins or unpins blocks, `PINNED_AT_ONCE` in one durable transaction."""
        there = 0
        for start in range(0, len(names), PINNED_AT_ONCE):
            there += await self._in_thread(self.store.pin, names[start : start + PINNED_AT_ONCE], pinned)
        return there

    def pins(self) -> list[Identity]:
        return self.store.pins()

    async def try_read(self) -> None:
        await self._in_thread(self.store.try_read)

    async def try_write(self) -> None:
        await self._in_thread(self.store.try_commit)

    async def audit(self) -> Records | None:
        return await self._in_thread(self.store.audit)

    async def revive(self, known: Int64s) -> Int64s:
        return await self._in_thread(self.store.revive, known)

    async def lost_slots(self) -> Int64s:
        return await self._in_thread(self.store.lost_slots)

    async def has_shrunk(self) -> bool:
        return await self._in_thread(lambda: self.store.shrunk)

    def check_integrity(self) -> None:
        self.store.check_integrity()

    def close(self) -> None:
        """Ends the control threads."""
        self._control.shutdown()

    def _read_piece(self, loads: Loads, nbytes: int) -> Piece[list[BlockRead]]:
        return Piece(nbytes, partial(_read, self.store, loads))

    def _write_piece(self, blocks: list[NewBlock], nbytes: int) -> Piece[list[Places | None]]:
        return Piece(nbytes, partial(_write, self.store, blocks))

    def _verify_piece(self, expected: Sequence[BlockRecord], nbytes: int) -> Piece[list[StorageError | None]]:
        return Piece(nbytes, partial(_verify, self.store, expected))

    async def _in_thread(self, work: Callable[..., T], *args: object) -> T:
        """Runs a call that moves no blocks in a control thread: a probe must not wait behind a thousand reads."""
        return await asyncio.get_running_loop().run_in_executor(self._control, work, *args)


def _read(store: SlabStore, loads: Loads) -> list[BlockRead]:
    """Runs in a thread."""
    results: list[BlockRead] = [None] * len(loads)
    decoded: dict[int, list[Decoded | None]] = {}
    for part, nbytes in enumerate(loads.nbytes):
        there = np.flatnonzero(loads.slots[:, part] != NO_SLOT)
        coded = np.zeros(len(there), np.int64) if loads.coded is None else loads.coded[there, part]
        slots, checksums, addresses = (
            column[there, part].tolist() for column in (loads.slots, loads.checksums, loads.addresses)
        )
        parts = [
            DiskPart(slot, stored or nbytes, checksum, stored > 0)
            for slot, checksum, stored in zip(slots, checksums, coded.tolist(), strict=True)
        ]
        identities = None
        if loads.names is not None and loads.parts is not None:
            identities = [part_identity(*loads.names[at], loads.parts[part]) for at in there.tolist()]
        outcomes = store.read_all(parts, addresses, nbytes, identities)
        for at, outcome in zip(there.tolist(), outcomes, strict=True):
            if isinstance(outcome, StorageError):
                results[at] = results[at] or outcome
            elif outcome is not None:
                decoded.setdefault(at, [None] * len(loads.nbytes))[part] = outcome
    for at, of_block in decoded.items():
        results[at] = results[at] or tuple(of_block)
    return results


def _write(store: SlabStore, blocks: Sequence[NewBlock]) -> list[Places | None]:
    """Runs in a thread."""
    return [None if record is None else tuple(record.parts) for record in store.write(blocks)]


def _verify(store: SlabStore, expected: Sequence[BlockRecord]) -> list[StorageError | None]:
    """Runs in a thread.

    Raises:
        IndexUnavailableError: the state of every block is unknown.
    """
    results: list[StorageError | None] = []
    for record in expected:
        try:
            found = store.check(record.namespace, record.key, record)
        except IndexUnavailableError:
            raise
        except StorageError as error:
            results.append(error)
        else:
            results.append(None if found else LostBytesError("the index has lost the block"))
    return results
