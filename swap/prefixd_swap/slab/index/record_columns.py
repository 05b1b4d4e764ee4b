"""The index in columns: a million records are read in about a second, where a million objects would take ten.

Rows of one length are one array of bytes; the columns are views of it (the layout is `block_record`'s). Keys come
from the index in byte order, so a parent is found by binary search.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd_swap.sealing.rest_keys import RestKeys
from prefixd_swap.sealing.sealed_records import RECORD_SEAL_BYTES, open_records, record_keys
from prefixd_swap.slab.index.block_record import (
    CODED,
    CODED_BYTES,
    ENCRYPTED,
    ERRORS_BYTES,
    FLAGS,
    HAS_ERRORS,
    HAS_PARENT,
    HEADER,
    HEADER_BYTES,
    KEY_BYTES,
    KEY_IDS,
    KEY_SHIFT,
    NAMESPACE_BYTES,
    NO_KEYS,
    PARENT_OFFSET,
    PART_BYTES,
    TOKEN_BYTES,
    end_bytes,
)
from prefixd_swap.slab.index.packed_rows import INDEX_KEY_BYTES, PackedRows, pack
from prefixd_swap.slab.index.rows import Row
from prefixd_swap.slots import round_to_slots

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

OF_ANY_SIZE = -1
"""In place of the bytes of a coded part."""
FIRST_BLOCK = -1
LOST_PARENT = -2


@dataclass(frozen=True, slots=True)
class RecordGroup:
    """Blocks with as many tokens, and the same parts, raw and coded ones; m of them."""

    rows: Int64s
    """[m], ascending: which rows of the `Records` they are."""
    part_bytes: tuple[int, ...]
    """Bytes of each of the p parts; 0 for a part that is not on disk, `OF_ANY_SIZE` for a coded one."""
    tokens: npt.NDArray[np.uint32]
    """[m, token ids a block]"""
    slots: Int64s
    """[m, p]; meaningless where the part is not on disk."""
    checksums: npt.NDArray[np.uint64]
    """[m, p] xxh3_64 of what is stored, likewise."""
    nbytes: Int64s
    """[m, p] stored bytes; 0 where the part is not on disk."""
    errors: npt.NDArray[np.float32] | None = None
    """[m, 2], where lossy codecs have made some of the parts: the largest and the RMS error of each block."""

    @property
    def on_disk(self) -> list[int]:
        """Which parts are."""
        return [part for part, nbytes in enumerate(self.part_bytes) if nbytes]

    def slot_bytes(self, part: int, chosen: Bools | slice = slice(None)) -> Int64s:
        """Bytes of the slots of a part that is on disk, of the `chosen` blocks."""
        return round_to_slots(self.nbytes[chosen, part])

    def of(self, chosen: Int64s, rows: Int64s) -> RecordGroup:
        """The `chosen` blocks as other `rows`."""
        return replace(
            self,
            rows=rows,
            tokens=self.tokens[chosen],
            slots=self.slots[chosen],
            checksums=self.checksums[chosen],
            nbytes=self.nbytes[chosen],
            errors=None if self.errors is None else self.errors[chosen],
        )


@dataclass(frozen=True, slots=True)
class Records:
    """n blocks, parents before children, every block's parent among them."""

    namespaces: tuple[bytes, ...]
    namespace: npt.NDArray[np.int32]
    """[n], into `namespaces`."""
    keys: npt.NDArray[np.uint8]
    """[n, 16]"""
    parent: Int64s
    """[n]: the parent's row; for a first block, -1 minus its number in `namespaces`."""
    depth: Int64s
    """[n], ascending."""
    groups: tuple[RecordGroup, ...]
    """Each row is in one group."""

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Encryption:
    """Which keys encrypt the blocks of a store, by id; 0: they are in clear."""

    records: Counter[int] = field(default_factory=Counter)
    """Blocks, by the key of their token ids."""
    bytes: Counter[int] = field(default_factory=Counter)
    """Stored bytes of their parts, by the parts' keys."""
    namespaces: Counter[int] = field(default_factory=Counter)
    """Specs of namespaces."""


class IndexTable:
    """All rows of the index, in key order."""

    def __init__(
        self, chunks: Iterable[Sequence[Row] | PackedRows], keys: RestKeys = NO_KEYS, used_keys: Collection[int] = ()
    ) -> None:
        """Enter the rows; rows that are not records go to `unreadable`.

        Args:
            chunks: the rows, in key order.
            keys: decrypt token ids.
            used_keys: ids of keys that the index has used; a row with any other key is damaged.
        """
        self.unreadable: list[bytes] = []
        """Index keys of rows that are not records."""
        self.encryption = Encryption()
        self._key_ring = keys
        self._used_keys = set(used_keys)
        self.rows = 0
        buffers: defaultdict[int, bytearray] = defaultdict(bytearray)  # length of a row -> rows of that length
        positions: defaultdict[int, list[Int64s]] = defaultdict(list)
        for chunk in chunks:
            packed = chunk if isinstance(chunk, PackedRows) else pack(chunk)
            self.unreadable += packed.odd_keys
            for width, pieces in packed.by_width.items():
                for places, content in pieces:
                    buffers[width] += content
                    positions[width].append(places + self.rows)
            self.rows += packed.count
        self.groups: list[RecordGroup] = []  # their `rows` are positions in key order
        self.readable = np.zeros(self.rows, np.bool_)
        self.depth = np.zeros(self.rows, np.int64)
        self._keys = np.zeros((self.rows, KEY_BYTES), np.uint8)
        self._namespace = np.zeros(self.rows, np.uint64)
        self._parents = np.zeros((self.rows, KEY_BYTES), np.uint8)
        self._first = np.zeros(self.rows, np.bool_)
        for width, buffer in buffers.items():
            self._take(np.frombuffer(buffer, np.uint8).reshape(-1, width), np.concatenate(positions[width]))

    def missing_keys(self) -> list[int]:
        """Ids of keys that blocks need and that were not given. Token ids of such blocks are 0."""
        return self._key_ring.missing({*self.encryption.records, *self.encryption.bytes} - {0})

    def has(self, namespace: bytes) -> bool:
        """Whether a readable row is of this namespace."""
        return bool((self._namespace[self.readable] == np.frombuffer(namespace, np.uint64)[0]).any())

    @property
    def has_coded(self) -> bool:
        """Whether a readable row has a coded or an encrypted part."""
        return any(OF_ANY_SIZE in group.part_bytes for group in self.groups)

    @property
    def in_order(self) -> bool:
        """Whether the keys are strictly ascending; in a damaged index they may not be."""
        columns = [self._namespace.byteswap(), *self._keys.view(">u8").astype(np.uint64).T]
        less, same = np.zeros(max(self.rows - 1, 0), np.bool_), np.ones(max(self.rows - 1, 0), np.bool_)
        for column in columns:
            less |= same & (column[:-1] < column[1:])
            same &= column[:-1] == column[1:]
        return bool(less.all())

    def slots(self) -> Int64s:
        """Every named slot, once for each record that names it."""
        named = [group.slots[:, group.on_disk].ravel() for group in self.groups]
        return np.concatenate([np.zeros(0, np.int64), *named])

    def index_keys(self, chosen: Bools) -> list[bytes]:
        """Index keys of the readable rows in `chosen`, a mask over all rows."""
        rows = np.flatnonzero(chosen & self.readable)
        names = np.hstack([self._namespace[rows].view(np.uint8).reshape(-1, NAMESPACE_BYTES), self._keys[rows]])
        joined = names.tobytes()
        return [joined[start : start + INDEX_KEY_BYTES] for start in range(0, len(joined), INDEX_KEY_BYTES)]

    def link(self) -> Int64s:
        """Each row's parent: its position, FIRST_BLOCK, or LOST_PARENT if it is absent or not less deep."""
        parent = np.full(self.rows, LOST_PARENT)
        high = self._keys.view(">u8")[:, 0].astype(np.uint64)  # ascending within a namespace
        wanted = self._parents.view(">u8")[:, 0].astype(np.uint64)
        for _, start, end in self._namespaces():
            children = start + np.flatnonzero((self.readable & ~self._first)[start:end])
            children = children[np.argsort(wanted[children])]  # sorted queries search twice as fast
            found = start + np.searchsorted(high[start:end], wanted[children])
            found = self._exact(found, children, start, end)
            good = (found >= 0) & (self.depth[found] < self.depth[children])
            parent[children[good]] = found[good]
        parent[self._first] = FIRST_BLOCK
        return parent

    def records(self, kept: Bools, parent: Int64s) -> Records:
        """The rows in the mask `kept`, which must include their parents; `parent` is the result of `link`."""
        positions = np.flatnonzero(kept)
        depth = self.depth[positions]
        if not len(depth) or depth.max() < 1 << 16:
            depth = depth.astype(np.uint16)  # a stable order of 16 bits is by radix
        positions = positions[np.argsort(depth, kind="stable")]
        row_of = np.full(self.rows + 1, -1, np.int64)
        row_of[positions] = np.arange(len(positions))
        namespaces = self._namespaces()
        ordinals = np.arange(len(namespaces), dtype=np.int32)
        namespace = np.repeat(ordinals, [end - start for _, start, end in namespaces])[positions]
        above = parent[positions]
        groups = []
        for group in self.groups:
            rows = row_of[group.rows]
            order = np.argsort(rows, kind="stable")
            order = order[np.searchsorted(rows[order], 0) :]
            if len(order):
                groups.append(group.of(order, rows[order]))
        return Records(
            tuple(name for name, _, _ in namespaces),
            namespace,
            self._keys[positions],
            np.where(above >= 0, row_of[above], -1 - namespace.astype(np.int64)),
            self.depth[positions],
            tuple(groups),
        )

    def _take(self, rows: npt.NDArray[np.uint8], positions: Int64s) -> None:
        """Enter rows of one length, [m, length]; their numbers of parts may differ."""
        keys, values = rows[:, :INDEX_KEY_BYTES], rows[:, INDEX_KEY_BYTES:]
        self._namespace[positions] = keys[:, :NAMESPACE_BYTES].view(np.uint64)[:, 0]
        self._keys[positions] = keys[:, NAMESPACE_BYTES:]
        if values.shape[1] < HEADER_BYTES or values.shape[1] % TOKEN_BYTES:
            self.unreadable += map(bytes, keys)
            return
        header = values[:, :HEADER_BYTES].view(HEADER)[:, 0]
        known = header["flags"] & ~np.uint16(FLAGS) == 0
        if not known.all():
            self.unreadable += map(bytes, keys[~known])
            keys, values, positions, header = keys[known], values[known], positions[known], header[known]
        self.depth[positions] = header["depth"]
        self._first[positions] = header["flags"] & HAS_PARENT == 0
        self._parents[positions] = values[:, PARENT_OFFSET:HEADER_BYTES]
        layouts = header["parts"].astype(np.int64) << 16 | header["flags"] & ~np.uint16(HAS_PARENT)
        kinds = np.unique(layouts).tolist()
        for kind in kinds:
            count, flags = kind >> 16, kind & 0xFFFF
            same = np.flatnonzero(layouts == kind)
            if not count or HEADER_BYTES + count * PART_BYTES + end_bytes(flags) > values.shape[1]:
                self.unreadable += map(bytes, keys[same])
            elif len(kinds) == 1:
                self._take_parts(keys, values, positions, count, flags)
            else:
                self._take_parts(keys[same], values[same], positions[same], count, flags)

    def _take_parts(self, keys: UInt8s, values: UInt8s, positions: Int64s, count: int, flags: int) -> None:
        """Enter rows with as many parts and the same flags."""
        if not len(values):
            return
        parts_end = HEADER_BYTES + count * PART_BYTES
        sizes = values[:, HEADER_BYTES:parts_end].view("<u8").reshape(-1, count, 3)[:, :, 1]
        coded = sizes & np.uint64(CODED) != 0
        key_ids = np.where(coded, sizes >> np.uint64(KEY_SHIFT) & np.uint64(KEY_IDS), np.uint64(0))
        end_keys = record_keys(values[:, parts_end:]) if flags & ENCRYPTED else np.zeros(len(values), np.uint32)
        if flags & ENCRYPTED or key_ids.any():
            damaged = self._of_unknown_keys(key_ids).any(axis=1)
            if flags & ENCRYPTED:
                damaged |= self._of_unknown_keys(end_keys) | (end_keys == 0)
            if damaged.any():
                self.unreadable += map(bytes, keys[damaged])
                self._take_parts(keys[~damaged], values[~damaged], positions[~damaged], count, flags)
                return
        nbytes = np.where(coded, sizes & np.uint64(CODED_BYTES), sizes).view(np.int64)
        self._count(end_keys, key_ids, nbytes)
        self.readable[positions] = True
        end = self._opened(values[:, parts_end:], end_keys, flags)
        errors = end[:, :ERRORS_BYTES].view("<f4") if flags & HAS_ERRORS else None
        tokens = end[:, ERRORS_BYTES if flags & HAS_ERRORS else 0 :].view("<u4")
        parts = values[:, HEADER_BYTES:parts_end].view("<u8").reshape(-1, count, 3)
        sizes_or_any = np.where(coded, OF_ANY_SIZE, nbytes)
        if (sizes_or_any == sizes_or_any[0]).all():
            kinds, kind = sizes_or_any[:1], np.zeros(len(values), np.int64)
        else:
            kinds, kind = np.unique(sizes_or_any, axis=0, return_inverse=True)
        for ordinal, part_bytes in enumerate(kinds.tolist()):
            same = np.flatnonzero(kind.reshape(-1) == ordinal) if len(kinds) > 1 else slice(None)
            slots = parts[same, :, 0].view(np.int64)
            self.groups.append(
                RecordGroup(
                    positions[same],
                    tuple(part_bytes),
                    tokens[same],
                    slots,
                    parts[same, :, 2],
                    nbytes[same],
                    None if errors is None else errors[same],
                )
            )

    def _of_unknown_keys(self, key_ids: npt.NDArray[np.unsignedinteger[Any]]) -> Bools:
        """Which ids are of keys that were neither given nor used: bits of them were altered."""
        unknown = [each for each in self._key_ring.missing(np.unique(key_ids).tolist()) if each]
        return np.isin(key_ids, [each for each in unknown if each not in self._used_keys])

    def _count(self, end_keys: UInt32s, key_ids: npt.NDArray[np.uint64], nbytes: Int64s) -> None:
        for key_id in np.unique(end_keys).tolist():
            self.encryption.records[key_id] += int(np.count_nonzero(end_keys == key_id))
        for key_id in np.unique(key_ids).tolist():
            self.encryption.bytes[key_id] += int(nbytes[key_ids == key_id].sum())

    def _opened(self, ends: UInt8s, end_keys: UInt32s, flags: int) -> UInt8s:
        """The ends of records in clear, contiguous."""
        if not flags & ENCRYPTED:
            return ends
        if not self._key_ring.missing(np.unique(end_keys).tolist()):
            return open_records(ends, self._key_ring)
        return np.zeros((len(ends), ends.shape[1] - RECORD_SEAL_BYTES), np.uint8)

    def _namespaces(self) -> list[tuple[bytes, int, int]]:
        """Each namespace with its range of positions."""
        changes = np.flatnonzero(self._namespace[1:] != self._namespace[:-1]) + 1
        bounds = [0, *changes.tolist(), self.rows] if self.rows else [0]
        return [(self._namespace[start].tobytes(), start, end) for start, end in pairwise(bounds)]

    def _exact(self, found: Int64s, children: Int64s, start: int, end: int) -> Int64s:
        """Correct `found`, a search by the first half of the key: the position of the whole key, or -1."""
        found = np.minimum(found, end - 1)
        wrong = np.flatnonzero((self._keys[found] != self._parents[children]).any(axis=1) | ~self.readable[found])
        if len(wrong):
            keys, wanted = (column.view(f"S{KEY_BYTES}")[:, 0] for column in (self._keys, self._parents))
            again = np.minimum(start + np.searchsorted(keys[start:end], wanted[children[wrong]]), end - 1)
            same = (self._keys[again] == self._parents[children[wrong]]).all(axis=1) & self.readable[again]
            found[wrong] = np.where(same, again, -1)
        return found
