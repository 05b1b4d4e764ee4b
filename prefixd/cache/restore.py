"""What the disk tier's index names comes back into the tries, in columns: a million blocks in about a second.

At the start the tries are empty. In a daemon that runs, when its store was opened again, they are not: blocks that are
there get the places on disk that the index has now, and lose the copy on disk that it does not name.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import numpy.typing as npt

from prefixd.cache.ledger import Ledger
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, NamespaceSpec
from prefixd.cache.trie import DISK, Rows, Trie
from prefixd.errors import PrefixdError
from prefixd_swap import RecordGroup, Records, SlabStore, StorageError

log = logging.getLogger(__name__)

_CHUNK = 1 << 16  # blocks entered at a time, so that what is copied on the way stays small
_REMOVED_AT_ONCE = 4096
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


def known_namespaces(store: SlabStore, registry: NamespaceRegistry) -> dict[bytes, Namespace]:
    """The store's namespaces, registered. One that cannot be read, or disagrees with what is registered, is left out.

    Raises:
        StorageError: the store's index cannot be read.
    """
    known = {}
    for identity, spec in store.namespaces().items():
        try:
            namespace, _ = registry.register(msgspec.msgpack.decode(spec, type=NamespaceSpec))
        except (msgspec.DecodeError, PrefixdError) as error:
            log.error("namespace %s on disk is of no use, its blocks are dropped: %s", identity.hex(), error)
            continue
        if namespace.id == identity:
            known[identity] = namespace
    return known


def restore(
    records: Records,
    known: Mapping[bytes, Namespace],
    tries: Sequence[Trie],
    trie_of: Callable[[Namespace], Trie],
    ledger: Ledger,
) -> Restored:
    """Makes the tries' copies on disk those of `records`. Nothing else may write to the disk tier meanwhile.

    A record that cannot be a block of these tries costs itself and what continues it. Blocks that lose their last copy
    are forgotten, unless a reader needs them; then they go when the last reader has.

    Args:
        records: what is on disk, `SlabStore.load`.
        known: the namespaces by their id on disk; a record of another one is refused.
        tries: all tries so far.
        trie_of: the trie of a namespace, made when there is none.
        ledger: counts what was refused or lost.
    """
    had = [(trie, trie.drop_copies(DISK)) for trie in tries]
    homes = [known.get(identity) for identity in records.namespaces]
    entry = _Entry(records, homes, [None if home is None else trie_of(home) for home in homes])
    entry.take_in(ledger.clock())
    for trie, rows in had:
        _forget(trie, rows, ledger)
    ledger.recount(tries)
    for reason, blocks in entry.refused.items():
        ledger.lost[f"on disk, but {reason}"] += blocks
        log.warning("%d blocks on disk are dropped: %s", blocks, reason)
    ledger.epoch += 1
    refused = np.flatnonzero(~entry.sound)[::-1].tolist()
    ids = [(records.namespaces[records.namespace[row]], records.keys[row].tobytes()) for row in refused]
    return Restored(len(records) - len(ids), dict(entry.refused), ids)


def remove_refused(store: SlabStore, restored: Restored) -> None:
    """Frees the slots of what was refused. On an error they stay taken until the next start tries again."""
    ids = restored.refused_ids
    try:
        for start in range(0, len(ids), _REMOVED_AT_ONCE):
            store.remove(ids[start : start + _REMOVED_AT_ONCE])
    except StorageError as error:
        log.error("blocks on disk that are of no use could not be removed, the next start tries again: %s", error)


class _Entry:
    """The way of records into tries: `sound` are those for which nothing speaks against it so far.

    Args:
        records: the records.
        homes: their namespaces, None for unknown ones.
        tries: the tries of those.
    """

    def __init__(self, records: Records, homes: Sequence[Namespace | None], tries: Sequence[Trie | None]) -> None:
        self.sound = np.ones(len(records), np.bool_)
        self.refused: Counter[str] = Counter()
        self._records = records
        self._tries = tries
        self._ordinals = np.array([_NO_ROW if home is None else home.ordinal for home in homes], np.int64)
        self._roots = np.array([_NO_PARENT if home is None else home.root for home in homes], np.int64)
        self._first_of_shape = {_shape(group): group for group in reversed(records.groups)}
        self._rows = np.full(len(records), _NO_ROW, np.int64)  # in the tries

    def take_in(self, now_s: float) -> None:
        """Enters what is sound."""
        records = self._records
        self._refuse(self._ordinals[records.namespace] == _NO_ROW, "of an unknown namespace")
        for group in records.groups:
            if 0 in group.part_bytes:
                self._refuse(self._all_of(group), "without some of their parts")
            else:
                self._refuse(self._foreign(group), "of another size than their namespace's")
        above = records.parent
        depth = np.where(above >= 0, records.depth[above] + 1, 0)
        self._refuse(records.depth != depth, "not where their parents say")
        del depth
        self._refuse_orphans()
        for group in records.groups:
            self._find(group)
        self._refuse_orphans()
        self._places = self._prompt_order()
        for group in records.groups:
            self._enter(group, now_s)

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
        fits = [trie is not None and (trie.block_tokens, trie.part_bytes) == _shape(group) for trie in self._tries]
        return np.array(fits, np.bool_)

    def _foreign(self, group: RecordGroup) -> Bools:
        if self._first_of_shape[_shape(group)] is not group:  # records that are longer than their parts and tokens
            return self._all_of(group)
        rows = np.zeros(len(self.sound), np.bool_)
        rows[group.rows] = ~self._fitting(group)[self._records.namespace[group.rows]]
        return rows

    def _trie(self, group: RecordGroup) -> Trie | None:
        """The trie of the group's sound records; all their namespaces have the same."""
        fitting = np.flatnonzero(self._fitting(group))
        return self._tries[fitting[0]] if len(fitting) else None

    def _find(self, group: RecordGroup) -> None:
        """Finds the blocks that are in the trie already, and refuses those whose key is another block's."""
        trie = self._trie(group)
        if trie is None:
            return
        records = self._records
        rows = group.rows[self.sound[group.rows]]
        if len(np.unique(records.namespace[rows])) > 1:  # in one namespace all keys are different
            self._refuse(self._again(rows), "with the key of another block")
        if not len(trie):
            return
        found = trie.find_all(records.keys[rows])
        self._rows[rows] = found
        there = np.flatnonzero(self._rows[group.rows] != _NO_ROW)
        rows = group.rows[there]
        found = self._rows[rows]
        same = trie.namespace[found] == self._ordinals[records.namespace[rows]]
        same &= trie.parent[found] == self._parents(rows)
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            same[part] &= (trie.tokens[found[part]] == group.tokens[there[part]]).all(axis=1)
        other = np.zeros(len(self.sound), np.bool_)
        other[rows] = ~same
        self._refuse(other, "with the key of another block")

    def _again(self, rows: Rows) -> Bools:
        """Which of `rows` have a key that one of them before has."""
        halves = self._records.keys[rows].view(np.uint64)
        order = np.lexsort((halves[:, 0], halves[:, 1]))
        again = np.zeros(len(self.sound), np.bool_)
        same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
        again[rows[order[1:][same]]] = True
        return again

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
        """The place of each record when what continues a block comes right behind it (preorder).

        Matching a prompt then reads memory from front to back, and uses few pages of the columns that are still empty.
        """
        parent, levels = self._records.parent, self._levels()
        sizes = np.ones(len(parent), np.int64)  # of the subtrees
        for start, end in reversed(levels[1:]):
            np.add.at(sizes, parent[start:end], sizes[start:end])
        places = np.zeros(len(parent), np.int64)
        for start, end in levels:
            order = start + np.argsort(parent[start:end], kind="stable")  # siblings side by side
            above, before = parent[order], np.cumsum(sizes[order]) - sizes[order]
            if start:
                eldest = np.flatnonzero(np.diff(above, prepend=-1))
                before -= np.repeat(before[eldest], np.diff(eldest, append=len(above)))
                before += places[above] + 1
            places[order] = before
        return places

    def _enter(self, group: RecordGroup, now_s: float) -> None:
        """Enters the sound records of a group, parents first, and their copies on disk."""
        trie = self._trie(group)
        if trie is None:
            return
        records = self._records
        new = self.sound[group.rows] & (self._rows[group.rows] == _NO_ROW)
        added = group.rows[new]
        added = added[np.argsort(self._places[added])]
        self._rows[added] = trie.take_rows(len(added))
        for start in range(0, len(group.rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            rows, fresh = group.rows[part], new[part]
            added = rows[fresh]
            trie.insert_all(
                self._rows[added],
                self._parents(added),
                self._ordinals[records.namespace[added]],
                records.depth[added],
                records.keys[added],
                group.tokens[part][fresh],
                now_s,
            )
            sound = self.sound[rows]
            there, checksums = self._rows[rows[sound]], group.checksums[part][sound]
            trie.put_copies(there, DISK, group.slots[part][sound], now_s)
            trie.sealed[there] &= trie.checksums[there] == checksums
            trie.checksums[there] = checksums


def _shape(group: RecordGroup) -> tuple[int, tuple[int, ...]]:
    return group.tokens.shape[1], group.part_bytes


def _forget(trie: Trie, rows: Rows, ledger: Ledger) -> None:
    """Forgets which of `rows`, that had a copy on disk, have none anywhere, when nobody needs them."""
    gone = rows[(trie.some[rows] & (1 << DISK)) == 0]
    if not len(gone):
        return
    ledger.lost["gone from disk"] += len(gone)
    for row in gone[np.argsort(-trie.depth[gone], kind="stable")].tolist():
        if not trie.some[row] and trie.removable(row):
            trie.remove(row)
