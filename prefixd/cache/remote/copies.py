"""Reads blocks from a shared store and writes them to it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.cache.coding.namespace_codings import Codings, NamespaceCodings
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.placement import Placement
from prefixd.cache.remote.digests import Digests
from prefixd.cache.remote.health import RemoteHealth
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots
from prefixd_swap import BadObjectError, LostBytesError, Span, StorageError
from prefixd_swap.stores import BlockIdentity
from prefixd_swap.tiers import MemoryTier, PartRead, RemoteLoad, RemotePart, RemoteSave, RemoteTier, part_object_name

_UNUSABLE_S = 60.0
"""How long an object is not looked up again that was missing, torn or must not be used. A store says of a torn one that
it is there: a lookup would count it as a copy, and the block that is computed then would not be written."""
_REMEMBERED = 1 << 16  # such objects
_PREPARED_AT_ONCE = 128  # blocks: a millisecond


@dataclass(frozen=True, slots=True)
class _Block:
    """A block to write: what its objects say of it, and how its parts are coded."""

    identity: BlockIdentity
    codings: Codings

    def name(self, part: int) -> bytes:
        return part_object_name(self.identity.digest, part, self.codings[part])


class RemoteCopies:
    """Copies of blocks in a shared store.

    A host reads and writes the objects of its own coding of a namespace, and no others.

    Args:
        tier: the store's tier.
        placement: records where blocks are.
        digests: computes digests of blocks.
        codings: how the parts of each namespace are coded in the store.
        health: handles failures.
        checksums: computes checksums of blocks in memory.
    """

    def __init__(
        self,
        tier: RemoteTier,
        placement: Placement,
        digests: Digests,
        codings: NamespaceCodings,
        health: RemoteHealth,
        checksums: Checksums,
    ) -> None:
        self._tier = tier
        self._placement = placement
        self._digests = digests
        self._codings = codings
        self._health = health
        self._checksums = checksums
        self._unusable: OrderedDict[bytes, float] = OrderedDict()
        """By digest the time from which on it may be looked up again, of blocks of which a read failed. A block stays
        here until this host writes it anew, however late that is, or reads all of what another host has written."""

    # -- reading ------------------------------------------------------------------------------------------------

    async def read(
        self, trie: Trie, rows: Rows, parts: Sequence[int], taken: Slots, target: MemoryTier, movement: Movement
    ) -> npt.NDArray[np.bool_]:
        """Reads `parts` of rows, held in the remote tier, into slots of `target`, which a CPU can address.

        A block leaves the tier if the store has lost it or its object fails authentication. Returns [len(rows)], true
        for blocks that were read.
        """
        tier, came = self._tier, np.zeros(len(rows), np.bool_)
        if not tier.readable or not len(rows):
            return came
        numbers = trie.slots[rows, tier.level][:, list(parts)]
        # An unusable block leaves the tier although it is held, also while room was made for it here.
        there = np.flatnonzero((numbers != NO_SLOT).all(axis=1))
        if len(there) < len(rows):
            came[there] = await self.read(trie, rows[there], parts, taken[there], target, movement)
            return came
        loads: list[RemoteLoad] = []
        for start in range(0, len(rows), _PREPARED_AT_ONCE):
            if loads:
                await give_way()
            some = slice(start, start + _PREPARED_AT_ONCE)
            addresses = target.addresses(taken[some]).tolist()
            loads += self._loads(trie, rows[some], parts, numbers[some, 0].tolist(), addresses)
        nbytes = sum(trie.part_bytes[part] for part in parts)
        read = tier.submit_read(loads, nbytes, movement.urgency, deadline_s=movement.due_s)
        results = await movement.run(read)
        lost: list[int] = []
        now_s = self._placement.clock()
        for at, result in enumerate(results):
            if isinstance(result, tuple):
                came[at] = True
                if len(parts) == len(trie.part_bytes):  # another host has written it anew
                    self._unusable.pop(loads[at].block.digest, None)
            elif isinstance(result, LostBytesError | BadObjectError):
                lost.append(at)
                self._remember(loads[at].block.digest, now_s + _UNUSABLE_S)
        if lost:
            self._placement.lost["not served: missing or wrong in the shared store"] += len(lost)
            self._placement.discard_copies(trie, rows[lost], tier)
        self._note_read(trie, rows[came], list(parts), [result for result in results if isinstance(result, tuple)])
        return came

    def is_unusable(self, digest: bytes) -> bool:
        """Whether an object of this block was read in the last minute and was unusable. Then it is not looked up."""
        until_s = self._unusable.get(digest)
        return until_s is not None and until_s > self._placement.clock()

    def _remember(self, digest: bytes, until_s: float) -> None:
        self._unusable[digest] = until_s
        self._unusable.move_to_end(digest)
        while len(self._unusable) > _REMEMBERED:
            self._unusable.popitem(last=False)

    def _note_read(self, trie: Trie, rows: Rows, parts: Sequence[int], read: Sequence[tuple[PartRead, ...]]) -> None:
        """Records what was read of `parts` of m blocks: which KV groups have bytes of a lossy copy, and checksums.

        Not the checksums of parts that this host also has itself: two hosts may compute bytes that differ in the last
        bit for the same tokens, and both are good.
        """
        altered = [at for at, block in enumerate(read) if any(part.errors is not None for part in block)]
        for at in altered:
            groups = [trie.part_mask[part] for part, of in zip(parts, read[at], strict=True) if of.errors is not None]
            errors = [part.errors for part in read[at] if part.errors is not None]
            trie.set_errors(rows[[at]], np.array(errors, np.float32).max(axis=0, keepdims=True))
            trie.set_decoded(rows[[at]], np.array([np.bitwise_or.reduce(groups)], np.uint8))
        checksums = np.array([[part.checksum for part in block] for block in read], np.uint64)
        checksums = checksums.reshape(len(rows), len(parts))
        local = [
            tier.level for tier in (self._placement.tiers.shared, self._placement.tiers.durable) if tier is not None
        ]
        alone = (trie.slots[rows][:, local][:, :, list(parts)] == NO_SLOT).all(axis=1)
        known = trie.checksums[rows]
        known[:, parts] = np.where(alone, checksums, known[:, parts])
        trie.checksums[rows] = known

    def _loads(
        self, trie: Trie, rows: Rows, parts: Sequence[int], numbers: list[int], addresses: list[list[int]]
    ) -> Iterator[RemoteLoad]:
        for row, codings, number, to in zip(
            rows.tolist(), self._codings_of(trie, rows), numbers, addresses, strict=True
        ):
            spans = tuple(
                RemotePart(part, Span(address, trie.part_bytes[part]), codings[part])
                for part, address in zip(parts, to, strict=True)
            )
            yield RemoteLoad(self._digests.identity(trie, row, self._tier.digest(number)), spans)

    def _codings_of(self, trie: Trie, rows: Rows) -> list[Codings]:
        """[len(rows)]: how the parts of each block are coded in the store."""
        ordinals = trie.namespace[rows].tolist()
        known = {ordinal: self._codings.codings(ordinal) for ordinal in set(ordinals)}
        return [known[ordinal] for ordinal in ordinals]

    # -- writing ------------------------------------------------------------------------------------------------

    async def write(self, trie: Trie, rows: Rows, source: MemoryTier, movement: Movement) -> int:
        """Writes bytes of rows, held in `source`, that the store lacks; returns how many of the blocks it has now.

        Deletes unusable objects first. Does not write again blocks that another host has written meanwhile, nor bytes
        that came from a lossy copy (`Trie.unwritten`).
        """
        groups = trie.unwritten(rows, source.level, self._tier.level)
        rows, groups = rows[groups != 0], groups[groups != 0]
        if not len(rows) or not self._tier.writable:
            return 0
        await self._checksums.wait(trie, rows)
        digests = await self._digests.of_rows(trie, rows)
        blocks = [
            _Block(self._digests.identity(trie, row, digest), codings)
            for row, digest, codings in zip(rows.tolist(), digests, self._codings_of(trie, rows), strict=True)
        ]
        try:
            there = await self._there(trie, blocks, groups)
            absent = np.flatnonzero(~there)
            written = await self._write(
                trie, rows[absent], [blocks[at] for at in absent.tolist()], source, groups[absent], movement
            )
            there[absent] = written
        except StorageError as error:
            self._health.failed(error)
            return 0
        self.enter(trie, rows[there], [digests[at] for at in np.flatnonzero(there).tolist()], groups[there])
        return int(np.count_nonzero(there))

    async def _there(self, trie: Trie, blocks: Sequence[_Block], groups: GroupMask) -> npt.NDArray[np.bool_]:
        """[len(blocks)]: whether the store has all parts of the block's `groups`."""
        names, of_block = [], []
        for at, (block, mask) in enumerate(zip(blocks, groups.tolist(), strict=True)):
            for part in np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist():
                names.append(block.name(part))
                of_block.append(at)
        there = np.ones(len(blocks), np.bool_)
        found = np.array(await self._tier.exist(names), np.bool_)
        there[np.array(of_block, np.int64)[~found]] = False
        for at, block in enumerate(blocks):
            there[at] &= block.identity.digest not in self._unusable
        return there

    async def _write(
        self,
        trie: Trie,
        rows: Rows,
        blocks: Sequence[_Block],
        source: MemoryTier,
        groups: GroupMask,
        movement: Movement,
    ) -> npt.NDArray[np.bool_]:
        if not len(rows):
            return np.zeros(0, np.bool_)
        await self._delete_unusable(trie, blocks)
        saves = list(self._saves(trie, rows, blocks, source, groups))
        nbytes = int(trie.group_bytes[groups].max())
        results = await movement.run(self._tier.submit_write(saves, nbytes, movement.urgency, count=len(saves)))
        written = np.array([result is True for result in results], np.bool_)
        for at in np.flatnonzero(written).tolist():
            self._unusable.pop(blocks[at].identity.digest, None)
        if written.all():
            self._health.wrote()
        return written

    async def _delete_unusable(self, trie: Trie, blocks: Sequence[_Block]) -> None:
        """Deletes unusable objects: other hosts cannot use them, and some stores refuse to overwrite a name."""
        parts = range(len(trie.part_bytes))
        names = [each.name(part) for each in blocks if each.identity.digest in self._unusable for part in parts]
        if names:
            await self._tier.delete(names)

    def _saves(
        self, trie: Trie, rows: Rows, blocks: Sequence[_Block], source: MemoryTier, groups: GroupMask
    ) -> Iterator[RemoteSave]:
        addresses = source.addresses(trie.slots[rows, source.level]).tolist()
        checksums, known = trie.checksums[rows].tolist(), trie.checksummed[rows].tolist()
        of_shared = source is self._placement.tiers.shared  # checksums are of its bytes
        for at, (block, mask) in enumerate(zip(blocks, groups.tolist(), strict=True)):
            parts = np.flatnonzero(trie.part_mask & np.uint8(mask)).tolist()
            yield RemoteSave(
                block.identity,
                tuple(
                    RemotePart(
                        part,
                        Span(addresses[at][part], trie.part_bytes[part], source.on_device),
                        block.codings[part],
                        checksums[at][part] if of_shared and known[at][part] else None,
                    )
                    for part in parts
                ),
            )

    async def delete(self, trie: Trie, rows: Rows) -> None:
        """Deletes the objects of blocks from the store, even if they are not known to be there: coded ones as this host
        codes them, and those without a coding.

        Raises:
            StorageError: some objects may be left.
        """
        with self._placement.holds.hold("deletion", trie, rows):
            digests = await self._digests.of_rows(trie, rows)
            codings = self._codings_of(trie, rows)
        names = {
            part_object_name(digest, part, coding): None
            for digest, of_block in zip(digests, codings, strict=True)
            for part, own in enumerate(of_block)
            for coding in (own, None)
        }
        await self._tier.delete(list(names))

    def enter(self, trie: Trie, rows: Rows, digests: Sequence[bytes], groups: GroupMask) -> None:
        """Enters that the store has `groups`, [m] masks, of m different blocks."""
        tier = self._tier
        groups = groups & ~trie.there[rows, tier.level]
        chosen = np.flatnonzero(groups)
        if not len(chosen):
            return
        rows, groups = rows[chosen], groups[chosen]
        has = (groups[:, None] & trie.part_mask) != 0
        parts = np.count_nonzero(has, axis=1)
        numbers = trie.slots[rows, tier.level].max(axis=1)
        known = numbers != NO_SLOT
        tier.add_parts(numbers[known], parts[known])
        numbers[~known] = tier.enter([digests[at] for at in chosen[~known].tolist()], parts[~known])
        self._placement.put(trie, rows, tier, np.where(has, numbers[:, None], NO_SLOT))
