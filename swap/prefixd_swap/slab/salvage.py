"""Brings back the blocks that an index which was set aside still names, and whose bytes are still in their slots.

Since it was set aside, its slots were free: others may have been written there. So each block's bytes are read and
their checksums compared, and nothing is believed that lies where a block of the index in use lies.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from prefixd_swap.errors import RecordDamagedError, StorageError
from prefixd_swap.slab.files.file_ops import FileOps
from prefixd_swap.slab.index.block_record import KEY_BYTES, NAMESPACE_BYTES, BlockRecord, decode_record, index_key
from prefixd_swap.slab.index.lmdb_file import read_trees, tree_entries
from prefixd_swap.slab.index.set_aside import SetAside
from prefixd_swap.slab.store import SlabStore
from prefixd_swap.slots import PAGE_BYTES
from prefixd_swap.spans import Span

UNREADABLE = "whose records cannot be read"
UNUSABLE = "which this version cannot use, by what is known of their namespaces"
OVERWRITTEN = "whose bytes are gone or another block's"
NO_PARENT = "whose parents are not there"


@dataclass(slots=True)
class Salvaged:
    """What became of the blocks that an index named."""

    blocks: int = 0
    """Brought back, or to be brought back."""
    there: int = 0
    """In the index in use already."""
    lost: Counter[str] = field(default_factory=Counter)
    """Not brought back, by reason."""
    rows: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Of what is brought back, parents first: key and value in the index."""
    namespaces: dict[bytes, bytes] = field(default_factory=dict)
    """What their namespaces stand for."""
    pins: list[bytes] = field(default_factory=list)
    """Keys in the index of those that were pinned."""


def salvage(
    found: SetAside,
    store: SlabStore,
    step: Callable[[int, int], None] = lambda done, total: None,
    usable: Callable[[bytes, BlockRecord], bool] = lambda spec, record: True,
) -> Salvaged:
    """What can be brought back of an index that was set aside; `SlabStore.adopt` does it. Reads every byte of it.

    Args:
        found: the index.
        store: of the same directory; nobody else uses it.
        step: called before each block with how many are done, and of how many.
        usable: whether a block can be one of a namespace, by what that stands for.

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
                record = decode_record(key, value)
            except RecordDamagedError:
                continue
            if all(part is None or max(part.nbytes, part.slot >> 32) <= store.capacity_bytes for part in record.parts):
                records[key] = record, value
        named = trees[b"blocks"].entries if b"blocks" in trees else found.blocks or 0
        if unreadable := max(0, named - result.there - len(records)):
            result.lost[UNREADABLE] = unreadable
        specs = {key: spec for key, spec in rows(b"namespaces") if len(key) == NAMESPACE_BYTES}
        pinned = {key for key, _ in rows(b"pins") if len(key) == NAMESPACE_BYTES + KEY_BYTES}
    finally:
        os.close(fd)
    clashing = _clashing(known.values(), [record for record, _ in records.values()])
    in_order = sorted(records.items(), key=lambda row: row[1][0].depth)
    kept = set(known)
    for at, (key, (record, value)) in enumerate(in_order):
        step(at, len(in_order))
        if record.namespace not in specs:
            result.lost[UNREADABLE] += 1
        elif not usable(specs[record.namespace], record):
            result.lost[UNUSABLE] += 1
        elif record.parent and index_key(record.namespace, record.parent) not in kept:
            result.lost[NO_PARENT] += 1
        elif key in clashing or not _is_whole(record, store):
            result.lost[OVERWRITTEN] += 1
        else:
            kept.add(key)
            result.rows.append((key, value))
            result.namespaces[record.namespace] = specs[record.namespace]
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
    """Those of `found`, by their keys in the index, that name bytes which another block names too."""
    rows: list[tuple[int, int, int]] = []  # first unit, end, place in `found` or -1
    for place, record in [*((-1, each) for each in known), *enumerate(found)]:
        rows += [(part.slot, part.slot + -(-part.nbytes // PAGE_BYTES), place) for part in record.parts if part]
    if not rows:
        return set()
    starts, ends, places = np.array(rows, np.int64)[np.argsort([row[0] for row in rows], kind="stable")].T
    apart = np.ones(len(rows), np.bool_)
    apart[1:] = starts[1:] >= np.maximum.accumulate(ends)[:-1]
    cluster = np.cumsum(apart)
    shared = places[np.bincount(cluster)[cluster] > 1]
    return {index_key(found[place].namespace, found[place].key) for place in shared.tolist() if place >= 0}
