"""Reads blocks from the durable tier, verifies them, and drops damaged ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from prefixd.cache.disk.damaged_blocks import Damage
from prefixd.cache.disk.health import Drop
from prefixd.cache.disk.records import DiskRecords, Identity
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.movement import Movement, UrgentLock, to_the_end
from prefixd.cache.placement.placement import Placement
from prefixd.cache.tiers import Slots
from prefixd_swap import ChecksumError, IndexUnavailableError, LostBytesError, StorageError, SwapError
from prefixd_swap.tiers import Loads, MemoryTier, StoreTier
from prefixd_swap.tiers.store_tier import DecodedParts
from prefixd_swap.transfers import Urgency


class DiskReads:
    """Reads blocks from the durable tier.

    Args:
        placement: records where blocks are.
        records: names blocks on disk.
        drop: called with blocks whose bytes are bad.
        failed: called with a block that could not be read, and the error.
        lock: serializes changes of the store.
    """

    def __init__(
        self,
        placement: Placement,
        records: DiskRecords,
        drop: Drop,
        failed: Callable[[Trie, int, StorageError], None],
        lock: UrgentLock,
    ) -> None:
        self._placement = placement
        self._store = cast("StoreTier", placement.tiers.durable)  # without one, nothing is read
        self._records = records
        self._drop = drop
        self._failed = failed
        self._lock = lock
        self.decoded_bytes = 0
        """Bytes of parts that were decoded for readers since the start, as they are in memory."""
        self.decode_s = 0.0
        """Seconds that the disk's threads took for that, those of all threads together."""

    async def read(
        self, trie: Trie, rows: Rows, parts: Sequence[int], taken: Slots, target: MemoryTier, movement: Movement
    ) -> npt.NDArray[np.bool_]:
        """Reads `parts` of rows, held on disk, into slots of `target`, which a CPU can address.

        Drops a damaged block with its descendants that are not held. Returns [len(rows)], true for blocks that were
        read.
        """
        store, chosen = self._store, list(parts)
        if not store.readable or not len(rows):
            return np.zeros(len(rows), np.bool_)
        slots = trie.slots[rows, store.level][:, chosen]
        # A damaged block leaves the disk although it is held, also while room was made for it: do not read it.
        there: npt.NDArray[np.bool_] = (slots != NO_SLOT).all(axis=1)
        loads = Loads(
            slots,
            trie.stored_checksums(rows)[:, chosen],
            target.addresses(taken),
            tuple(trie.part_bytes[part] for part in chosen),
            trie.coded_bytes[rows][:, chosen] if trie.has_coded else None,
            *self._names(trie, rows, chosen),
        )
        read = store.submit_read(loads, movement.urgency, deadline_s=movement.due_s)
        outcomes = await movement.run(read)
        good: npt.NDArray[np.bool_] = self._judge(trie, rows, outcomes) & there
        self._note_decoded(trie, rows, chosen, outcomes, good)
        return good

    def _note_decoded(
        self,
        trie: Trie,
        rows: Rows,
        parts: Sequence[int],
        outcomes: Sequence[DecodedParts | SwapError | None],
        good: npt.NDArray[np.bool_],
    ) -> None:
        """Records the checksums of decoded bytes, and which of them a lossy codec has altered.

        A part that has come to memory meanwhile from elsewhere keeps its own checksum.
        """
        if not trie.has_coded:
            return
        shared = self._placement.tiers.shared.level
        for at in np.flatnonzero(good).tolist():
            row, outcome = int(rows[at]), outcomes[at]
            for part, decoded in zip(parts, outcome if isinstance(outcome, tuple) else (), strict=False):
                if decoded is None:
                    continue
                self.decoded_bytes += trie.part_bytes[part]
                self.decode_s += decoded.seconds
                if trie.slots[row, shared, part] == NO_SLOT:
                    trie.checksums[row, part] = decoded.checksum
        altered = rows[good][trie.errors[rows[good], 0] > 0]
        groups = int(np.bitwise_or.reduce(trie.part_mask[list(parts)]))
        trie.set_decoded(altered, np.full(len(altered), groups, np.uint8))

    def _names(
        self, trie: Trie, rows: Rows, parts: Sequence[int]
    ) -> tuple[list[Identity] | None, tuple[int, ...] | None]:
        """What encrypted parts need to be read."""
        if not trie.has_coded or self._store.keys.empty:
            return None, None
        return self._records.identities(trie, rows), tuple(parts)

    async def reread(self, trie: Trie, row: int) -> StorageError | None:
        """Reads a block into scratch memory. Returns the error, or None if the block is good."""
        outcome = await self.read_aside(trie, row, Urgency.DEMAND)
        if isinstance(outcome, StorageError) or not isinstance(outcome, SwapError):
            return outcome if isinstance(outcome, StorageError) else None
        raise outcome

    async def read_aside(
        self, trie: Trie, row: int, urgency: Urgency = Urgency.SCRUB
    ) -> DecodedParts | SwapError | None:
        """Reads a block into scratch memory; returns its error, or what was decoded, None if all its parts are raw."""
        store, here = self._store, np.array([row])
        scratch = [np.empty(nbytes, np.uint8) for nbytes in trie.part_bytes]
        addresses = np.array([[buffer.ctypes.data for buffer in scratch]], np.int64)
        coded = trie.coded_bytes[here] if trie.has_coded else None
        loads = Loads(
            *(trie.slots[here, store.level], trie.stored_checksums(here), addresses, tuple(trie.part_bytes), coded),
            *self._names(trie, here, range(len(trie.part_bytes))),
        )
        with self._placement.holds.hold("disk probe", trie, here, store):
            (outcome,) = await store.read(loads, urgency)
        return outcome

    def _judge(
        self, trie: Trie, rows: Rows, outcomes: Sequence[DecodedParts | SwapError | None]
    ) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which reads succeeded. Drops damaged blocks, in one call for each kind of damage."""
        damaged: dict[type[StorageError], list[int]] = {}
        first: dict[type[StorageError], StorageError] = {}
        for row, error in zip(rows.tolist(), outcomes, strict=True):
            if isinstance(error, ChecksumError | LostBytesError):
                damaged.setdefault(type(error), []).append(row)
                first.setdefault(type(error), error)
            elif isinstance(error, StorageError):
                self._placement.lost["not served: disk read error"] += 1
                self._failed(trie, row, error)
        for kind, lost in damaged.items():
            self._drop(trie, np.array(lost), first[kind])
        return np.array([not isinstance(outcome, SwapError) for outcome in outcomes], np.bool_)

    async def recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        """Verifies a block on disk while the store does not change, and drops it if it is damaged.

        Returns None if it is good, or if `row` holds another block than at `generation`.

        Raises:
            IndexUnavailableError: the index cannot be read.
        """
        return await to_the_end(self._recheck(trie, row, generation))

    async def _recheck(self, trie: Trie, row: int, generation: int) -> Damage | None:
        def there() -> bool:
            return trie.generation[row] == generation and len(self._records.stored(trie, np.array([row]))) > 0

        movement = Movement(Urgency.SCRUB)
        async with self._lock.hold(movement):
            if not there():
                return None
            identity = self._records.identity(trie, row)
            expected = self._records.expected(trie, np.array([row]))
            verify = self._store.submit_verify(expected, sum(trie.part_bytes), movement.urgency)
            (error,) = await movement.run(verify)
            if error is None:
                return None
            if isinstance(error, IndexUnavailableError) or not isinstance(error, StorageError):
                raise error
            if not there():
                return None
            return Damage(identity, error, self._drop(trie, np.array([row]), error))
