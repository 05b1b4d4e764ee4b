"""Indexes that were set aside because they seemed damaged: folders beside the index, until an operator removes them.

```
index/                 in use
index.damaged/         set aside first: data.mdb, unless it was gone; lost.json: the reason, the number of lost blocks
index.damaged.2/ ...   set aside later; the next one replaces the last of four
```
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prefixd_swap.slab.files.file_ops import FileOps, storage_error
from prefixd_swap.slab.index.lmdb_file import read_trees

NOTE = "lost.json"
MOST = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SetAside:
    """An index that was set aside."""

    path: Path
    reason: str
    """Why it was set aside; empty if the note is missing."""
    blocks: int | None
    """Number of blocks that are lost with it; None if unknown."""


def set_aside(index: Path, ops: FileOps, reason: str) -> Path:
    """Rename the index's folder, with a note that all its blocks are lost; returns the new name.

    Raises:
        OSError: it cannot be moved.
    """
    blocks = _count_blocks(index, ops)
    note_loss(index, ops, reason, blocks)
    aside = _free_name(index)
    ops.rename(index, aside)
    log.error("the index in %s is set aside as %s, with %s blocks: %s", index, aside.name, _number(blocks), reason)
    return aside


def set_copy_aside(
    index: Path, ops: FileOps, reason: str, blocks: int | None, copy: Callable[[Path], None] = lambda folder: None
) -> Path:
    """Make a folder beside the index, with a note of lost blocks and a copy of the index by `copy`; returns the folder.

    Raises:
        OSError: the folder cannot be made; and the errors of `copy`. Nothing of it stays.
    """
    aside = _free_name(index)
    try:
        ops.mkdir(aside)
        copy(aside)
        note_loss(aside, ops, reason, blocks)
        ops.sync_directory(aside)
        ops.sync_directory(aside.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    log.error("%s blocks on disk are lost: %s; see `prefixd recover`", _number(blocks), reason)
    return aside


def note_loss(folder: Path, ops: FileOps, reason: str, blocks: int | None) -> None:
    """Write the number of lost blocks and the reason into the folder; log a warning if that fails."""
    try:
        _write_note(folder / NOTE, ops, json.dumps({"reason": reason, "blocks": blocks}).encode())
    except OSError as error:
        log.warning("the reason why it was set aside cannot be written down: %s", error)


def note_rest(aside: Path, ops: FileOps, reason: str, kept: int) -> None:
    """Correct the note after `kept` blocks of the index were brought back."""
    blocks = _count_blocks(aside, ops)
    if kept and blocks is not None:
        lost = max(0, blocks - kept)
        note_loss(aside, ops, reason, lost)
        log.warning("%d blocks of %s are back at once, %d are lost", kept, aside, lost)


def list_set_aside(index: Path) -> list[SetAside]:
    """All indexes that were set aside, the oldest first.

    Raises:
        StorageError: the directory cannot be read.
    """
    found = []
    for name in _names(index):
        try:
            if not name.is_dir():
                continue
        except OSError as error:
            raise storage_error(f"looking for {name}", error) from error
        reason, blocks = "", None
        try:
            note = json.loads((name / NOTE).read_bytes())
            reason, blocks = str(note["reason"]), note["blocks"]
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
            blocks = _count_blocks(name, FileOps())
        found.append(SetAside(name, reason, blocks if isinstance(blocks, int) else None))
    return found


def discard(found: SetAside) -> None:
    """Remove it for good.

    Raises:
        OSError: it cannot be removed.
    """
    shutil.rmtree(found.path)


def _number(blocks: int | None) -> str:
    return "an unknown number of" if blocks is None else f"{blocks:,}"


def _free_name(index: Path) -> Path:
    names = _names(index)
    aside = next((name for name in names if not name.exists()), names[-1])
    if aside.exists():
        log.error("%s, which was set aside before, is deleted: %d are kept", aside, MOST)
        shutil.rmtree(aside)
    return aside


def _names(index: Path) -> list[Path]:
    first = f"{index.name}.damaged"
    return [index.with_name(first), *(index.with_name(f"{first}.{number}") for number in range(2, MOST + 1))]


def _count_blocks(index: Path, ops: FileOps) -> int | None:
    try:
        fd = ops.open(index / "data.mdb", os.O_RDONLY)
    except OSError:
        return None
    try:
        _, trees = read_trees(fd, ops.pread)
    except OSError:
        return None
    finally:
        os.close(fd)
    return trees[b"blocks"].entries if b"blocks" in trees else None


def _write_note(path: Path, ops: FileOps, content: bytes) -> None:
    fd = ops.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        ops.pwrite(fd, memoryview(content), 0)
        ops.fdatasync(fd)
    finally:
        os.close(fd)
