"""The further directories of a store, each on a drive of its own, with slabs alone.

    FIRST/DRIVES, FIRST/DRIVES.copy    the store's id; id and last path of every further directory
    OTHER/DRIVE, OTHER/DRIVE.copy      the store's id, and this directory's
    OTHER/slabs/                       slab files

Either file of a pair is enough, and the other is then written again.

A mount point whose drive is not mounted looks like an empty new directory. So a store refuses to open while a directory
that it has listed is not there: opened without it, the store would drop its blocks for good.

Crash windows: `DRIVES` has the store's id before a directory gets its `DRIVE`, and lists the directory only after that.
A directory of this store that is not listed has no block of it: it is new, or it was given up.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from prefixd_swap.errors import FormatError, MissingDriveError
from prefixd_swap.slab.files.file_ops import FileOps, storage_error

LIST = "DRIVES"
IDENTITY = "DRIVE"
_ID_BYTES = 8
_NOT_OURS = frozenset({"lost+found"})  # of an empty file system

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Listed:
    """What the first directory says."""

    store: str
    drives: dict[str, Path]
    """Last path by id."""


def open_drives(first: Path, others: Sequence[Path], ops: FileOps, *, drop_missing: bool) -> None:
    """Check the further directories of the store in `first`, and make those that are new.

    Args:
        first: the store's directory, which the caller holds.
        others: the further ones, in any order.
        drop_missing: whether listed directories that are not there are given up, with their blocks.

    Raises:
        MissingDriveError: a listed directory is not there; nothing has changed.
        FormatError: a directory belongs to another store, or has files that are not prefixd's.
        StorageError: one cannot be made, read or written.
    """
    try:
        _open(first, others, ops, drop_missing)
    except OSError as error:
        names = ", ".join(map(str, others)) or first
        raise storage_error(f"opening the directories of slabs {names}", error) from error


def list_drives(first: Path) -> list[Path]:
    """The further directories that a store lists, by their last paths.

    Raises:
        FormatError: the list is damaged.
        OSError: it cannot be read.
    """
    listed = _read_list(first)
    return [] if listed is None else list(listed.drives.values())


def replace_file(name: Path, content: bytes, ops: FileOps) -> None:
    """Give the file `name` this content, durably: at any crash it has its old content or the new one.

    Raises:
        OSError: it cannot be written.
    """
    fresh = name.with_name(f"{name.name}.new")
    fd = ops.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        ops.pwrite(fd, memoryview(content), 0)
        ops.fdatasync(fd)
    finally:
        os.close(fd)
    ops.rename(fresh, name)
    ops.sync_directory(name.parent)


def _open(first: Path, others: Sequence[Path], ops: FileOps, drop_missing: bool) -> None:
    listed = _read_list(first)
    if listed is None and not others:
        return
    known = listed or _Listed(os.urandom(_ID_BYTES).hex(), {})
    found: dict[str, Path] = {}
    fresh: list[Path] = []
    for path in others:
        identity = _read_pair(path, IDENTITY)
        if identity is None:
            _refuse_used(first, path)
            fresh.append(path)
        elif identity["store"] != known.store:
            raise FormatError(
                f"{path} belongs to another store than {first}, which may be another directory than it was, or on a "
                f"drive that is not mounted; choose an empty directory, or delete {path} to lose its blocks"
            )
        elif (twin := found.get(identity["drive"])) is not None:
            raise FormatError(f"{path} is {twin} or a copy of it; give each directory once")
        else:
            found[identity["drive"]] = path
    missing = {drive: path for drive, path in known.drives.items() if drive not in found}
    if missing and not drop_missing:
        names = ", ".join(map(str, missing.values()))
        new = f"; {', '.join(map(str, fresh))} is empty, as a place where no drive is mounted" if fresh else ""
        raise MissingDriveError(f"{first} has blocks in {names}, which is not there{new}")
    for drive, path in missing.items():
        log.warning("the directory %s (%s) of the store in %s is given up with its blocks", path, drive, first)
    _write_list(
        first, _Listed(known.store, {drive: path for drive, path in found.items() if drive in known.drives}), ops
    )
    for drive, path in found.items():
        if drive not in known.drives:
            _clear(path, ops)
        _make(path, {"store": known.store, "drive": drive}, ops)
    for path in fresh:
        drive = os.urandom(_ID_BYTES).hex()
        _make(path, {"store": known.store, "drive": drive}, ops)
        if any(path.samefile(other) for other in [first, *found.values()]):
            raise FormatError(f"{path} is given twice; give each directory once")
        found[drive] = path
    _write_list(first, _Listed(known.store, found), ops)


def _refuse_used(first: Path, path: Path) -> None:
    """Refuse a directory without an identity that has files."""
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    if not any(_slabs(path)):
        names.discard("slabs")  # of a crash
    foreign = sorted(names - _NOT_OURS - {f"{IDENTITY}.new", f"{IDENTITY}.copy.new"})
    if foreign:
        raise FormatError(f"{path} is to hold slabs of {first} but holds {foreign[0]!r}; choose an empty directory")


def _clear(path: Path, ops: FileOps) -> None:
    """Delete the slabs of a directory that was given up: other slabs may have their numbers now."""
    slabs = list(_slabs(path))
    if slabs:
        log.warning("deleting %d slabs of %s, which was given up before: their blocks left the index", len(slabs), path)
    for slab in slabs:
        ops.unlink(slab)


def _slabs(path: Path) -> Iterator[Path]:
    return (path / "slabs").glob("*.slab")


def _make(path: Path, identity: dict[str, str], ops: FileOps) -> None:
    """Make what the directory lacks."""
    ops.mkdir(path)
    ops.mkdir(path / "slabs")
    with contextlib.suppress(OSError):  # this user may lack the right to open the parent
        ops.sync_directory(path.parent)
    _write_pair(path, IDENTITY, identity, ops)
    ops.sync_directory(path)


def _read_list(first: Path) -> _Listed | None:
    content = _read_pair(first, LIST)
    if content is None:
        return None
    return _Listed(content["store"], {drive: Path(path) for drive, path in content["drives"].items()})


def _write_list(first: Path, listed: _Listed, ops: FileOps) -> None:
    drives = {drive: str(path) for drive, path in listed.drives.items()}
    _write_pair(first, LIST, {"store": listed.store, "drives": drives}, ops)


def _write_pair(folder: Path, name: str, content: dict[str, Any], ops: FileOps) -> None:
    """Write a file and its copy, one after the other, where they are not so yet."""
    raw = _encode(content)
    for each in _pair(folder, name):
        if _content(each) != raw:
            replace_file(each, raw, ops)


def _read_pair(folder: Path, name: str) -> dict[str, Any] | None:
    """What a file or its copy says; None if there is none.

    Raises:
        FormatError: neither is good.
    """
    raw = [_content(each) for each in _pair(folder, name)]
    found = [_decode(each) for each in raw if each is not None]
    good = next((each for each in found if each is not None), None)
    if found and good is None:
        raise FormatError(
            f"{folder / name} and its copy are damaged, so nobody knows whose slabs are in {folder}; empty this "
            "directory to go on without its blocks"
        )
    return good


def _pair(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / name, folder / f"{name}.copy"


def _content(name: Path) -> bytes | None:
    """A file's bytes; None if there is none. A file that the device cannot read counts as damaged: empty."""
    try:
        return name.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return b""


def _encode(content: dict[str, Any]) -> bytes:
    check = xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
    return json.dumps(content | {"check": check}, sort_keys=True, indent=1).encode() + b"\n"


def _decode(raw: bytes) -> dict[str, Any] | None:
    """What `_encode` was given; None if bytes have changed."""
    try:
        content: dict[str, Any] = json.loads(raw)
        del content["check"]
    except (ValueError, KeyError, TypeError):
        return None
    return content if _encode(content) == raw else None
