"""Audits the disk tier: its index must have exactly the blocks that the tries have on disk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import SLICE_ROWS
from prefixd.base.long_work.steps import Steps
from prefixd.cache.cache import TieredCache
from prefixd.cache.index.trie import NO_SLOT
from prefixd.cache.namespaces import ID_BYTES
from prefixd_swap import Records
from prefixd_swap.tiers import StoreTier

_SHOWN = 3
_MIX = np.uint64(0x9E3779B97F4A7C15)

Uint64s = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class DiskSnapshot:
    """The n blocks that the tries have on disk."""

    names: npt.NDArray[np.uint8]
    """[n, 24]: namespace id and block key."""
    places: Uint64s
    """[n]: slots and checksums of the parts, in one number."""
    leaving: frozenset[bytes]
    """Names of blocks that have left the tries and will leave the index."""
    writable: bool
    """Whether the disk can be written: if not, removals wait until it can."""


def snapshot_of_disk(cache: TieredCache, durable: StoreTier) -> Steps[DiskSnapshot]:
    """Reads which blocks the tries have on disk, while no write or removal is under way.

    Blocks that leave the tries meanwhile are in `leaving`, which is read last, after their removal is announced.
    """
    names, places = [np.zeros((0, 24), np.uint8)], [np.zeros(0, np.uint64)]
    for trie in list(cache.tries):
        for start in range(0, trie.rows, SLICE_ROWS):
            marked = trie.any_part[start : min(start + SLICE_ROWS, trie.rows)] & np.uint8(1 << durable.level)
            rows = start + np.flatnonzero(marked)
            ids = np.frombuffer(cache.namespaces.ids(), np.uint8).reshape(-1, ID_BYTES)
            names.append(np.hstack([ids.take(trie.namespace[rows], axis=0, mode="clip"), trie.keys(rows)]))
            slots = trie.slots[rows, durable.level]
            there = slots != NO_SLOT  # a record has 0 for what is not on disk
            places.append(
                _places(np.where(there, slots, 0), np.where(there, trie.stored_checksums(rows), np.uint64(0)))
            )
            yield None
    yield None  # a removal that was begun in the last callback announces itself in this one
    leaving = frozenset(namespace + key for namespace, key in cache.mover.disk.removals.leaving)
    writable = durable.writable
    snapshot: DiskSnapshot = yield lambda: DiskSnapshot(
        np.concatenate(names), np.concatenate(places), leaving, writable
    )
    return snapshot


def compare_with_index(known: DiskSnapshot, records: Records) -> list[str]:
    """The differences between the store's index and `known`. Runs in a thread."""
    ids = np.frombuffer(b"".join(records.namespaces), np.uint8).reshape(-1, 8)
    names = np.hstack([ids[records.namespace], records.keys])
    places = np.zeros(len(records), np.uint64)
    for group in records.groups:
        places[group.rows] = _places(group.slots, group.checksums)
    ours, theirs = _order(known.names), _order(names)
    if np.array_equal(known.names[ours], names[theirs]) and np.array_equal(known.places[ours], places[theirs]):
        return []
    here = {name: place for name, place in zip(_bytes(known.names), known.places.tolist(), strict=True)}
    there = {name: place for name, place in zip(_bytes(names), places.tolist(), strict=True)}
    missing = [name for name in here if name not in there]
    surplus = [name for name in there if name not in here and name not in known.leaving and known.writable]
    elsewhere = [name for name, place in here.items() if there.get(name, place) != place]
    violations = []
    for found, what in (
        (missing, "blocks on disk that the index does not name"),
        (surplus, "blocks that the index names and the cache has forgotten"),
        (elsewhere, "blocks whose slot or checksum in the index differs from memory"),
    ):
        if found:
            shown = ", ".join(name[8:].hex() for name in found[:_SHOWN])
            more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
            violations.append(f"disk tier: {what}: {shown}{more}")
    return violations


def _places(slots: npt.NDArray[np.int64], checksums: Uint64s) -> Uint64s:
    """A hash of each row of [m, parts] slots and checksums."""
    mixed = np.zeros(len(slots), np.uint64)
    for part in range(slots.shape[1]):
        mixed = (mixed ^ slots[:, part].astype(np.uint64)) * _MIX
        mixed = (mixed ^ checksums[:, part]) * _MIX
    return mixed


def _order(names: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
    columns = np.ascontiguousarray(names).view(np.uint64)
    return np.lexsort((columns[:, 0], columns[:, 1], columns[:, 2]))


def _bytes(names: npt.NDArray[np.uint8]) -> list[bytes]:
    joined = names.tobytes()
    return [joined[start : start + 24] for start in range(0, len(joined), 24)]
