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

READ_PAGES = 256
"""Pages that are read and checked together."""

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_META = struct.Struct("<16xIIQQ48s48sQQ")
_TREE = struct.Struct("<IHHQQQQQ")
_PAGE_HEADER = 16
_NODE_HEADER = 8
_RUN_HEADER = struct.Struct("<QxxHI")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_BIG_DATA, _SUB_TREE = 1, 2
_NO_ROOT = (1 << 64) - 1
_MAX_PAGE = 1 << 48


@dataclass(frozen=True, slots=True)
class Meta:
    """The meta page of the newest transaction."""

    page_bytes: int
    roots: tuple[int, ...]
    """Root pages of the tree of free pages and of the main tree, without empty trees. In a damaged meta page a root may
    be any number; it is cut to 2^48, where no file has a page."""
    last_page: int
    transaction: int


@dataclass(frozen=True, slots=True)
class Tree:
    """A named tree: how many entries it has, and its root page unless it is empty."""

    entries: int
    root: int | None


@dataclass(frozen=True, slots=True)
class References:
    """References between pages: n of them, in the order of the pages that hold them."""

    holder: Int64s
    """[n], ascending: the page that has the reference."""
    first: Int64s
    """[n]: the page that it names."""
    pages: Int64s
    """[n]: number of pages from there: 1, or those of an overflow run."""
    is_tree: npt.NDArray[np.bool_]
    """[n]: whether the named page holds references itself."""


def newest_meta(fd: int, pread: Pread) -> Meta | None:
    """The meta page that LMDB uses; None if neither is a meta page of LMDB 0.9 on this machine.

    Raises:
        OSError: the device refuses.
    """
    head = _read(fd, pread, 0, _META.size)
    sizes = {page_bytes for page_bytes in (_page_bytes(head),) if page_bytes}
    found = [meta for size in sizes or {os.sysconf("SC_PAGE_SIZE")} for meta in _metas(fd, pread, head, size)]
    return max(found, key=lambda meta: meta.transaction, default=None)


def first_missing(fd: int, pread: Pread, nbytes: int) -> int | None:
    """The lowest page that the newest transaction can reach and that is behind the file's first `nbytes` bytes.

    None if there is no such page. LMDB writes no page that one transaction has allocated and freed again, so a whole
    file may end before its last page.

    Raises:
        OSError: the device refuses.
        ValueError: the file has no meta page.
    """
    meta = newest_meta(fd, pread)
    if meta is None:
        raise ValueError("it has no meta page")
    there = nbytes // meta.page_bytes
    if there > meta.last_page:
        return None
    found = [_references(first, pages) for first, pages in read_pages(fd, pread, meta.page_bytes, there)]
    holder = np.concatenate([each.holder for each in found])
    named = np.concatenate([each.first for each in found])
    runs = np.concatenate([each.pages for each in found])
    is_tree = np.concatenate([each.is_tree for each in found])
    reached = np.zeros(there, np.bool_)
    level = np.array(meta.roots, np.int64)
    missing = level[level >= there]
    while len(level := np.unique(level[level < there])):
        level = level[~reached[level]]
        reached[level] = True
        mine = np.isin(holder, level, kind="table") if len(holder) else np.zeros(0, np.bool_)
        ends = named[mine] + runs[mine]
        missing = np.concatenate([missing, np.maximum(named[mine], there)[ends > there]])
        level = named[mine & is_tree]
    return int(missing.min()) if len(missing) else None


def damaged_page(fd: int, pread: Pread, nbytes: int) -> int | None:
    """A damaged page that the newest transaction can reach: LMDB would abort the process, or read beyond the page.

    None if all pages in the file's first `nbytes` bytes are sound, or if it has no meta page.

    Raises:
        OSError: the device refuses.
    """
    meta = newest_meta(fd, pread)
    if meta is None:
        return None
    there = nbytes // meta.page_bytes
    pieces = [
        (_references(first, pages), *_kinds(first, pages))
        for first, pages in read_pages(fd, pread, meta.page_bytes, there)
    ]
    holder = np.concatenate([each.holder for each, _, _ in pieces])
    named = np.concatenate([each.first for each, _, _ in pieces])
    runs = np.concatenate([each.pages for each, _, _ in pieces])
    is_tree = np.concatenate([each.is_tree for each, _, _ in pieces])
    kind = np.concatenate([each for _, each, _ in pieces])
    run = np.concatenate([each for _, _, each in pieces])
    reached = np.zeros(there, np.bool_)
    begin, length = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]  # of the overflow runs
    roots = list(meta.roots)
    while roots:
        level = np.array([roots.pop()], np.int64)
        while len(level := level[level < there]):  # `first_missing` reports missing pages
            wrong = reached[level] | (kind[level] != kind[level[0]]) | (kind[level] == 0)
            if wrong.any():
                return int(level[wrong][0])
            reached[level] = True
            mine = np.isin(holder, level, kind="table") if len(holder) else np.zeros(0, np.bool_)
            below = named[mine & is_tree]
            if len(np.unique(below)) < len(below):
                return int(level[0])
            if kind[level[0]] == _LEAF:
                big = mine & ~is_tree & (named < there)
                if (short := run[named[big]] < runs[big]).any():  # may be longer, after shorter data
                    return int(named[big][short][0])
                begin.append(named[big])
                length.append(run[named[big]])
                roots += below.tolist()
                break
            level = below
    pages = np.flatnonzero(reached)
    starts = np.concatenate([pages, *begin])
    ends = starts + np.concatenate([np.ones(len(pages), np.int64), *length])
    order = np.argsort(starts, kind="stable")
    meets = np.flatnonzero(ends[order] > np.append(starts[order][1:], meta.last_page + 1))
    return int(starts[order][meets[0]]) if len(meets) else None


def read_pages(fd: int, pread: Pread, page_bytes: int, count: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yields the first `count` pages in groups: the number of the group's first page, and uint8 [n, page bytes].

    Raises:
        OSError: the device refuses.
    """
    for first in range(0, count, READ_PAGES):
        some = min(READ_PAGES, count - first)
        content = _read(fd, pread, first * page_bytes, some * page_bytes)
        whole = len(content) // page_bytes
        yield first, np.frombuffer(content, np.uint8)[: whole * page_bytes].reshape(whole, page_bytes)
        if whole < some:
            return


def nodes(pages: npt.NDArray[np.uint8], kind: int) -> tuple[Int64s, Int64s]:
    """Every node of the `pages` of one kind: the page's place in `pages`, and the node's offset in the page.

    Offsets where no node can be, as in a page that is not LMDB's, are left out.
    """
    page_bytes = pages.shape[1]
    header = pages[:, :_PAGE_HEADER].copy().view("<u2").astype(np.int64)  # number in 0..3, pad, flags, lower, upper
    flags, lower = header[:, 5] & (_BRANCH | _LEAF | _OVERFLOW), header[:, 6]
    counts = np.where((flags == kind) & (lower >= _PAGE_HEADER) & (lower <= page_bytes), (lower - _PAGE_HEADER) // 2, 0)
    page = np.repeat(np.arange(len(pages)), counts)
    ordinal = np.arange(len(page)) - np.repeat(np.cumsum(counts) - counts, counts)
    words = pages.reshape(-1).view("<u2")
    offset = words[page * (page_bytes // 2) + _PAGE_HEADER // 2 + ordinal].astype(np.int64)
    good = (offset % 2 == 0) & (offset >= _PAGE_HEADER) & (offset + _NODE_HEADER <= page_bytes)
    return page[good], offset[good]


def branch_children(pages: npt.NDArray[np.uint8]) -> Int64s:
    """The numbers of the child pages of all branches in `pages`, in key order."""
    low, high, top, _ = _fields(pages, *nodes(pages, _BRANCH))
    return low | high << 16 | top << 32


def leaf_nodes(pages: npt.NDArray[np.uint8]) -> tuple[Int64s, Int64s, Int64s, npt.NDArray[np.bool_]]:
    """Every entry of all leaves in `pages`, in key order.

    Returns:
        The place of each key in the bytes of `pages`; bytes of the key; bytes of the data, which follow the key; and
        whether the number of an overflow run follows it instead.
    """
    page, offset = nodes(pages, _LEAF)
    low, high, flags, key_bytes = _fields(pages, page, offset)
    start = page * pages.shape[1] + offset + _NODE_HEADER
    return start, key_bytes, low | high << 16, flags & _BIG_DATA != 0


def read_run(fd: int, pread: Pread, page_bytes: int, first: int, nbytes: int) -> bytes:
    """Data of an overflow run; empty if no run of at least `nbytes` bytes begins at page `first`."""
    header = _read(fd, pread, first * page_bytes, _PAGE_HEADER)
    if len(header) < _PAGE_HEADER:
        return b""
    number, flags, pages = _RUN_HEADER.unpack(header)
    if number != first or not flags & _OVERFLOW or pages * page_bytes < _PAGE_HEADER + nbytes:
        return b""
    return _read(fd, pread, first * page_bytes + _PAGE_HEADER, nbytes)


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
        for offset in nodes(pages, _BRANCH)[1].tolist():
            low, high, top = struct.unpack_from("<HHH", content, offset)
            children.append(low | high << 16 | top << 32)
        to_visit += reversed(children)
        for offset in nodes(pages, _LEAF)[1].tolist():
            low, high, flags, key_bytes = struct.unpack_from("<HHHH", content, offset)
            start = offset + _NODE_HEADER + key_bytes
            nbytes = low | high << 16
            data = content[start : start + nbytes]
            if flags & _BIG_DATA:
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
        if place in in_order and not flags & ~_BIG_DATA:
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
        if flags & _SUB_TREE and len(data) == _TREE.size:
            *_, entries, root = _TREE.unpack(data)
            trees[key] = Tree(entries, root if root < _MAX_PAGE else None)
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


def _references(first: int, pages: npt.NDArray[np.uint8]) -> References:
    """The references in these pages; `first` is the number of the first of them."""
    page_bytes = pages.shape[1]
    page, _ = nodes(pages, _BRANCH)
    branches = (page, branch_children(pages), np.ones(len(page), np.int64), np.ones(len(page), np.bool_))

    page, offset = nodes(pages, _LEAF)
    low, high, flags, key_bytes = _fields(pages, page, offset)
    data = offset + _NODE_HEADER + key_bytes
    big = (flags & _BIG_DATA != 0) & (data + 8 <= page_bytes)
    tree = (flags & _SUB_TREE != 0) & (data + _TREE.size <= page_bytes)
    at = np.where(tree, data + _TREE.size - 8, data)
    chosen = big | tree
    page, at, tree, size = page[chosen], at[chosen], tree[chosen], (low | high << 16)[chosen]
    numbers = pages.reshape(-1)[(page * page_bytes + at)[:, None] + np.arange(8)]
    named = np.ascontiguousarray(numbers).view("<u8").reshape(-1)
    runs = np.where(tree, 1, -(-(size + _PAGE_HEADER) // page_bytes))
    real = named < _MAX_PAGE  # else the tree is empty
    leaves = (page[real], named[real].astype(np.int64), runs[real], tree[real])

    holder, found, count, is_tree = (np.concatenate(both) for both in zip(branches, leaves, strict=True))
    return References(holder + first, found, count, is_tree)


def _fields(pages: npt.NDArray[np.uint8], page: Int64s, offset: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """The four numbers in the headers of the nodes at these offsets."""
    words = pages.reshape(-1).view("<u2")
    at = page * (pages.shape[1] // 2) + offset // 2
    low, high, flags, key_bytes = (words[at + place].astype(np.int64) for place in range(4))
    return low, high, flags, key_bytes


def _kinds(first: int, pages: npt.NDArray[np.uint8]) -> tuple[Int64s, Int64s]:
    """The kind of each page: 1 a branch, 2 a leaf, 0 neither or with impossible nodes; and the length in pages of the
    overflow run that begins there, 0 without one."""
    page_bytes, words = pages.shape[1], pages.reshape(-1).view("<u2")
    header = pages[:, :_PAGE_HEADER].copy()
    own = header.view("<u8")[:, 0] == np.arange(first, first + len(pages), dtype=np.uint64)
    fields = header.view("<u2").astype(np.int64)
    flags, lower, upper = fields[:, 5], fields[:, 6], fields[:, 7]
    kind = np.zeros(len(pages), np.int64)
    for each in (_BRANCH, _LEAF):
        page, offset = nodes(pages, each)
        at = page * (page_bytes // 2) + offset // 2
        size, node_flags, key_bytes = (words[at + place].astype(np.int64) for place in (0, 2, 3))
        size += words[at + 1].astype(np.int64) << 16
        data = np.where(node_flags & _BIG_DATA != 0, 8, size) if each == _LEAF else 0
        start = offset + _NODE_HEADER + key_bytes
        inside = (offset >= upper[page]) & (start + data <= page_bytes)
        if each == _LEAF:
            inside &= (node_flags == 0) | (node_flags == _BIG_DATA) | (node_flags == _SUB_TREE)
            trees = np.flatnonzero(inside & (node_flags == _SUB_TREE))
            of_tree = pages.reshape(-1)[(page * page_bytes + start)[trees][:, None] + [4, 5]]  # a tree's flags: none
            inside[trees] &= (size[trees] == _TREE.size) & ~of_tree.any(axis=1)
        sound = np.bincount(page[inside], minlength=len(pages))
        kind[own & (flags == each) & (lower > _PAGE_HEADER) & (sound == (lower - _PAGE_HEADER) // 2)] = each
    return kind, np.where(own & (flags == _OVERFLOW), lower | upper << 16, 0)


def _metas(fd: int, pread: Pread, head: bytes, page_bytes: int) -> Iterator[Meta]:
    for content in (head, _read(fd, pread, page_bytes, _META.size)):
        if _page_bytes(content) == page_bytes:
            *_, free, main, last_page, transaction = _META.unpack(content)
            roots = tuple(
                min(root, _MAX_PAGE) for root in (_TREE.unpack(tree)[-1] for tree in (free, main)) if root != _NO_ROOT
            )
            yield Meta(page_bytes, roots, last_page, transaction)


def _page_bytes(content: bytes) -> int:
    """The page size that a meta page names; 0 if `content` is not a meta page."""
    if len(content) < _META.size:
        return 0
    magic, version, _, _, free, *_ = _META.unpack(content)
    size = int(_TREE.unpack(free)[0])
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
