"""Checks every page of an index that its newest transaction can reach, and reads the records on the way.

LMDB reads its file through a mapping and asserts properties of pages, so a page that is missing, that the device cannot
read, or that is none of its tree could end the process. Branches lead to the pages of the next level; the pages of a
level are read in the order of the file, some at a time, which are checked and taken apart while the processor's cache
has them. Pages that no tree has are not read: LMDB writes them before it reads them again. That is why none of those
that it lists as free may be in use.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from prefixd_swap.slab.index.free_pages import FreePages
from prefixd_swap.slab.index.lmdb_file import (
    BIG_DATA,
    BRANCH,
    LEAF,
    MAX_PAGE,
    NO_ROOT,
    NODE_HEADER,
    OVERFLOW,
    PAGE_HEADER,
    RUN_HEADER,
    SUB_TREE,
    TREE,
    Int64s,
    Pread,
    Tree,
    newest_meta,
)
from prefixd_swap.slab.index.packed_rows import RowCollector

UInt8s = npt.NDArray[np.uint8]

_PAGES_AT_ONCE = 256
_NEAR = 4
"""Pages of one level that are at most so far apart are read together, with the pages between them."""
_NUMBER_BYTES = 8
_BLOCKS = b"blocks"


def check_pages(fd: int, pread: Pread, nbytes: int, rows: RowCollector | None = None) -> str:
    """Check the pages in the file's first `nbytes` bytes that the newest transaction can reach.

    A file without a meta page has none; LMDB refuses it. A whole file may end before its last page: LMDB writes no page
    that one transaction has allocated and freed again.

    Args:
        fd: the file.
        pread: reads it.
        nbytes: at most its size.
        rows: gets the rows of the tree `blocks`.

    Returns:
        What is wrong: LMDB would abort the process, or read beyond a page or the file. "" if all pages are sound.

    Raises:
        OSError: the device cannot read a page.
    """
    meta = newest_meta(fd, pread)
    if meta is None:
        return ""
    if not meta.is_sound:
        return "the newest meta page of data.mdb is damaged"
    check = _Check(fd, pread, meta.page_bytes, nbytes // meta.page_bytes)
    try:
        if len(meta.roots) > 1:
            check.walk(meta.roots[0], free=check.free)
        main = meta.roots[-1] if meta.roots else None
        trees: list[tuple[int, int | None, RowCollector | None]] = [(root, None, None) for root in meta.roots[-1:]]
        while trees:
            root, entries, mine = trees.pop()
            for name, below in check.walk(root, entries, mine):
                wanted = rows if root == main and name == _BLOCKS else None
                if wanted is not None:
                    wanted.found = True
                if below.root is not None:
                    trees.append((below.root, below.entries, wanted))
        check.refuse_overlaps(meta.last_page)
    except _DamagedPageError as error:
        return f"page {error.page} of data.mdb is damaged"
    if check.missing is None:
        return ""
    expected = (meta.last_page + 1) * meta.page_bytes
    return f"data.mdb is cut off: it has {nbytes} bytes of {expected}, page {check.missing} is gone"


class _DamagedPageError(Exception):
    def __init__(self, page: int) -> None:
        super().__init__(page)
        self.page = page


@dataclass(slots=True)
class _Pages:
    """Some pages of one level, in the order of the file: m of them."""

    numbers: Int64s
    """[m]"""
    content: UInt8s
    """The bytes of these pages, and of others between them."""
    begin: Int64s
    """[m]: where each page begins in `content`."""


@dataclass(slots=True)
class _Nodes:
    """The nodes of some pages, in the pages' order: n of them."""

    counts: Int64s
    """[m]: nodes of each page."""
    start: Int64s
    """[n]: where each node's key begins in the content."""
    low: Int64s
    high: Int64s
    flags: Int64s
    key_bytes: Int64s
    """[n]: the header."""
    room: Int64s
    """[n]: bytes from the begin of the key to the end of the page."""


class _Check:
    """The state of a check: which pages were reached."""

    def __init__(self, fd: int, pread: Pread, page_bytes: int, there: int) -> None:
        self.missing: int | None = None
        self.free = FreePages()
        self._fd, self._pread = fd, pread
        self._page_bytes = page_bytes
        self._there = there
        self._reached = np.zeros(there, np.bool_)
        self._reached[:2] = True  # the meta pages
        self._begins, self._lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]  # of the overflow runs
        self._buffer = np.empty(_PAGES_AT_ONCE * _NEAR * page_bytes, np.uint8)

    def walk(
        self, root: int, entries: int | None = None, rows: RowCollector | None = None, free: FreePages | None = None
    ) -> list[tuple[bytes, Tree]]:
        """Check the pages of a tree, and that it has so many `entries`; None: any number. Returns the trees in it."""
        level, found = np.array([root], np.int64), 0
        while len(level := self._reach(level)):
            order = np.argsort(level)
            numbers = level[order]
            kind = 0
            below, holders, trees = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], []
            for start in range(0, len(numbers), _PAGES_AT_ONCE):
                pages = self._read(numbers[start : start + _PAGES_AT_ONCE])
                ranks = order[start : start + _PAGES_AT_ONCE]
                if not start:
                    if rows is not None:
                        rows.expect(len(numbers) * self._page_bytes)
                    kind = int(pages.content[pages.begin[0] + 10]) & (BRANCH | LEAF)
                nodes = self._nodes(pages, kind, 1 if entries is None or kind == LEAF else 2)
                if kind == BRANCH:
                    below.append(nodes.low | nodes.high << 16 | nodes.flags << 32)
                    holders.append(np.repeat(ranks, nodes.counts))
                else:
                    trees += self._leaves(pages, ranks, nodes, rows, free)
                    found += len(nodes.start)
            if kind == LEAF:
                if self.missing is None and entries not in (None, found):  # a page has lost some, or has others
                    raise _DamagedPageError(root)
                return trees
            level = np.concatenate(below)[np.argsort(np.concatenate(holders), kind="stable")]
        return []

    def refuse_overlaps(self, last_page: int) -> None:
        """Check that no page is reached twice, as one page and in a run, or free as well, and that none lies behind
        `last_page`."""
        pages = np.concatenate([np.flatnonzero(self._reached), *self.free.found])
        starts = np.concatenate([pages, *self._begins])
        ends = starts + np.concatenate([np.ones(len(pages), np.int64), *self._lengths])
        order = np.argsort(starts, kind="stable")
        meets = np.flatnonzero(ends[order] > np.append(starts[order][1:], last_page + 1))
        if len(meets):
            raise _DamagedPageError(starts.item(order[meets[0]]))

    def _reach(self, level: Int64s) -> Int64s:
        """The pages of a level that the file has; each may be reached once."""
        if len(gone := level[level >= self._there]):
            self._miss(int(gone.min()))
            level = level[level < self._there]
        if len(again := level[self._reached[level]]):
            raise _DamagedPageError(again.item(0))
        self._reached[level] = True
        ascending = np.sort(level)
        if len(twice := ascending[1:][ascending[1:] == ascending[:-1]]):
            raise _DamagedPageError(twice.item(0))
        return level

    def _miss(self, page: int) -> None:
        self.missing = page if self.missing is None else min(page, self.missing)

    def _read(self, numbers: Int64s) -> _Pages:
        """The pages of these numbers, which ascend."""
        steps = np.diff(numbers)
        near = steps <= _NEAR
        places = np.concatenate([[0], np.cumsum(np.where(near, steps, 1))])
        bounds = [0, *(np.flatnonzero(~near) + 1).tolist(), len(numbers)]
        for first, end in pairwise(bounds):
            start, stop = numbers.item(first), numbers.item(end - 1) + 1
            try:
                self._fill(places.item(first), start, stop)
            except OSError:
                if stop - start == end - first:
                    raise
                for at in range(first, end):  # a page between them may be the one that cannot be read
                    self._fill(places.item(at), numbers.item(at), numbers.item(at) + 1)
        return _Pages(numbers, self._buffer, places * self._page_bytes)

    def _fill(self, place: int, start: int, stop: int) -> None:
        """Read the pages from `start` to `stop` into the buffer, where `place` is the first one's."""
        size = self._page_bytes
        self._read_into(self._buffer[place * size : (place + stop - start) * size], start * size)

    def _read_into(self, memory: UInt8s, offset: int) -> None:
        into = memory.data
        while len(into):
            got = self._pread(self._fd, into, offset)
            if not got:
                raise _DamagedPageError(offset // self._page_bytes)
            into, offset = into[got:], offset + got

    def _nodes(self, pages: _Pages, kind: int, least: int) -> _Nodes:
        """The nodes of pages of one kind, of which each has at least `least`."""
        size = self._page_bytes
        words = pages.content.view("<u2")
        header = words[(pages.begin // 2)[:, None] + np.arange(PAGE_HEADER // 2)]
        flags, lower, upper = header[:, 5], header[:, 6].astype(np.int64), header[:, 7].astype(np.int64)
        sound = header.view("<u8")[:, 0] == pages.numbers.astype(np.uint64)
        sound &= (flags == kind) & (kind in (BRANCH, LEAF))
        sound &= (lower >= PAGE_HEADER + 2 * least) & (lower <= upper) & (upper <= size)
        if not sound.all():
            raise _DamagedPageError(pages.numbers.item(sound.argmin()))
        counts = (lower - PAGE_HEADER) // 2
        ends = np.cumsum(counts)
        pointers = np.repeat((pages.begin + PAGE_HEADER) // 2 - (ends - counts), counts)
        pointers += np.arange(len(pointers))
        offset = words.take(pointers).astype(np.int64)
        begin = np.repeat(pages.begin, counts)
        good = (offset & 1 == 0) & (offset >= np.repeat(upper, counts))
        good &= offset <= size - NODE_HEADER
        if not good.all():
            raise _DamagedPageError(self._holder(pages, counts, good))
        at = (begin + offset) // 2
        low, high, node_flags, key_bytes = (words.take(at + place).astype(np.int64) for place in range(4))
        room = size - NODE_HEADER - offset
        if not (good := key_bytes <= room).all():
            raise _DamagedPageError(self._holder(pages, counts, good))
        # LMDB closes the gap of a node that it removes by what the node says of its size: it would move all others.
        taken = NODE_HEADER + key_bytes
        if kind == LEAF:
            taken += np.where(node_flags & BIG_DATA, _NUMBER_BYTES, low | high << 16)
        taken += taken & 1
        before = np.concatenate([[0], np.cumsum(taken)])
        if not (good := before[ends] - before[ends - counts] == size - upper).all():
            raise _DamagedPageError(pages.numbers.item(good.argmin()))
        return _Nodes(counts, begin + offset + NODE_HEADER, low, high, node_flags, key_bytes, room)

    def _holder(self, pages: _Pages, counts: Int64s, good: npt.NDArray[np.bool_]) -> int:
        """The page of the first node that is not good."""
        return int(np.repeat(pages.numbers, counts)[good.argmin()])

    def _leaves(
        self, pages: _Pages, ranks: Int64s, nodes: _Nodes, rows: RowCollector | None, free: FreePages | None
    ) -> list[tuple[bytes, Tree]]:
        """Check the nodes of leaves, and what they lead to; returns the trees among them."""
        nbytes, flags = nodes.low | nodes.high << 16, nodes.flags
        big = np.zeros(0, np.int64)
        trees: list[tuple[bytes, Tree]] = []
        fits = nodes.key_bytes + nbytes <= nodes.room
        if flags.any():
            fits = np.where(flags == BIG_DATA, nodes.key_bytes + _NUMBER_BYTES <= nodes.room, fits)
            fits &= (flags == 0) | (flags == BIG_DATA) | ((flags == SUB_TREE) & (nbytes == TREE.size))
        if not fits.all():
            raise _DamagedPageError(self._holder(pages, nodes.counts, fits))
        if flags.any():
            big = np.flatnonzero(flags == BIG_DATA)
            for at in np.flatnonzero(flags == SUB_TREE).tolist():
                start, end = nodes.start.item(at), nodes.start.item(at) + nodes.key_bytes.item(at)
                _, tree_flags, *_, entries, root = TREE.unpack_from(pages.content.data, end)
                if tree_flags or (root == NO_ROOT and entries):  # no tree here has flags
                    raise _DamagedPageError(int(np.repeat(pages.numbers, nodes.counts)[at]))
                tree = Tree(entries, None if root == NO_ROOT else min(root, MAX_PAGE))
                trees.append((pages.content[start:end].tobytes(), tree))
        runs = self._runs(pages, nodes, big, nbytes) if len(big) else []
        if free is not None and not free.add(pages.content, nodes.start, nodes.key_bytes, nbytes, big, runs):
            raise _DamagedPageError(pages.numbers.item(0))
        if rows is not None:
            rows.add(pages.content, ranks, nodes.counts, nodes.start, nodes.key_bytes, nbytes, big, runs)
        return trees

    def _runs(self, pages: _Pages, nodes: _Nodes, big: Int64s, nbytes: Int64s) -> list[bytes]:
        """Check the overflow runs of the nodes `big`; returns the data, b"" for a run behind the end of the file."""
        size = self._page_bytes
        places = (nodes.start + nodes.key_bytes)[big][:, None] + np.arange(_NUMBER_BYTES)
        named = np.minimum(pages.content[places].view("<u8")[:, 0], np.uint64(MAX_PAGE)).astype(np.int64)
        wanted = -(-(nbytes[big] + PAGE_HEADER) // size)
        data = [b""] * len(big)
        found = np.zeros(len(big), np.int64)
        for at in np.argsort(named).tolist():
            first, count = named.item(at), wanted.item(at)
            if first + count > self._there:
                self._miss(max(first, self._there))
                continue
            memory = np.empty(count * size, np.uint8)
            self._read_into(memory[:size], first * size)
            number, flags, found[at] = RUN_HEADER.unpack_from(memory.data)
            if number != first or flags != OVERFLOW or found[at] < count:  # may be longer, after shorter data
                raise _DamagedPageError(first)
            self._read_into(memory[size:], (first + 1) * size)
            data[at] = memory[PAGE_HEADER : PAGE_HEADER + nbytes.item(big.item(at))].tobytes()
        self._begins.append(named[found > 0])
        self._lengths.append(found[found > 0])
        return data
