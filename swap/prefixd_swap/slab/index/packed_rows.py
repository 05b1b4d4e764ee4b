"""Rows of the index as arrays of bytes, without an object a row: a start reads a million rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt

from prefixd_swap.slab.index.block_record import KEY_BYTES, NAMESPACE_BYTES
from prefixd_swap.slab.index.lmdb_file import READ_PAGES, Pread, branch_children, leaf_nodes, read_run
from prefixd_swap.slab.index.rows import IndexDamagedError, Row

Int64s = npt.NDArray[np.int64]
UInt8s = npt.NDArray[np.uint8]

INDEX_KEY_BYTES = NAMESPACE_BYTES + KEY_BYTES


@dataclass(slots=True)
class PackedRows:
    """Some rows in key order."""

    count: int
    """Rows, without those in `odd_keys`."""
    by_width: dict[int, list[tuple[Int64s, bytes | memoryview]]]
    """Bytes of a row -> which rows, [m] ascending, and their keys and values one after the other."""
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


def read_packed(fd: int, pread: Pread, page_bytes: int, root: int) -> Iterator[PackedRows]:
    """All rows of a tree in a file whose pages are sound (`damaged_page`) and do not change meanwhile.

    Raises:
        OSError: the device refuses.
        IndexDamagedError: a page is not what its parent says.
    """
    level = np.array([root], np.int64)
    while True:
        below = [branch_children(pages) for pages in _pages(fd, pread, page_bytes, level)]
        children = np.concatenate(below)
        if not len(children):
            break
        level = children
    for pages in _pages(fd, pread, page_bytes, level):
        yield _pack_leaves(fd, pread, pages)


def _pages(fd: int, pread: Pread, page_bytes: int, numbers: Int64s) -> Iterator[UInt8s]:
    """The pages of these numbers, in this order, some at a time; adjacent ones are read together."""
    for start in range(0, len(numbers), READ_PAGES):
        some = numbers[start : start + READ_PAGES]
        pages = np.empty((len(some), page_bytes), np.uint8)
        view = memoryview(pages.reshape(-1))  # type: ignore[arg-type]
        gaps = 1 + np.flatnonzero(np.diff(some) != 1)
        for first, end in pairwise([0, *gaps.tolist(), len(some)]):
            into, offset = view[first * page_bytes : end * page_bytes], some.item(first) * page_bytes
            while into:
                got = pread(fd, into, offset)
                if not got:
                    raise IndexDamagedError(f"page {offset // page_bytes} is behind the end of data.mdb")
                into, offset = into[got:], offset + got
        yield pages


def _pack_leaves(fd: int, pread: Pread, pages: UInt8s) -> PackedRows:
    flat, page_bytes = pages.reshape(-1), pages.shape[1]
    start, key_bytes, nbytes, is_big = leaf_nodes(pages)
    good = key_bytes == INDEX_KEY_BYTES
    odd = np.flatnonzero(~good)
    odd_keys = [flat[start[at] : start[at] + key_bytes[at]].tobytes() for at in odd.tolist()]
    start, nbytes, is_big = start[good], nbytes[good], is_big[good]
    packed = PackedRows(len(start), {}, odd_keys)
    widths = np.where(is_big, 0, INDEX_KEY_BYTES + nbytes)
    for width in np.unique(widths[~is_big]).tolist():
        chosen = np.flatnonzero(widths == width)
        rows = np.lib.stride_tricks.sliding_window_view(flat, width)[start[chosen]]
        packed.by_width[width] = [(chosen, memoryview(rows).cast("B"))]
    for at in np.flatnonzero(is_big).tolist():
        end = start.item(at) + INDEX_KEY_BYTES
        run = int.from_bytes(flat[end : end + 8].tobytes(), "little")
        data = read_run(fd, pread, page_bytes, run, nbytes.item(at))
        if len(data) != nbytes[at]:
            raise IndexDamagedError(f"page {run} of data.mdb has not the {nbytes[at]} bytes that are to be there")
        row = flat[end - INDEX_KEY_BYTES : end].tobytes() + data
        packed.by_width.setdefault(len(row), []).append((np.array([at]), row))
    return packed
