"""What the disk tier's index names comes back into the tries, in columns: a million blocks in about a second."""

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
from prefixd.base.rules import from_fields
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, NamespaceSpec, namespace_digest
from prefixd.cache.placement.placement import Placement
from prefixd_swap import BlockRecord, RecordGroup, Records, StorageError, UseHistory
from prefixd_swap.tiers import StoreTier

log = logging.getLogger(__name__)

_CHUNK = 1 << 16  # blocks entered at a time, so that what is copied on the way stays small
_TOKEN_BYTES = 4
_NO_ROW = -1
_NO_PARENT = np.iinfo(np.int64).min  # no row and no namespace's root

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Restored:
    """What became of the blocks that the index names."""

    blocks: int
    """In the tries, with their copy on disk."""
    refused: Mapping[str, int]
    """Not in the tries, by reason."""
    refused_ids: Sequence[tuple[bytes, bytes]]
    """Namespace and key of those, children before parents: nothing will ever ask for them, remove them."""


def known_namespaces(
    stored: Mapping[bytes, bytes], wanted: Iterable[bytes], registry: NamespaceRegistry
) -> dict[bytes, Namespace]:
    """Registers namespaces, by id, with the ids that they have on disk. One that cannot be read, or is not what its
    id stands for, is left out.

    Args:
        stored: what each stands for.
        wanted: those that have blocks; nobody needs the others.
        registry: has none of them, but common ones that stand beside some.
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
    """Whether a block on disk can be one of the namespace with this spec."""
    try:
        namespace = _decoded(record.namespace, spec)
    except (msgspec.DecodeError, PrefixdError):
        return False
    wanted = [part.nbytes for part in namespace.parts]
    return (
        len(record.tokens) == namespace.block_tokens * _TOKEN_BYTES
        and len(record.parts) == len(wanted)
        and all(part is None or part.nbytes == nbytes for part, nbytes in zip(record.parts, wanted, strict=True))
    )


@lru_cache(maxsize=64)
def _decoded(identity: bytes, spec: bytes) -> NamespaceSpec:
    """Raises msgspec.DecodeError, or InvalidArgumentError, where it is of no use.

    That is also where it is not what its id stands for, whose clients would be refused. An earlier version's, which had
    fewer fields, may have another id.
    """
    decoded = msgspec.msgpack.decode(spec, type=NamespaceSpec, dec_hook=from_fields)
    decoded.check()
    earlier = msgspec.msgpack.decode(spec, type=dict[str, msgspec.Raw]).keys() < set(NamespaceSpec.__struct_fields__)
    if namespace_digest(decoded) != identity and not earlier:
        raise InvalidArgumentError(f"its id is not that of {decoded.name!r}")
    return decoded


def restore(
    records: Records,
    known: Mapping[bytes, Namespace],
    trie_of: Callable[[Namespace], Trie],
    placement: Placement,
    level: int,
) -> Restored:
    """Enters `records` into tries that are empty.

    A record that cannot be a block costs itself and what continues it.

    Args:
        records: what is on disk, `StoreTier.load`.
        known: the namespaces by their id on disk; a record of another one is refused.
        trie_of: the trie of a namespace, made when there is none.
        placement: counts what was refused, and tells the eviction policy of the others.
        level: the durable tier's.
    """
    homes = [known.get(identity) for identity in records.namespaces]
    tries = [None if home is None else trie_of(home) for home in homes]
    entry = _Entry(records, homes, tries, level, placement.uses)
    entry.take_in(placement.clock())
    for reason, blocks in entry.refused.items():
        log.warning("%d blocks on disk are dropped: %s", blocks, reason)
    placement.epoch += 1
    refused = np.flatnonzero(~entry.sound)[::-1].tolist()
    ids = [(records.namespaces[records.namespace[row]], records.keys[row].tobytes()) for row in refused]
    return Restored(len(records) - len(ids), dict(entry.refused), ids)


def remove_refused(store: StoreTier, restored: Restored) -> None:
    """Frees the slots of what was refused, which is set aside first: it is a trouble until `prefixd recover`.

    On an error they stay taken until the next start tries again.
    """
    ids = restored.refused_ids
    try:
        if ids:
            store.discard(ids, ", ".join(f"{blocks} {why}" for why, blocks in restored.refused.items()))
    except StorageError as error:
        log.error("blocks on disk that are of no use could not be removed, the next start tries again: %s", error)


def remove_unused(store: StoreTier, unused: Collection[bytes]) -> None:
    """Forgets what namespaces stood for that have no block. On an error the next start tries again."""
    try:
        if unused:
            store.discard_namespaces(unused)
    except StorageError as error:
        log.error("%d namespaces on disk without blocks could not be removed: %s", len(unused), error)


class _Entry:
    """The way of records into tries: `sound` are those for which nothing speaks against it so far.

    Args:
        records: the records.
        homes: their namespaces, None for unknown ones.
        tries: the tries of those.
        level: the durable tier's.
        uses: is told of them.
    """

    def __init__(
        self,
        records: Records,
        homes: Sequence[Namespace | None],
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
        self._ordinals = np.array([_NO_ROW if home is None else home.ordinal for home in homes], np.int64)
        self._roots = np.array([_NO_PARENT if home is None else home.root for home in homes], np.int64)
        self._rows = np.full(len(records), _NO_ROW, np.int64)  # in the tries

    def take_in(self, now_s: float) -> None:
        """Enters what is sound."""
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
        self._places = self._prompt_order()
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
        """A parent comes before its children, and a pass over the depths finds all."""
        if self.sound.all():
            return
        parent, lost = self._records.parent, np.zeros(len(self.sound), np.bool_)
        for start, end in self._levels():
            above = parent[start:end]
            lost[start:end] = (above >= 0) & (~self.sound[above] | lost[above])
        self._refuse(lost, "of a prefix that was dropped")

    def _all_of(self, group: RecordGroup) -> Bools:
        rows = np.zeros(len(self.sound), np.bool_)
        rows[group.rows] = True
        return rows

    def _fitting(self, group: RecordGroup) -> Bools:
        """Which namespaces have blocks like the group's."""
        return np.array([trie is not None and _fits(group, trie) for trie in self._tries], np.bool_)

    def _foreign(self, group: RecordGroup) -> Bools:
        rows = np.zeros(len(self.sound), np.bool_)
        rows[group.rows] = ~self._fitting(group)[self._records.namespace[group.rows]]
        return rows

    def _parents(self, rows: Rows) -> Rows:
        """The parents in the trie: rows, roots, or _NO_PARENT for one that is not there."""
        above = self._records.parent[rows]
        first = above < 0
        inner = self._rows[above]
        inner[inner == _NO_ROW] = _NO_PARENT
        return np.where(first, self._roots[self._records.namespace[rows]], inner)

    def _levels(self) -> list[tuple[int, int]]:
        """The records of each depth, which are side by side."""
        return list(pairwise(np.flatnonzero(np.diff(self._records.depth, prepend=-1, append=-1)).tolist()))

    def _prompt_order(self) -> Rows:
        """The place of each record when the eldest child of a block comes right behind it.

        Matching a prompt then reads memory from front to back, and uses few pages of the columns that are still empty.
        In passes over all records, as many as the logarithm of the depth: a prompt may be a million tokens long.
        """
        parent = self._records.parent.astype(np.int64)
        numbers = np.arange(len(parent))
        inner = np.flatnonzero(parent >= 0)
        eldest = np.full(len(parent), _NO_ROW, np.int64)
        eldest[parent[inner][::-1]] = inner[::-1]  # of several children of a block the first, which is entered last
        goes_on = inner[eldest[parent[inner]] == inner]
        head = numbers.copy()  # of the run of eldest children that a record is in
        head[goes_on] = parent[goes_on]
        while not np.array_equal(above := head[head], head):
            head = above
        places = np.empty_like(numbers)
        places[np.lexsort((self._records.depth, head))] = numbers
        return places

    def _enter(self, trie: Trie, groups: Sequence[RecordGroup], now_s: float) -> None:
        """Enters a trie's sound records, parents first, and their copies on disk.

        A block and its parent may be in different groups: of one the disk has other parts than of the other. And a
        group may have blocks of other tries, whose parts have the same sizes but other rules.
        """
        records = self._records
        ours = self.sound & np.array([its is trie for its in self._tries], np.bool_)[records.namespace]
        sound = np.sort(np.concatenate([group.rows[ours[group.rows]] for group in groups]))
        ordered = sound[np.argsort(self._places[sound])]
        self._rows[ordered] = trie.take_rows(len(ordered))
        for start in range(0, len(sound), _CHUNK):
            added = sound[start : start + _CHUNK]
            rows = self._rows[added]
            tokens = np.empty((len(added), trie.block_tokens), np.uint32)
            pieces: list[tuple[RecordGroup, Rows, Rows]] = []
            for group in groups:
                at = np.minimum(np.searchsorted(group.rows, added), len(group.rows) - 1)
                mine = np.flatnonzero(group.rows[at] == added)
                tokens[mine] = group.tokens[at[mine]]
                pieces.append((group, mine, at[mine]))
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
                on_disk = np.array(group.part_bytes, np.int64) > 0
                trie.put_copies(rows[mine], self._level, np.where(on_disk, group.slots[at], NO_SLOT), now_s)
                self._uses.restored(trie, rows[mine], self._level, now_s)
                trie.checksums[rows[mine]] = group.checksums[at]


def _shape(group: RecordGroup) -> tuple[int, tuple[int, ...]]:
    return group.tokens.shape[1], group.part_bytes


def _fits(group: RecordGroup, trie: Trie) -> bool:
    """Whether the group's blocks can be blocks of `trie`: of each KV group all parts are on disk, or none."""
    if (trie.block_tokens, len(trie.part_bytes)) != (group.tokens.shape[1], len(group.part_bytes)):
        return False
    if any(nbytes not in (0, wanted) for nbytes, wanted in zip(group.part_bytes, trie.part_bytes, strict=True)):
        return False
    there = [{group.part_bytes[part] > 0 for part in kv_group.parts} for kv_group in trie.groups]
    return all(len(found) == 1 for found in there)
