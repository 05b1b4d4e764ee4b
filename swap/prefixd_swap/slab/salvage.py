"""Finds blocks of an index that was set aside, if their bytes are still in their slots.

Since the index was set aside, its slots were free, and other blocks may have been written there. So the bytes of each
block are read and their checksums compared, and a block is dropped if it overlaps a block of the index in use.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixd_swap.errors import MissingKeyError, RecordDamagedError, StorageError
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.block_record import KEY_BYTES, NAMESPACE_BYTES, BlockRecord, decode_record, index_key
from prefixd_swap.slab.index.lmdb_file import read_trees, tree_entries
from prefixd_swap.slab.index.rows import USED_CODECS, USED_KEYS, decode_used_keys
from prefixd_swap.slab.index.set_aside import SetAside
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.slots import PAGE_BYTES
from prefixd_swap.spans import Span

UNREADABLE = "whose records cannot be read"
UNUSABLE = "which this version cannot use, by what is known of their namespaces"
OVERWRITTEN = "whose bytes are gone or another block's"
NO_KEY = "whose keys were not given"
NO_PARENT = "whose parents are not there"


@dataclass(slots=True)
class Salvaged:
    """The blocks of an index that was set aside, by outcome."""

    blocks: int = 0
    """Blocks that can be brought back."""
    there: int = 0
    """Blocks that the index in use has already."""
    lost: Counter[str] = field(default_factory=Counter)
    """Blocks that cannot be brought back, by reason."""
    rows: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Index key and value of each block to bring back, parents first."""
    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    """Specs of their namespaces, by id."""
    pins: list[bytes] = field(default_factory=list)
    """Index keys of those that were pinned."""
    used_keys: set[int] = field(default_factory=set)
    """Ids of keys that may encrypt them."""
    used_codecs: set[int] = field(default_factory=set)
    """Numbers of codecs that may have made them smaller."""


def salvage(
    found: SetAside,
    store: SlabStore,
    step: Callable[[int, int], None] = lambda done, total: None,
    usable: Callable[[bytes, BlockRecord], bool] = lambda spec, record: True,
) -> Salvaged:
    """The blocks of an index that `SlabStore.adopt` can bring back. Reads every byte of them.

    Args:
        found: the index that was set aside.
        store: the store of the same directory; no other caller uses it.
        step: called before each block with the number of blocks done, and of all blocks.
        usable: whether a block can belong to a namespace with this spec.

    Raises:
        OSError: the device refuses to read the index.
        StorageError: the index in use cannot be read.
    """
    known = {index_key(record.namespace, record.key): record for record in store.records()}
    try:
        fd = os.open(found.path / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return Salvaged(lost=Counter({UNREADABLE: found.blocks} if found.blocks else {}))
    try:
        page_bytes, trees = read_trees(fd, FileOps().pread)

        def rows(name: bytes) -> Iterator[tuple[bytes, bytes]]:
            return tree_entries(fd, FileOps().pread, page_bytes, trees.get(name))

        result = Salvaged()
        records: dict[bytes, tuple[BlockRecord, bytes]] = {}
        for key, value in rows(b"blocks"):
            if key in known:
                result.there += 1
                continue
            try:
                record = decode_record(key, value, store.keys)
            except RecordDamagedError:
                continue
            except MissingKeyError:
                result.lost[NO_KEY] += 1
                continue
            if all(part is None or max(part.nbytes, part.slot >> 32) <= store.capacity_bytes for part in record.parts):
                records[key] = record, value
        named = trees[b"blocks"].entries if b"blocks" in trees else found.blocks or 0
        if unreadable := max(0, named - result.there - len(records) - result.lost[NO_KEY]):
            result.lost[UNREADABLE] = unreadable
        names = dict(rows(b"namespaces"))
        specs = {key: spec for key, spec in names.items() if len(key) == NAMESPACE_BYTES}
        result.used_keys.update(decode_used_keys(names.get(USED_KEYS, b"")))
        result.used_codecs.update(names.get(USED_CODECS, b""))
        pinned = {key for key, _ in rows(b"pins") if len(key) == NAMESPACE_BYTES + KEY_BYTES}
    finally:
        os.close(fd)
    opened = {namespace: store.open_spec(namespace, spec) for namespace, spec in specs.items()}
    clashing = _clashing(known.values(), [record for record, _ in records.values()])
    in_order = sorted(records.items(), key=lambda row: row[1][0].depth)
    kept = set(known)
    for at, (key, (record, value)) in enumerate(in_order):
        step(at, len(in_order))
        if record.namespace not in specs:
            result.lost[UNREADABLE] += 1
        elif (spec := opened[record.namespace]) is None:
            result.lost[NO_KEY] += 1
        elif not usable(spec, record):
            result.lost[UNUSABLE] += 1
        elif record.parent and index_key(record.namespace, record.parent) not in kept:
            result.lost[NO_PARENT] += 1
        elif key in clashing or not _is_whole(record, store):
            result.lost[OVERWRITTEN] += 1
        else:
            kept.add(key)
            result.rows.append((key, value))
            result.namespaces[record.namespace] = specs[record.namespace]
            result.used_keys.update(part.key_id for part in record.parts if part is not None and part.key_id)
            if key in pinned:
                result.pins.append(key)
    result.blocks = len(result.rows)
    return result


def _is_whole(record: BlockRecord, store: SlabStore) -> bool:
    for part in record.parts:
        if part is None:
            continue
        buffer = np.empty(part.nbytes, np.uint8)
        try:
            store.read(part, Span(int(buffer.ctypes.data), part.nbytes))
        except StorageError:
            return False
    return True


def _clashing(known: Iterable[BlockRecord], found: Sequence[BlockRecord]) -> set[bytes]:
    """Index keys of the blocks in `found` that overlap another block."""
    rows: list[tuple[int, int, int]] = []  # first unit, end, place in `found` or -1
    for place, record in [*((-1, each) for each in known), *enumerate(found)]:
        rows += [(part.slot, part.slot + part.slot_bytes // PAGE_BYTES, place) for part in record.parts if part]
    if not rows:
        return set()
    starts, ends, places = np.array(rows, np.int64)[np.argsort([row[0] for row in rows], kind="stable")].T
    apart = np.ones(len(rows), np.bool_)
    apart[1:] = starts[1:] >= np.maximum.accumulate(ends)[:-1]
    cluster = np.cumsum(apart)
    shared = places[np.bincount(cluster)[cluster] > 1]
    return {index_key(found[place].namespace, found[place].key) for place in shared.tolist() if place >= 0}
