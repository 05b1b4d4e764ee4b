"""Rows of the index as arrays of bytes, without an object a row: a start reads a million rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from prefixd_swap.slab.index.block_record import KEY_BYTES, NAMESPACE_BYTES
from prefixd_swap.slab.index.rows import Row

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

INDEX_KEY_BYTES = NAMESPACE_BYTES + KEY_BYTES


@dataclass(slots=True)
class PackedRows:
    """Some rows, and their order by key."""

    count: int
    """Rows, without those in `odd_keys`."""
    by_width: dict[int, list[tuple[Int64s, bytes | memoryview]]]
    """Bytes of a row -> which rows, [m], and their keys and values one after the other."""
    odd_keys: list[bytes] = field(default_factory=list)
    """Keys of another length than a block's; such rows are not records."""


def pack(rows: Sequence[Row]) -> PackedRows:
    """Rows that are objects."""
    lengths = np.fromiter(map(len, chain.from_iterable(rows)), np.int64, 2 * len(rows)).reshape(-1, 2)
    odd_keys: list[bytes] = []
    if not (good := lengths[:, 0] == INDEX_KEY_BYTES).all():
        odd_keys = [key for key, _ in rows if len(key) != INDEX_KEY_BYTES]
        rows, lengths = [row for row in rows if len(row[0]) == INDEX_KEY_BYTES], lengths[good]
    widths = lengths.sum(axis=1)
    packed = PackedRows(len(rows), {}, odd_keys)
    for width in np.unique(widths).tolist():
        chosen = np.flatnonzero(widths == width)
        same = rows if len(chosen) == len(rows) else [rows[at] for at in chosen.tolist()]
        packed.by_width[width] = [(chosen, b"".join(chain.from_iterable(same)))]
    return packed


class RowCollector:
    """Collects rows from the leaves of a tree, which may come in any order."""

    def __init__(self) -> None:
        self.found = False
        """Whether the file has the tree."""
        self._leaves: list[tuple[Int64s, Int64s]] = []  # places of leaves in the tree, and their entries
        self._entries = 0
        self._expected = 0
        self._rows: dict[int, _GrowingRows] = {}  # by width, as they came
        self._came: defaultdict[int, list[Int64s]] = defaultdict(list)  # by width: their numbers among all entries
        self._odd: list[tuple[int, bytes]] = []  # number and key

    def expect(self, nbytes: int) -> None:
        """Makes room for rows of one width of at most so many bytes; memory that is not used is not touched."""
        self._expected = nbytes

    def add(
        self,
        content: UInt8s,
        places: Int64s,
        counts: Int64s,
        start: Int64s,
        key_bytes: Int64s,
        nbytes: Int64s,
        big: Int64s,
        data: Sequence[bytes],
    ) -> None:
        """Copies the n entries of m leaves.

        Args:
            content: has the leaves.
            places: [m]: which leaves of the tree they are.
            counts: [m]: entries of each.
            start: [n]: where each entry's key begins in `content`, in key order in each leaf.
            key_bytes: [n]: bytes of the key.
            nbytes: [n]: bytes of the data, which follow the key.
            big: the entries whose data do not.
            data: the data of these.
        """
        numbers = np.arange(self._entries, self._entries + len(start))
        self._leaves.append((places, counts))
        self._entries += len(start)
        inline = key_bytes == INDEX_KEY_BYTES
        if not inline.all():
            for at in np.flatnonzero(~inline).tolist():
                key = content[start[at] : start[at] + key_bytes[at]].tobytes()
                self._odd.append((numbers.item(at), key))
        for at, value in zip(big.tolist(), data, strict=True):
            if inline[at]:
                row = content[start[at] : start[at] + INDEX_KEY_BYTES].tobytes() + value
                self._enter(len(row), np.frombuffer(row, np.uint8).reshape(1, -1), numbers[at : at + 1])
        inline[big] = False
        widths = nbytes + INDEX_KEY_BYTES
        if inline.all() and (widths == widths[0]).all():
            self._copy(content, int(widths[0]), start, numbers)
            return
        for width in np.unique(widths[inline]).tolist():
            same = inline & (widths == width)
            self._copy(content, width, start[same], numbers[same])

    def _copy(self, content: UInt8s, width: int, start: Int64s, numbers: Int64s) -> None:
        self._enter(width, np.lib.stride_tricks.sliding_window_view(content, width)[start], numbers)

    def _enter(self, width: int, rows: UInt8s, numbers: Int64s) -> None:
        if width not in self._rows:
            self._rows[width] = _GrowingRows(width, 0 if self._rows else self._expected // width)
        self._rows[width].append(rows)
        self._came[width].append(numbers)

    def packed(self) -> PackedRows:
        """The rows in key order. Call it once."""
        none = np.zeros(0, np.int64)
        places, counts = (np.concatenate(each) for each in zip((none, none), *self._leaves, strict=True))
        begins = np.zeros(int(places.max(initial=-1)) + 2, np.int64)
        begins[places + 1] = counts
        begins = np.cumsum(begins)[places] - (np.cumsum(counts) - counts)
        order = np.repeat(begins, counts)
        order += np.arange(self._entries)  # by number: the place among all entries
        if self._odd:
            is_row = np.ones(self._entries, np.bool_)
            is_row[order[[number for number, _ in self._odd]]] = False
            order = (np.cumsum(is_row) - 1)[order]
        by_width: dict[int, list[tuple[Int64s, bytes | memoryview]]] = {}
        for width, rows in self._rows.items():
            came = np.concatenate(self._came.pop(width))
            in_place = len(came) == self._entries and bool((came[1:] > came[:-1]).all())  # each entry, as numbered
            by_width[width] = [(order if in_place else order[came], rows.content())]
        odd = sorted(self._odd, key=lambda each: order.item(each[0]))
        return PackedRows(self._entries - len(odd), by_width, [key for _, key in odd])


class _GrowingRows:
    """Rows of one width in one array, which is copied only when there are more than expected."""

    def __init__(self, width: int, expected: int) -> None:
        self._rows = np.empty((max(expected, 1), width), np.uint8)
        self._count = 0

    def append(self, rows: UInt8s) -> None:
        end = self._count + len(rows)
        if end > len(self._rows):
            more = np.empty((2 * end, self._rows.shape[1]), np.uint8)
            more[: self._count] = self._rows[: self._count]
            self._rows = more
        self._rows[self._count : end] = rows
        self._count = end

    def content(self) -> memoryview:
        return memoryview(self._rows[: self._count]).cast("B")  # type: ignore[arg-type]
