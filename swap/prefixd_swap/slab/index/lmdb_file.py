"""Reads the pages of an LMDB 0.9 data file without LMDB, whose mapping gives SIGBUS for a page behind the file's end.

```
page 0, 1   metas: page header | magic, version | address, map size | free tree, main tree | last page, transaction
page n      page header | offsets of its nodes, growing up | free | nodes, growing down
            branch (flag 1): nodes lead to child pages; leaf (flag 2): to data, to an overflow run or to a tree
run         overflow (flag 4): page header, then data of as many pages as it takes
```

Page header: page number u64, pad u16, flags u16, end of the offsets u16, start of the nodes u16. Node: low and high
half of the data's size u16, flags u16, key size u16, key, data; of a branch the child's number is in the first three.
See `struct MDB_page`, `MDB_node`, `MDB_db` and `MDB_meta` in LMDB's mdb.c.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Pread = Callable[[int, memoryview, int], int]
"""Reads from a descriptor into a buffer, at an offset; returns the bytes read, 0 at the end."""

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<16xIIQQ48s48sQQ")
TREE = struct.Struct("<IHHQQQQQ")
PAGE_HEADER = 16
NODE_HEADER = 8
RUN_HEADER = struct.Struct("<QxxHI")
BRANCH, LEAF, OVERFLOW = 1, 2, 4
BIG_DATA, SUB_TREE = 1, 2
_INTEGER_KEY = 8  # of the tree of free pages
NO_ROOT = (1 << 64) - 1
MAX_PAGE = 1 << 48


@dataclass(frozen=True, slots=True)
class Meta:
    """The meta page of the newest transaction."""

    page_bytes: int
    roots: tuple[int, ...]
    """Root pages of the tree of free pages and of the main tree, without empty trees. In a damaged meta page a root may
    be any number; it is cut to 2^48, where no file has a page."""
    last_page: int
    transaction: int
    is_sound: bool
    """Whether the trees have the flags that they always have here, and the map that LMDB makes has room for all pages.
    Else LMDB aborts, refuses to open the file, or does not find what it has."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A named tree: how many entries it has, and its root page unless it is empty."""

    entries: int
    root: int | None


def newest_meta(fd: int, pread: Pread) -> Meta | None:
    """The meta page that LMDB uses; None if neither is a meta page of LMDB 0.9 on this machine.

    Raises:
        OSError: the device refuses.
    """
    head = _read(fd, pread, 0, _META.size)
    sizes = {page_bytes for page_bytes in (_page_bytes(head),) if page_bytes}
    found = [meta for size in sizes or {os.sysconf("SC_PAGE_SIZE")} for meta in _metas(fd, pread, head, size)]
    return max(found, key=lambda meta: meta.transaction, default=None)


def nodes(pages: npt.NDArray[np.uint8], kind: int) -> tuple[Int64s, Int64s]:
    """Every node of the `pages` of one kind: the page's place in `pages`, and the node's offset in the page.

    Offsets where no node can be, as in a page that is not LMDB's, are left out.
    """
    page_bytes = pages.shape[1]
    header = pages[:, :PAGE_HEADER].copy().view("<u2").astype(np.int64)  # number in 0..3, pad, flags, lower, upper
    flags, lower = header[:, 5] & (BRANCH | LEAF | OVERFLOW), header[:, 6]
    counts = np.where((flags == kind) & (lower >= PAGE_HEADER) & (lower <= page_bytes), (lower - PAGE_HEADER) // 2, 0)
    page = np.repeat(np.arange(len(pages)), counts)
    ordinal = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
    words = pages.reshape(-1).view("<u2")
    offset = words[page * (page_bytes // 2) + PAGE_HEADER // 2 + ordinal].astype(np.int64)
    good = (offset % 2 == 0) & (offset >= PAGE_HEADER) & (offset + NODE_HEADER <= page_bytes)
    return page[good], offset[good]


def read_run(fd: int, pread: Pread, page_bytes: int, first: int, nbytes: int) -> bytes:
    """Data of an overflow run; empty if no run of at least `nbytes` bytes begins at page `first`."""
    header = _read(fd, pread, first * page_bytes, PAGE_HEADER)
    if len(header) < PAGE_HEADER:
        return b""
    number, flags, pages = RUN_HEADER.unpack(header)
    if number != first or not flags & OVERFLOW or pages * page_bytes < PAGE_HEADER + nbytes:
        return b""
    return _read(fd, pread, first * page_bytes + PAGE_HEADER, nbytes)


def tree_rows(fd: int, pread: Pread, page_bytes: int, root: int) -> Iterator[tuple[bytes, bytes, int]]:
    """Key, data and flags of every readable entry of a tree, in key order unless pages are damaged.

    Pages that are missing or not of a tree are left out, with everything below them; so are entries without their data.

    Raises:
        OSError: the device refuses.
    """
    to_visit, seen = [root], set[int]()
    while to_visit:
        page = to_visit.pop()
        if page in seen:
            continue
        seen.add(page)
        content = _read(fd, pread, page * page_bytes, page_bytes)
        if len(content) < page_bytes or int.from_bytes(content[:8], "little") != page:
            continue
        pages = np.frombuffer(content, np.uint8).reshape(1, page_bytes)
        children = []
        for offset in nodes(pages, BRANCH)[1].tolist():
            low, high, top = struct.unpack_from("<HHH", content, offset)
            children.append(low | high << 16 | top << 32)
        to_visit += reversed(children)
        for offset in nodes(pages, LEAF)[1].tolist():
            low, high, flags, key_bytes = struct.unpack_from("<HHHH", content, offset)
            start = offset + NODE_HEADER + key_bytes
            nbytes = low | high << 16
            data = content[start : start + nbytes]
            if flags & BIG_DATA:
                data = read_run(fd, pread, page_bytes, int.from_bytes(content[start : start + 8], "little"), nbytes)
            if start <= page_bytes and len(data) == nbytes:
                yield content[start - key_bytes : start], data, flags


def tree_entries(fd: int, pread: Pread, page_bytes: int, tree: Tree | None) -> Iterator[tuple[bytes, bytes]]:
    """Key and data of every entry of a named tree that is readable and in order; none if the tree does not exist.

    Raises:
        OSError: the device refuses.
    """
    if tree is None or tree.root is None:
        return
    in_order = _in_order([key for key, _, _ in tree_rows(fd, pread, page_bytes, tree.root)])
    for place, (key, data, flags) in enumerate(tree_rows(fd, pread, page_bytes, tree.root)):
        if place in in_order and not flags & ~BIG_DATA:
            yield key, data


def read_trees(fd: int, pread: Pread) -> tuple[int, dict[bytes, Tree]]:
    """Bytes of a page, and the named trees of the newest transaction; empty if they cannot be read.

    Raises:
        OSError: the device refuses.
    """
    meta = newest_meta(fd, pread)
    if meta is None or not meta.roots:
        return 0, {}
    trees = {}
    for key, data, flags in tree_rows(fd, pread, meta.page_bytes, meta.roots[-1]):
        if flags & SUB_TREE and len(data) == TREE.size:
            *_, entries, root = TREE.unpack(data)
            trees[key] = Tree(entries, root if root < MAX_PAGE else None)
    return meta.page_bytes, trees


def _in_order(keys: Sequence[bytes]) -> set[int]:
    """Places of the longest ascending sequence in `keys`: all other keys are damaged, or of damaged pages.

    `[a, b, z, c]` -> `{0, 1, 3}`.
    """
    ends: list[int] = []  # for each length of a sequence, the place of the least last key
    least: list[bytes] = []
    before: list[int] = []
    for place, key in enumerate(keys):
        at = bisect_left(least, key)
        before.append(ends[at - 1] if at else -1)
        ends[at : at + 1] = [place]
        least[at : at + 1] = [key]
    found = set[int]()
    place = ends[-1] if ends else -1
    while place >= 0:
        found.add(place)
        place = before[place]
    return found


def _metas(fd: int, pread: Pread, head: bytes, page_bytes: int) -> Iterator[Meta]:
    for content in (head, _read(fd, pread, page_bytes, _META.size)):
        if _page_bytes(content) == page_bytes:
            *_, map_bytes, free, main, last_page, transaction = _META.unpack(content)
            trees = TREE.unpack(free), TREE.unpack(main)
            roots = tuple(min(root, MAX_PAGE) for *_, root in trees if root != NO_ROOT)
            is_sound = [flags for _, flags, *_ in trees] == [_INTEGER_KEY, 0] and last_page < map_bytes // page_bytes
            yield Meta(page_bytes, roots, last_page, transaction, is_sound)


def _page_bytes(content: bytes) -> int:
    """The page size that a meta page names; 0 if `content` is not a meta page."""
    if len(content) < _META.size:
        return 0
    magic, version, _, _, free, *_ = _META.unpack(content)
    size = int(TREE.unpack(free)[0])
    return size if (magic, version) == (_MAGIC, _VERSION) and 256 <= size <= 65_536 and size % 2 == 0 else 0


def _read(fd: int, pread: Pread, offset: int, nbytes: int) -> bytes:
    """Bytes of the file, fewer at its end. Limits the buffer to the file's size, since a damaged page may name any."""
    nbytes = min(nbytes, os.fstat(fd).st_size - offset)
    if nbytes <= 0:
        return b""
    buffer = memoryview(bytearray(nbytes))
    done = 0
    while done < nbytes and (got := pread(fd, buffer[done:], offset + done)):
        done += got
    return bytes(buffer[:done])
