"""Restores the blocks of the disk index into the tries, by columns: a million blocks in about a second."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from prefixd.base.errors import InvalidArgumentError, PrefixdError
from prefixd.base.rules.rules import from_fields
from prefixd.cache.disk.altered_blocks import find_altered
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, NamespaceSpec, namespace_digest
from prefixd.cache.placement.placement import Placement
from prefixd_swap import BlockRecord, RecordGroup, Records, StorageError, UseHistory
from prefixd_swap.errors import GeometryError
from prefixd_swap.slab.index.record_columns import OF_ANY_SIZE
from prefixd_swap.tiers import StoreTier

log = logging.getLogger(__name__)

_CHUNK = 1 << 13  # blocks entered at a time: their columns stay in the processor's cache
_TOKEN_BYTES = 4
_ALWAYS_COUNT = set(NamespaceSpec.__struct_fields__) - {"codec"}
"""Fields of a namespace that its id is made of, whatever their value. Others count if they are set."""
_NO_ROW = -1
_NO_PARENT = np.iinfo(np.int64).min  # neither a row nor a namespace's root

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcome of `restore`."""

    blocks: int
    """Blocks in the tries, with a copy on disk."""
    refused: Mapping[str, int]
    """Blocks not in the tries, by reason."""
    refused_ids: Sequence[tuple[bytes, bytes]]
    """Namespace and key of refused blocks, children before parents, to be removed."""
    altered: int
    """Blocks whose bytes a lossy codec has altered more than their namespace allows; they have no bytes any more."""
    altered_ids: Sequence[tuple[bytes, bytes]]
    """Those of them to be removed, children before parents."""
    bare: Sequence[tuple[bytes, bytes, int]]
    """Those of them whose record stays: namespace, key, and the number of parts to be dropped."""


def known_namespaces(
    stored: Mapping[bytes, bytes], wanted: Iterable[bytes], registry: NamespaceRegistry
) -> dict[bytes, Namespace]:
    """Registers namespaces under their ids on disk; leaves out one that cannot be read or does not match its id.

    Args:
        stored: encoded specs, by id.
        wanted: ids with blocks.
        registry: gets the namespaces; it may have common ones already.
    """
    known = {}
    for identity in wanted:
        spec = stored.get(identity)
        if spec is None:
            continue
        try:
            decoded = _decoded(identity, spec)
            known[identity] = registry.find(decoded) or registry.register(decoded, identity)
        except (msgspec.DecodeError, PrefixdError) as error:
            log.error("namespace %s on disk is of no use, its blocks are dropped: %s", identity.hex(), error)
    return known


def is_usable(spec: bytes, record: BlockRecord) -> bool:
    """Whether a block on disk can belong to the namespace with this spec."""
    try:
        namespace = _decoded(record.namespace, spec)
    except (msgspec.DecodeError, PrefixdError):
        return False
    wanted = [part.nbytes for part in namespace.parts]
    return (
        len(record.tokens) == namespace.block_tokens * _TOKEN_BYTES
        and len(record.parts) == len(wanted)
        and all(
            part is None or part.coded or part.nbytes == nbytes
            for part, nbytes in zip(record.parts, wanted, strict=True)
        )
    )


@lru_cache(maxsize=64)
def _decoded(identity: bytes, spec: bytes) -> NamespaceSpec:
    """Raises msgspec.DecodeError if a spec cannot be read, InvalidArgumentError if it is invalid or has another id.

    A spec of an earlier version, without some of the fields that always count, may have another id.
    """
    try:
        decoded = msgspec.msgpack.decode(spec, type=NamespaceSpec, dec_hook=from_fields)
    except GeometryError as error:  # of a part's shape
        raise InvalidArgumentError(str(error)) from error
    decoded.check()
    fields = msgspec.msgpack.decode(spec, type=dict[str, msgspec.Raw]).keys()
    earlier = fields - {"codec"} < _ALWAYS_COUNT
    if namespace_digest(decoded) != identity and not earlier:
        raise InvalidArgumentError(f"its id is not that of {decoded.name!r}")
    return decoded


def restore(
    records: Records,
    known: Mapping[bytes, Namespace],
    trie_of: Callable[[Namespace], Trie],
    placement: Placement,
    level: int,
    most_error: Callable[[Namespace], float],
) -> Restored:
    """Enters `records` into empty tries. An invalid record is refused with its descendants.

    Args:
        records: the blocks on disk, from `StoreTier.load`.
        known: the namespaces by id on disk; records of others are refused.
        trie_of: returns a namespace's trie, and makes it if there is none.
        placement: counts the entered blocks, for eviction.
        level: the durable tier's.
        most_error: the largest RMS error that a namespace's blocks may have; 0: they are exact.
    """
    namespaces = [known.get(identity) for identity in records.namespaces]
    tries = [None if namespace is None else trie_of(namespace) for namespace in namespaces]
    entry = _Entry(records, namespaces, tries, level, placement.uses)
    most = [0.0 if namespace is None else most_error(namespace) for namespace in namespaces]
    entry.enter_sound(placement.clock(), np.array(most, np.float32))
    for reason, blocks in entry.refused.items():
        log.warning("%d blocks on disk are dropped: %s", blocks, reason)
    placement.epoch += 1
    altered = entry.altered
    if len(altered):
        log.warning(
            "%d blocks on disk that a lossy codec has altered are dropped: their namespaces are stored without loss "
            "now, or disk.codec_error is below their errors; they are computed again at their next use",
            len(altered),
        )

    def names(chosen: Bools) -> list[tuple[bytes, bytes]]:
        rows = np.flatnonzero(chosen)[::-1].tolist()
        return [(records.namespaces[records.namespace[row]], records.keys[row].tobytes()) for row in rows]

    ids, gone = names(~entry.sound), names(altered.gone)
    parts = {records.namespaces[at]: 0 if trie is None else len(trie.part_bytes) for at, trie in enumerate(tries)}
    bare = [(*name, parts[name[0]]) for name in names(altered.bare)]
    blocks = len(records) - len(ids) - len(gone)
    return Restored(blocks, dict(entry.refused), ids, len(gone) + len(bare), gone, bare)


def remove_refused(store: StoreTier, restored: Restored) -> None:
    """Sets refused blocks aside and frees their slots; a warning lasts until `prefixd recover`. Removes altered blocks.

    On an error their slots stay allocated until the next start tries again.
    """
    ids = restored.refused_ids
    try:
        if restored.altered:
            store.forget(restored.altered_ids, restored.bare)
        if ids:
            store.discard(ids, ", ".join(f"{blocks} {why}" for why, blocks in restored.refused.items()))
    except StorageError as error:
        log.error("blocks on disk that are not wanted could not be removed, the next start tries again: %s", error)


def remove_unused(store: StoreTier, unused: Collection[bytes]) -> None:
    """Removes namespaces without blocks from the index. On an error the next start tries again."""
    try:
        if unused:
            store.discard_namespaces(unused)
    except StorageError as error:
        log.error("%d namespaces on disk without blocks could not be removed: %s", len(unused), error)


class _Entry:
    """Enters records into tries. `sound` marks the records that no check has refused so far.

    Args:
        records: the records.
        namespaces: their namespaces, None for unknown ones.
        tries: the tries of these.
        level: the durable tier's.
        uses: gets the entered rows.
    """

    def __init__(
        self,
        records: Records,
        namespaces: Sequence[Namespace | None],
        tries: Sequence[Trie | None],
        level: int,
        uses: UseHistory,
    ) -> None:
        self._level = level
        self._uses = uses
        self.sound = np.ones(len(records), np.bool_)
        self.refused: Counter[str] = Counter()
        self._records = records
        self._tries = tries
        self._ordinals = np.array([_NO_ROW if each is None else each.ordinal for each in namespaces], np.int64)
        self._roots = np.array([_NO_PARENT if each is None else each.root for each in namespaces], np.int64)
        self._rows = np.full(len(records), _NO_ROW, np.int64)  # in the tries

    def enter_sound(self, now_s: float, most_errors: npt.NDArray[np.float32]) -> None:
        """Checks the records and enters sound ones, without bytes that are altered more than [namespaces] allow."""
        records = self._records
        self._refuse(self._ordinals[records.namespace] == _NO_ROW, "of an unknown namespace")
        for group in records.groups:
            if 0 in group.part_bytes and not self._fitting(group).any():
                self._refuse(self._all_of(group), "without some of their parts")
            else:
                self._refuse(self._foreign(group), "of another size than their namespace's")
        above = records.parent
        depth = np.where(above >= 0, records.depth[above] + 1, 0)
        self._refuse(records.depth != depth, "not where their parents say")
        del depth
        self._refuse_orphans()
        self.altered = find_altered(records, self.sound, self._levels, most_errors)
        tries = {trie.ordinal: trie for trie in self._tries if trie is not None}
        for trie in tries.values():
            groups = [group for group in records.groups if _fits(group, trie)]
            if groups:
                self._enter(trie, groups, now_s)

    def _refuse(self, rows: Bools, reason: str) -> None:
        rows = rows & self.sound
        if count := int(np.count_nonzero(rows)):
            self.refused[reason] += count
            self.sound &= ~rows

    def _refuse_orphans(self) -> None:
        """Refuses descendants of refused blocks in one pass over the depths: a parent comes before its children."""
        if self.sound.all():
            return
        parent, lost = self._records.parent, np.zeros(len(self.sound), np.bool_)
        for rows in self._levels():
            above = parent[rows]
            lost[rows] = (above >= 0) & (~self.sound[above] | lost[above])
        self._refuse(lost, "of a prefix that was dropped")

    def _all_of(self, group: RecordGroup) -> Bools:
        rows = np.zeros(len(self.sound), np.bool_)
        rows[group.rows] = True
        return rows

    def _fitting(self, group: RecordGroup) -> Bools:
        """[namespaces]: which have blocks with the group's sizes."""
        return np.array([trie is not None and _fits(group, trie) for trie in self._tries], np.bool_)

    def _foreign(self, group: RecordGroup) -> Bools:
        rows = np.zeros(len(self.sound), np.bool_)
        rows[group.rows] = ~self._fitting(group)[self._records.namespace[group.rows]]
        return rows

    def _parents(self, rows: Rows) -> Rows:
        """The parents in the trie: rows, roots, or _NO_PARENT if the parent is not there."""
        above = self._records.parent[rows]
        first = above < 0
        inner = self._rows[above]
        inner[inner == _NO_ROW] = _NO_PARENT
        return np.where(first, self._roots[self._records.namespace[rows]], inner)

    def _levels(self) -> list[Rows]:
        """The records of each depth."""
        depth = self._records.depth
        order = np.argsort(depth, kind="stable")
        bounds = np.flatnonzero(np.diff(depth[order], prepend=-1, append=-1)).tolist()
        return [order[start:end] for start, end in pairwise(bounds)]

    def _enter(self, trie: Trie, groups: Sequence[RecordGroup], now_s: float) -> None:
        """Enters a trie's sound records, in prompt order, and their copies on disk.

        Matching a prompt then reads memory from front to back and touches few pages of the columns. A block and its
        parent may be in different groups, with different parts on disk. A group may also have blocks of other tries
        with the same part sizes and other rules.
        """
        records = self._records
        ours = self.sound & ~self.altered.gone
        ours &= np.array([its is trie for its in self._tries], np.bool_)[records.namespace]
        fitting = np.zeros(len(ours), np.bool_)
        for group in groups:
            fitting[group.rows] = True
        ours &= fitting
        self._rows[ours] = trie.take_many_rows(int(np.count_nonzero(ours)), self._level)
        for start in range(0, len(ours), _CHUNK):
            added = start + np.flatnonzero(ours[start : start + _CHUNK])
            if not len(added):
                continue
            rows = self._rows[added]
            tokens = np.empty((len(added), trie.block_tokens), np.uint32)
            pieces: list[tuple[RecordGroup, Rows, Rows]] = []
            for group in groups:
                first, end = np.searchsorted(group.rows, [start, start + _CHUNK])
                at = first + np.flatnonzero(ours[group.rows[first:end]])
                mine = np.searchsorted(added, group.rows[at])
                tokens[mine] = group.tokens[at]
                pieces.append((group, mine, at))
            trie.insert_all(
                rows,
                self._parents(added),
                self._ordinals[records.namespace[added]],
                records.depth[added],
                records.keys[added],
                tokens,
                now_s,
            )
            for group, mine, at in pieces:
                if not len(at):
                    continue
                on_disk = np.array(group.part_bytes, np.int64) != 0
                coded = np.array(group.part_bytes, np.int64) == OF_ANY_SIZE
                there = on_disk & ~self.altered.bare[added[mine]][:, None]
                trie.put_copies(rows[mine], self._level, np.where(there, group.slots[at], NO_SLOT), now_s)
                self._uses.restored(trie, rows[mine], self._level, now_s)
                trie.checksums[rows[mine]] = group.checksums[at]
                if coded.any():
                    nbytes = np.where(coded & there, group.nbytes[at], 0).astype(np.uint32)
                    trie.set_coded(rows[mine], nbytes, group.checksums[at])
                if group.errors is not None and (some := there.any(axis=1)).any():
                    trie.set_errors(rows[mine][some], group.errors[at][some])


def _fits(group: RecordGroup, trie: Trie) -> bool:
    """Whether the group's blocks can be blocks of `trie`: all parts of a KV group are on disk, or none."""
    if (trie.block_tokens, len(trie.part_bytes)) != (group.tokens.block_tokens, len(group.part_bytes)):
        return False
    sizes = zip(group.part_bytes, trie.part_bytes, strict=True)
    if any(nbytes not in (0, OF_ANY_SIZE, wanted) for nbytes, wanted in sizes):
        return False
    there = [{group.part_bytes[part] != 0 for part in kv_group.parts} for kv_group in trie.groups]
    return all(len(found) == 1 for found in there)
