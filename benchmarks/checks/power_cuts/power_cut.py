"""A disk whose power can be cut: file calls that are carried out and written down, and what could be left of them.

What a call changed may be lost, torn or reordered at the cut unless it was synced since: file contents by sectors of
512 bytes or pages of 4096, sizes, and names in directories. LMDB does its own I/O and promises that a transaction's
pages are on the disk before the page that makes them valid; so at a cut during a commit the index is as before, any
part of the new pages written, or as after.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prefixd_swap.slab.files.file_ops import FileOps

SECTOR_BYTES = 512
PAGE_BYTES = 4096
_META_PAGES = 2  # of LMDB: its two headers, one of which a commit rewrites last
_INDEX = "data.mdb"


@dataclass(frozen=True, slots=True)
class Named:
    """A name in a directory now means `node`, None: nothing. `old` is the name that it had before, if moved."""

    directory: int
    name: str
    node: int | None
    old: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes of a file."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Sized:
    """A file's size; it never shrinks to it unless to 0."""

    node: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Synced:
    """All that happened to a file, or to the names in a directory, is on the disk."""

    node: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The index before and after a transaction."""

    node: int
    before: bytes
    after: bytes


Event = Named | Written | Sized | Synced | Committed


@dataclass(slots=True)
class _Node:
    """What is surely on the disk, and what may be."""

    content: bytearray = field(default_factory=bytearray)
    names: dict[str, int] | None = None  # of a directory
    pending: list[Event] = field(default_factory=list)


class PowerCutOps(FileOps):
    """Carries file calls out below `root` and keeps a journal of them. What is there at first is on the disk."""

    def __init__(self, root: Path) -> None:
        self.journal: list[Event] = []
        self.on_commit: Callable[[], None] = lambda: None
        """Called in an index transaction, before it is committed."""
        self._root = root
        self._nodes: list[_Node] = []  # as they were when the journal began
        self._names: dict[Path, int] = {}  # as they are now
        self._open: dict[int, int] = {}
        self._scan(root)

    def open(self, path: Path, flags: int) -> int:
        known = path.exists()
        fd = super().open(path, flags & ~os.O_DIRECT)  # a disk in memory need not take it
        if not known:
            self._create(path)
        node = self._open[fd] = self._names[path]
        if known and flags & os.O_TRUNC:
            self.journal.append(Sized(node, 0))
        return fd

    def mkdir(self, path: Path) -> None:
        if not path.exists():
            super().mkdir(path)
            self._create(path)

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        moved = {path: node for path, node in self._names.items() if path == old or old in path.parents}
        for path, node in moved.items():
            del self._names[path]
            self._names[new / path.relative_to(old)] = node
        self.journal.append(Named(self._names[new.parent], new.name, self._names[new], old.name))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        del self._names[path]
        self.journal.append(Named(self._names[path.parent], path.name, None))

    def fallocate(self, fd: int, nbytes: int) -> None:
        super().fallocate(fd, nbytes)
        self.journal.append(Sized(self._open[fd], nbytes))

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        written = super().pwrite(fd, buffer, offset)
        self.journal.append(Written(self._open[fd], offset, bytes(buffer[:written])))
        return written

    def fdatasync(self, fd: int) -> None:
        self.journal.append(Synced(self._open[fd]))

    def sync_directory(self, path: Path) -> None:
        index = path / _INDEX
        if index not in self._names and index.exists():  # LMDB made it, and synced what is in it
            self._create(index, index.read_bytes())
        self.journal.append(Synced(self._names[path]))

    def commit(self, transaction: Any) -> None:
        index = self._root / "store" / "index" / _INDEX
        before = index.read_bytes()
        self.on_commit()
        super().commit(transaction)
        self.journal.append(Committed(self._names[index], before, index.read_bytes()))

    def cut(self, position: int, choices: int, target: Path) -> None:
        """Make in `target` what is left when the power goes at `position`: with that event of the journal under way.

        `choices` seeds which of the changes since the last syncs are left.
        """
        rng = random.Random(choices)
        nodes = [
            _Node(bytearray(node.content), None if node.names is None else dict(node.names)) for node in self._nodes
        ]
        for event in self.journal[:position]:
            _happen(nodes, event)
        if position < len(self.journal):
            under_way = self.journal[position]
            if isinstance(under_way, Committed):
                nodes[under_way.node].content = _half_committed(under_way, rng)
            elif not isinstance(under_way, Synced):
                _happen(nodes, under_way)
        for node in nodes:
            _settle(node, rng)
        _materialise(nodes, 0, target)

    def _scan(self, path: Path) -> int:
        number = self._names[path] = len(self._nodes)
        node = _Node()
        self._nodes.append(node)
        if path.is_dir():
            node.names = {entry.name: self._scan(entry) for entry in sorted(path.iterdir()) if entry.name != "LOCK"}
        else:
            node.content += path.read_bytes()
        return number

    def _create(self, path: Path, content: bytes = b"") -> None:
        below = f"{path}/"
        for stale in [known for known in self._names if str(known).startswith(below)]:  # deleted as a whole
            del self._names[stale]
        number = self._names[path] = len(self._nodes)
        self._nodes.append(_Node(bytearray(content), {} if path.is_dir() else None))
        self.journal.append(Named(self._names[path.parent], path.name, number))


def _happen(nodes: list[_Node], event: Event) -> None:
    match event:
        case Named():
            nodes[event.directory].pending.append(event)
        case Written() | Sized():
            nodes[event.node].pending.append(event)
        case Committed():
            nodes[event.node].content = bytearray(event.after)
        case Synced():
            node = nodes[event.node]
            for change in node.pending:
                _apply(node, change)
            node.pending.clear()


def _apply(node: _Node, change: Event) -> None:
    match change:
        case Named(name=name, node=number, old=old):
            names = node.names if node.names is not None else {}
            if old is not None:
                names.pop(old, None)
            if number is None:
                names.pop(name, None)
            else:
                names[name] = number
        case Written(offset=offset, data=data):
            _grow(node, offset + len(data))
            node.content[offset : offset + len(data)] = data
        case Sized(nbytes=nbytes):
            if not nbytes:
                node.content.clear()
            _grow(node, nbytes)


def _grow(node: _Node, nbytes: int, fill: bytes = b"\0") -> None:
    missing = nbytes - len(node.content)
    if missing > 0:
        node.content += fill * missing


def _settle(node: _Node, rng: random.Random) -> None:
    """Decide which of the pending changes are left."""
    changes, node.pending = node.pending, []
    if not changes:
        return
    left = rng.choice([0.0, 0.5, 0.9, 1.0])
    if node.names is not None:
        for change in changes:
            if rng.random() < left:
                _apply(node, change)
        return
    if rng.random() < 0.3:
        rng.shuffle(changes)
    unit = rng.choice([SECTOR_BYTES, PAGE_BYTES])
    if rng.random() < 0.5:  # of the size nothing is known but what was synced, or all
        fill = rng.choice([b"\0", b"\xa5"])  # a file system may leave old bytes of others behind
        _grow(node, max((change.nbytes for change in changes if isinstance(change, Sized)), default=0), fill)
    size = len(node.content)
    for change in changes:
        if isinstance(change, Written):
            for start in range(0, len(change.data), unit):
                end = min(start + unit, len(change.data), size - change.offset)
                if end > start and rng.random() < left:
                    node.content[change.offset + start : change.offset + end] = change.data[start:end]


def _half_committed(commit: Committed, rng: random.Random) -> bytearray:
    if rng.random() < 0.5:
        return bytearray(commit.after)
    content = bytearray(commit.before)
    grown = rng.random() < 0.5
    for start in range(_META_PAGES * PAGE_BYTES, len(commit.after), SECTOR_BYTES):
        end = start + SECTOR_BYTES
        if (end <= len(content) or grown) and rng.random() < 0.5:
            content += bytes(max(0, end - len(content)))
            content[start:end] = commit.after[start:end]
    return content


def _materialise(nodes: list[_Node], number: int, target: Path) -> None:
    node = nodes[number]
    if node.names is None:
        target.write_bytes(node.content)
        return
    target.mkdir(mode=0o700)
    for name, child in node.names.items():
        _materialise(nodes, child, target / name)
