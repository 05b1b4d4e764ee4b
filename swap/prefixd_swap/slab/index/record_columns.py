"""The index in columns: a million records are read in half a second, where a million objects would take ten.

Rows of one length are one array of bytes (the layout is `block_record`'s). Some thousands at a time are taken apart, so
that the processor's cache has them while each column is copied. Keys are in byte order, so a parent is found in a
bucket of keys that begin with the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
    KEY_IDS,
    KEY_SHIFT,
    NO_KEYS,
    PART_BYTES,
    TOKEN_BYTES,
    end_bytes,
)
from prefixd_swap.slab.index.packed_rows import INDEX_KEY_BYTES, PackedRows, pack
from prefixd_swap.slab.index.rows import CHUNK_ROWS, IndexDamagedError, Row
from prefixd_swap.slots import round_to_slots

UInt8s = npt.NDArray[np.uint8]
UInt32s = npt.NDArray[np.uint32]
UInt64s = npt.NDArray[np.uint64]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

OF_ANY_SIZE = -1
"""In place of the bytes of a coded part."""
FIRST_BLOCK = -1
LOST_PARENT = -2
_LINKED_AT_ONCE = 1 << 14
_HEAD_BYTES = INDEX_KEY_BYTES + HEADER_BYTES


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Token ids of m blocks, [m, token ids a block]; they are gathered from the rows of the index when asked for."""

    rows: UInt32s
    """[n, token ids a block], as they lie."""
    order: Int64s
    """[m], into `rows`."""

    @property
    def block_tokens(self) -> int:
        """Token ids a block."""
        return int(self.rows.shape[1])

    def __getitem__(self, blocks: int | slice | Int64s) -> UInt32s:
        found: UInt32s = self.rows[self.order[blocks]]
        return found


@dataclass(frozen=True, slots=True)
class RecordGroup:
    """Blocks with as many tokens, and the same parts, raw and coded ones; m of them."""

    rows: Int64s
    """[m], ascending: which rows of the `Records` they are."""
    part_bytes: tuple[int, ...]
    """Bytes of each of the p parts; 0 for a part that is not on disk, `OF_ANY_SIZE` for a coded one."""
    tokens: TokenRows
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

    def of(self, chosen: Int32s, rows: Int64s) -> RecordGroup:
        """The `chosen` blocks as other `rows`."""
        return replace(
            self,
            rows=rows,
            tokens=TokenRows(self.tokens.rows, self.tokens.order[chosen]),
            slots=self.slots[chosen],
            checksums=self.checksums[chosen],
            nbytes=self.nbytes[chosen] if OF_ANY_SIZE in self.part_bytes else _each(self.part_bytes, len(rows)),
            errors=None if self.errors is None else self.errors[chosen],
        )


@dataclass(frozen=True, slots=True)
class Records:
    """n blocks in prompt order: parents before children, every block's parent among them.

    A block is followed by the first of its children that are one deeper, so that a prompt's blocks are side by side.
    """

    namespaces: tuple[bytes, ...]
    """Those of the blocks, so at most n."""
    namespace: npt.NDArray[np.int32]
    """[n], into `namespaces`."""
    keys: npt.NDArray[np.uint8]
    """[n, 16]"""
    parent: Int64s
    """[n]: the parent's row; for a first block, -1 minus its number in `namespaces`."""
    depth: Int64s
    """[n]"""
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


class _KeyBuckets:
    """Finds keys among n ascending ones. Keys are hashes, so most buckets have one key or none. In a bucket with many,
    since clients could choose keys, the search is a binary one.

    Args:
        high: [n]: first halves of the keys, as numbers that are in the keys' order.
        keys: [n, 2]: halves of the keys, as they lie in memory.
    """

    def __init__(self, high: UInt64s, keys: UInt64s) -> None:
        self._high, self._keys = high, keys
        bits = max(2, len(high)).bit_length() + 1
        self._shift = np.uint64(64 - bits)
        self._begins = np.zeros((1 << bits) + 1, np.int32)
        for start in range(0, len(high), _LINKED_AT_ONCE):  # keys ascend, so few buckets are counted at a time
            buckets = (high[start : start + _LINKED_AT_ONCE] >> self._shift).view(np.int64)
            first, last = buckets.item(0), buckets.item(-1)
            self._begins[first + 1 : last + 2] += np.bincount(buckets - first).astype(np.int32)
        np.cumsum(self._begins, dtype=np.int32, out=self._begins)

    def find(self, wanted: UInt64s) -> tuple[Int64s, Bools]:
        """The place of each of `wanted` [m, 2] among the keys, and whether it is there; else any place."""
        high, keys = self._high, self._keys
        first = wanted[:, 0].byteswap()
        bucket = (first >> self._shift).view(np.int64)
        found = np.minimum(self._begins[bucket], len(high) - 1).astype(np.int64)
        there = (keys[found, 0] == wanted[:, 0]) & (keys[found, 1] == wanted[:, 1])
        rest = np.flatnonzero(~there)
        first, second = first[rest], wanted[rest, 1].byteswap()
        at, stop = (self._begins[bucket[rest] + side].astype(np.int64) for side in (0, 1))
        searching = np.arange(len(rest))
        while len(searching := searching[at[searching] < stop[searching]]):
            middle = at[searching] + stop[searching] >> 1
            before = high[middle] < first[searching]
            if len(equal := np.flatnonzero(high[middle] == first[searching])):
                before[equal] = keys[middle[equal], 1].byteswap() < second[searching[equal]]
            at[searching] = np.where(before, middle + 1, at[searching])
            stop[searching] = np.where(before, stop[searching], middle)
        found[rest] = np.minimum(at, len(high) - 1)
        there[rest] = (keys[found[rest]] == wanted[rest]).all(axis=1)
        return found, there


class IndexTable:
    """All rows of the index, in key order."""

    def __init__(
        self, chunks: Iterable[Sequence[Row]] | PackedRows, keys: RestKeys = NO_KEYS, used_keys: Collection[int] = ()
    ) -> None:
        """Enter the rows; rows that are not records go to `unreadable`.

        Args:
            chunks: the rows; if they are in chunks, in key order.
            keys: decrypt token ids.
            used_keys: ids of keys that the index has used; a row with any other key is damaged.
        """
        self.unreadable: list[bytes] = []
        """Index keys of rows that are not records."""
        self.encryption = Encryption()
        self._key_ring = keys
        self._used_keys = set(used_keys)
        packed = [chunks] if isinstance(chunks, PackedRows) else list(map(pack, chunks))
        self.rows = sum(each.count for each in packed)
        self.readable = np.zeros(self.rows, np.bool_)
        self.depth = np.zeros(self.rows, np.int64)
        self._heads = np.zeros((self.rows, _HEAD_BYTES // 8), np.uint64)  # index keys and the values' headers
        self._namespace, self._keys, self._parents = self._heads[:, 0], self._heads[:, 1:3], self._heads[:, 4:6]
        self._first = np.zeros(self.rows, np.bool_)
        self._pieces: defaultdict[tuple[int, ...], list[RecordGroup]] = defaultdict(list)
        begin = 0
        for each in packed:
            self.unreadable += each.odd_keys
            for width, pieces in each.by_width.items():
                for places, content in pieces:
                    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
                    for start in range(0, len(rows), CHUNK_ROWS):
                        some = slice(start, start + CHUNK_ROWS)
                        self._take(rows, np.arange(start, min(some.stop, len(rows))), begin + places[some])
            begin += each.count
        self.groups = [_joined(pieces) for pieces in self._pieces.values()]  # their `rows` are positions in key order
        self._pieces.clear()

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

    @cached_property
    def in_order(self) -> bool:
        """Whether the keys are strictly ascending; in a damaged index they may not be."""
        high, begins = self._high, self._begins[1:-1]
        ascends = high[:-1] < high[1:]
        ascends[begins - 1] = self._namespace[begins - 1].byteswap() < self._namespace[begins].byteswap()
        rest = np.flatnonzero(~ascends)
        low = self._keys[:, 1]
        same = (self._namespace[rest] == self._namespace[rest + 1]) & (high[rest] == high[rest + 1])
        return bool((same & (low[rest].byteswap() < low[rest + 1].byteswap())).all())

    def slots(self) -> Int64s:
        """Every named slot, once for each record that names it."""
        named = [group.slots[:, group.on_disk].ravel() for group in self.groups]
        return np.concatenate([np.zeros(0, np.int64), *named])

    def index_keys(self, chosen: Bools) -> list[bytes]:
        """Index keys of the readable rows in `chosen`, a mask over all rows."""
        rows = np.flatnonzero(chosen & self.readable)
        joined = np.column_stack([self._namespace[rows], self._keys[rows]]).tobytes()
        return [joined[start : start + INDEX_KEY_BYTES] for start in range(0, len(joined), INDEX_KEY_BYTES)]

    def link(self) -> Int64s:
        """Each row's parent: its position, FIRST_BLOCK, or LOST_PARENT if it is absent or not less deep.

        Raises:
            IndexDamagedError: the keys are out of order.
        """
        if not self.in_order:
            raise IndexDamagedError("keys of the index are out of order; restart to recover it")
        parent = np.full(self.rows, LOST_PARENT)
        for start, end in pairwise(self._begins.tolist()):
            buckets = _KeyBuckets(self._high[start:end], self._keys[start:end])
            for first in range(start, end, _LINKED_AT_ONCE):
                some = slice(first, min(first + _LINKED_AT_ONCE, end))
                children = first + np.flatnonzero(self.readable[some] & ~self._first[some])
                wanted = self._parents[children]
                found, same = buckets.find(wanted)
                found += start
                same &= self.readable[found] & (self.depth[found] < self.depth[children])
                parent[children[same]] = found[same]
        parent[self._first] = FIRST_BLOCK
        return parent

    def records(self, kept: Bools, parent: Int64s) -> Records:
        """The rows in the mask `kept`, which must include their parents; `parent` is the result of `link`."""
        order = self._prompt_order(kept, parent)
        row_of = np.full(self.rows + 2, -1, np.int32)  # parents may be LOST_PARENT
        row_of[order] = np.arange(len(order), dtype=np.int32)
        groups = []
        for group in self.groups:
            came = np.full(len(order), -1, np.int32)
            rows = row_of[group.rows]
            if len(mine := np.flatnonzero(rows >= 0)) == len(rows):
                came[rows] = np.arange(len(rows), dtype=np.int32)
            else:
                came[rows[mine]] = mine
            if len(there := np.flatnonzero(came >= 0)):
                groups.append(group.of(came[there], there))
        of_row = np.repeat(np.arange(len(self._begins) - 1, dtype=np.int32), np.diff(self._begins))[order]
        used = np.bincount(of_row, minlength=len(self._begins) - 1) > 0
        namespace = (np.cumsum(used, dtype=np.int32) - 1)[of_row]
        above = parent[order]
        return Records(
            tuple(self._namespace[start].tobytes() for start in self._begins[:-1][used].tolist()),
            namespace,
            self._keys[order].view(np.uint8),
            np.where(above >= 0, row_of[above], -1 - namespace.astype(np.int64)),
            self.depth[order],
            tuple(groups),
        )

    # -- reading rows ---------------------------------------------------------------------------------------------

    def _take(self, every: UInt8s, numbers: Int64s, positions: Int64s) -> None:
        """Enter m consecutive rows of `every` [n, length], with these numbers; their numbers of parts may differ."""
        rows = every[numbers[0] : numbers[-1] + 1]
        names, values = rows[:, :INDEX_KEY_BYTES], rows[:, INDEX_KEY_BYTES:]
        if values.shape[1] < HEADER_BYTES or values.shape[1] % TOKEN_BYTES:
            self._heads[positions, : INDEX_KEY_BYTES // 8] = np.ascontiguousarray(names).view(np.uint64)
            self.unreadable += map(bytes, names)
            return
        self._heads[positions] = np.ascontiguousarray(rows[:, :_HEAD_BYTES]).view(np.uint64)
        header = values[:, :HEADER_BYTES].view(HEADER)[:, 0]
        known = header["flags"] & ~np.uint16(FLAGS) == 0
        if not known.all():
            self.unreadable += map(bytes, names[~known])
            names, values, positions, header = names[known], values[known], positions[known], header[known]
            numbers = numbers[known]
        self.depth[positions] = header["depth"]
        self._first[positions] = header["flags"] & HAS_PARENT == 0
        layouts = header["parts"].astype(np.int64) << 16 | header["flags"] & ~np.uint16(HAS_PARENT)
        for kind, same in _kinds(layouts):
            count, flags = kind >> 16, kind & 0xFFFF
            if not count or HEADER_BYTES + count * PART_BYTES + end_bytes(flags) > values.shape[1]:
                self.unreadable += map(bytes, names[same])
            else:
                ends = every[:, INDEX_KEY_BYTES + HEADER_BYTES + count * PART_BYTES :], numbers[same]
                self._take_parts(names[same], values[same], positions[same], ends, count, flags)

    def _take_parts(
        self, names: UInt8s, values: UInt8s, positions: Int64s, ends: tuple[UInt8s, Int64s], count: int, flags: int
    ) -> None:
        """Enter rows with as many parts and the same flags. `ends`: ends of all rows of that length, and which ones."""
        if not len(values):
            return
        parts_end = HEADER_BYTES + count * PART_BYTES
        slots, sizes, checksums = np.moveaxis(values[:, HEADER_BYTES:parts_end].view("<u8").reshape(-1, count, 3), 2, 0)
        coded = sizes & np.uint64(CODED) != 0
        end_keys = record_keys(values[:, parts_end:]) if flags & ENCRYPTED else np.zeros(len(values), np.uint32)
        nbytes, key_ids = sizes.view(np.int64), np.zeros((1, count), np.uint64)
        if coded.any():
            key_ids = np.where(coded, sizes >> np.uint64(KEY_SHIFT) & np.uint64(KEY_IDS), np.uint64(0))
            nbytes = np.where(coded, sizes & np.uint64(CODED_BYTES), sizes).view(np.int64)
        if flags & ENCRYPTED or key_ids.any():
            damaged = np.zeros(len(values), np.bool_) | self._of_unknown_keys(key_ids).any(axis=1)
            if flags & ENCRYPTED:
                damaged |= self._of_unknown_keys(end_keys) | (end_keys == 0)
            if damaged.any():
                self.unreadable += map(bytes, names[damaged])
                good, rest = ~damaged, (ends[0], ends[1][~damaged])
                self._take_parts(names[good], values[good], positions[good], rest, count, flags)
                return
        self._count(end_keys, np.broadcast_to(key_ids, nbytes.shape), nbytes)
        self.readable[positions] = True
        errors_end = ERRORS_BYTES if flags & HAS_ERRORS else 0
        every, numbers = ends
        if flags & ENCRYPTED:
            every, numbers = self._opened(values[:, parts_end:], end_keys), np.arange(len(values))
        errors = every[:, :ERRORS_BYTES].view("<f4")[numbers] if flags & HAS_ERRORS else None
        tokens = TokenRows(every[:, errors_end:].view("<u4"), numbers)
        part_bytes = np.where(coded, OF_ANY_SIZE, nbytes)
        kinds = np.zeros(len(values), np.int64)
        for column in part_bytes.T:
            if (column != column[0]).any():
                which = np.unique(column, return_inverse=True)[1]
                kinds = np.unique(kinds * len(values) + which, return_inverse=True)[1]
        for _, same in _kinds(kinds):
            sizes_of = tuple(part_bytes[same][0].tolist())
            self._pieces[(values.shape[1], flags, *sizes_of)].append(
                RecordGroup(
                    positions[same],
                    sizes_of,
                    TokenRows(tokens.rows, tokens.order[same]),
                    slots[same].astype(np.int64),
                    checksums[same].copy(),
                    nbytes[same].copy() if OF_ANY_SIZE in sizes_of else _each(sizes_of, len(positions[same])),
                    None if errors is None else errors[same],
                )
            )

    def _of_unknown_keys(self, key_ids: npt.NDArray[np.unsignedinteger[Any]]) -> Bools:
        """Which ids are of keys that were neither given nor used: bits of them were altered."""
        unknown = [each for each in self._key_ring.missing(np.unique(key_ids).tolist()) if each]
        return np.isin(key_ids, [each for each in unknown if each not in self._used_keys])

    def _count(self, end_keys: UInt32s, key_ids: UInt64s, nbytes: Int64s) -> None:
        for key_id, same in _kinds(end_keys):
            self.encryption.records[key_id] += len(end_keys[same])
        for key_id, same in _kinds(key_ids.reshape(-1)):
            self.encryption.bytes[key_id] += int(nbytes.reshape(-1)[same].sum())

    def _opened(self, ends: UInt8s, end_keys: UInt32s) -> UInt8s:
        """Encrypted ends of records in clear."""
        if not self._key_ring.missing(np.unique(end_keys).tolist()):
            return open_records(ends, self._key_ring)
        return np.zeros((len(ends), ends.shape[1] - RECORD_SEAL_BYTES), np.uint8)

    # -- order ----------------------------------------------------------------------------------------------------

    @cached_property
    def _begins(self) -> Int64s:
        """Where the rows of each namespace begin, and their end."""
        changes = np.flatnonzero(self._namespace[1:] != self._namespace[:-1]) + 1
        return np.concatenate([[0], changes, [self.rows]]) if self.rows else np.zeros(1, np.int64)

    @cached_property
    def _high(self) -> UInt64s:
        """The first halves of the keys as numbers that are in the keys' order."""
        return self._keys[:, 0].byteswap()

    def _prompt_order(self, kept: Bools, parent: Int64s) -> Int64s:
        """The positions in the mask `kept` in the order of `Records`.

        Takes log2(blocks of the longest prompt) passes over all rows: a prompt may have a million tokens.
        """
        inner = np.flatnonzero(kept & (parent >= 0))
        above = parent[inner]
        one_deeper = self.depth[above] + 1 == self.depth[inner]
        if not one_deeper.all():
            inner, above = inner[one_deeper], above[one_deeper]
        eldest = np.full(self.rows, -1, np.int32)
        eldest[above[::-1]] = inner[::-1]  # the first of several children: the last assignment wins
        goes_on = eldest[above] == inner
        head = np.arange(self.rows, dtype=np.int32)  # of the run of eldest children that a row is in
        head[inner[goes_on]] = above[goes_on]
        further = eldest  # its memory
        while not np.array_equal(np.take(head, head, out=further, mode="clip"), head):
            head, further = further, head
        kept_rows = np.flatnonzero(kept)
        lengths = np.bincount(head[kept_rows], minlength=self.rows)
        heads = np.flatnonzero(lengths)
        heads = heads[np.argsort(self.depth[heads], kind="stable")]  # so runs follow those that they branch off
        begin = np.zeros(self.rows, np.int64)
        begin[heads] = np.cumsum(lengths[heads]) - lengths[heads] - self.depth[heads]
        order = np.empty(len(kept_rows), np.int64)
        order[begin[head[kept_rows]] + self.depth[kept_rows]] = kept_rows
        return order


def _kinds(values: npt.NDArray[np.integer[Any]]) -> list[tuple[int, Int64s | slice]]:
    """Each value with its places in `values`."""
    if not len(values):
        return []
    if (values == values[0]).all():
        return [(int(values[0]), slice(None))]
    return [(value, np.flatnonzero(values == value)) for value in np.unique(values).tolist()]


def _each(part_bytes: tuple[int, ...], blocks: int) -> Int64s:
    """The parts' bytes, [blocks, parts], in memory for one block."""
    return np.broadcast_to(np.array(part_bytes, np.int64), (blocks, len(part_bytes)))


def _joined(pieces: Sequence[RecordGroup]) -> RecordGroup:
    """The blocks of groups with the same parts as one group."""
    if len(pieces) == 1:
        return pieces[0]
    rows = np.concatenate([piece.rows for piece in pieces])
    part_bytes = pieces[0].part_bytes
    tokens = [piece.tokens for piece in pieces]
    if all(each.rows.__array_interface__["data"] == tokens[0].rows.__array_interface__["data"] for each in tokens):
        joined = TokenRows(tokens[0].rows, np.concatenate([each.order for each in tokens]))
    else:
        joined = TokenRows(np.concatenate([each[slice(None)] for each in tokens]), np.arange(len(rows)))
    errors = [piece.errors for piece in pieces if piece.errors is not None]
    return RecordGroup(
        rows,
        part_bytes,
        joined,
        np.concatenate([piece.slots for piece in pieces]),
        np.concatenate([piece.checksums for piece in pieces]),
        np.concatenate([piece.nbytes for piece in pieces])
        if OF_ANY_SIZE in part_bytes
        else _each(part_bytes, len(rows)),
        np.concatenate(errors) if errors else None,
    )
