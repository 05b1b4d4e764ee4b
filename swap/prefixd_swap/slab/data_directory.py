"""The disk tier's directory: one owner at a time, and a superblock with the format's version.

`LOCK` is held with flock(2) and names its holder. `SUPERBLOCK` is written once, before all other files, and again as
`SUPERBLOCK.copy`: either one is enough to open the directory, and the other is then written again.

A directory has format 2 until the first coded part is written, so that a daemon that never codes leaves it readable for
earlier versions. Format 3 is format 2 with coded parts and errors in records.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from prefixd_swap.errors import DirectoryInUseError, FormatError
from prefixd_swap.slab.drives import IDENTITY, open_drives, replace_file
from prefixd_swap.slab.files.file_ops import FileOps, storage_error
from prefixd_swap.slab.files.io import DiskIo, try_read, usable
from prefixd_swap.slots import PAGE_BYTES

MAGIC = b"prefixd\0"
VERSION = 3
RAW_VERSION = 2
"""The format of a directory without coded parts."""
SUPERBLOCKS = ("SUPERBLOCK", "SUPERBLOCK.copy")

log = logging.getLogger(__name__)

_SUPERBLOCK = struct.Struct("<8sII")  # magic, version, page bytes; an xxh3_64 of these follows
_CHECK = struct.Struct("<Q")


class DataDirectory:
    """A directory held for this process alone until `close`, with further directories for slabs."""

    def __init__(self, path: Path, ops: FileOps, others: Sequence[Path] = (), *, drop_missing: bool = False) -> None:
        """Create or take the directories.

        Args:
            path: the directory.
            ops: file calls.
            others: further directories for slabs, see `drives`.
            drop_missing: see `open_drives`.

        Raises:
            DirectoryInUseError: another store holds it.
            FormatError: it holds files of another version, or files that are not prefixd's.
            MissingDriveError: a further directory is not there.
            StorageError: one cannot be made, read or written.
        """
        self.path = path
        self.slabs = [folder / "slabs" for folder in (path, *others)]
        """The folders of slabs."""
        self.index = path / "index"
        self.version = RAW_VERSION
        """The format of what is there."""
        self._ops = ops
        try:
            ops.mkdir(path)
            _refuse_foreign(path)
            self._fd = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(f"opening the data directory {path}", error) from error
        try:
            self._lock()
            self._check_superblock()
            ops.mkdir(self.slabs[0])
            ops.sync_directory(path)
            if others:
                self.allow_coded()
            open_drives(path, others, ops, drop_missing=drop_missing)
        except OSError as error:
            os.close(self._fd)
            raise storage_error(f"preparing the data directory {path}", error) from error
        except BaseException:
            os.close(self._fd)
            raise

    def usable_io(self, wanted: DiskIo) -> DiskIo:
        """`wanted` if every directory's file system and the kernel support it, else buffered.

        Raises:
            StorageError: one cannot be read at all.
        """
        found = wanted
        for name in self._samples():
            try:
                found = usable(found, name, self._ops)
            except OSError as error:
                raise storage_error(f"reading {name}", error) from error
        return found

    def try_read(self, io: DiskIo) -> None:
        """Read the beginning of a small file of each directory from the device.

        Raises:
            StorageError: a device refuses.
        """
        for name in self._samples():
            try:
                try_read(name, self._ops, io)
            except OSError as error:
                raise storage_error(f"reading {name}", error) from error

    def try_write(self) -> None:
        """In each directory write a page to a new file, sync it, and delete it.

        Raises:
            DiskFullError: there is no room for a page.
            StorageError: a device or a file system refuses.
        """
        for folder in self.slabs:
            self._try_write(folder.parent / "PROBE")

    def _try_write(self, name: Path) -> None:
        try:
            fd = self._ops.open(name, os.O_RDWR | os.O_CREAT)
            try:
                self._ops.fallocate(fd, PAGE_BYTES)
                self._ops.pwrite(fd, memoryview(bytes(PAGE_BYTES)), 0)
                self._ops.fdatasync(fd)
            finally:
                os.close(fd)
            self._ops.unlink(name)
        except OSError as error:
            raise storage_error(f"writing {name}", error) from error

    def allow_coded(self) -> None:
        """Make the format the one that has coded parts, and further directories, before the first of them is there.

        Raises:
            StorageError: the superblock cannot be written.
        """
        if self.version == VERSION:
            return
        try:
            copy = self.path / SUPERBLOCKS[1]
            with contextlib.suppress(FileNotFoundError):
                self._ops.unlink(copy)  # else a start after a crash would write the old format again
            self._ops.sync_directory(self.path)
            for name in SUPERBLOCKS:
                self._write_superblock(self.path / name, _content(VERSION))
        except OSError as error:
            raise storage_error(f"writing the superblock of {self.path}", error) from error
        self.version = VERSION

    def _samples(self) -> list[Path]:
        """A small file of each directory."""
        return [self.path / "SUPERBLOCK", *(folder.parent / IDENTITY for folder in self.slabs[1:])]

    def close(self) -> None:
        """Release the directory for other processes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            raise DirectoryInUseError(
                f"{self.path} is in use by process {holder or 'unknown'}; stop it or choose another directory"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def _check_superblock(self) -> None:
        """Write the superblock and its copy in a new directory; in an old one repair either from the other."""
        there = [name for name in SUPERBLOCKS if (self.path / name).exists()]
        faults = {name: self._find_fault(self.path / name) for name in there}
        if there and all(fault for fault, _ in faults.values()):
            raise FormatError("; ".join(faults[there[0]]))
        self.version = max((_version(self.path / name) for name in there if not faults[name][0]), default=RAW_VERSION)
        # The copy is read second. A writer of a later format must delete it first, or this code would restore it.
        for name in SUPERBLOCKS:
            fault, _ = faults.get(name, (f"{self.path / name} was absent", ""))
            if fault:
                if there:
                    log.warning("%s; written anew from its copy", fault)
                self._write_superblock(self.path / name, _content(self.version))

    def _find_fault(self, name: Path) -> tuple[str, str]:
        """The fault of the superblock in the file `name`, and the remedy if its copy has one too; both empty if good.

        Raises:
            FormatError: it is whole and has another format.
        """
        anew = f"delete {self.path} to start with an empty cache"
        try:
            found = name.read_bytes()
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return f"{name} cannot be read ({error.strerror})", anew
        if not found.startswith(MAGIC):
            return f"{name} is not a prefixd superblock", "choose an empty directory"
        if len(found) < _SUPERBLOCK.size:
            return f"{name} is damaged", anew
        _, version, page_bytes = _SUPERBLOCK.unpack_from(found)
        if version > VERSION:
            fault = f"{self.path} has format {version}, of a newer prefixd than this one, which reads format {VERSION}"
            remedy = "upgrade prefixd, choose another directory"
        elif version < RAW_VERSION:
            fault = f"{self.path} has format {version}, of an older prefixd than this one, which reads format {VERSION}"
            remedy = "use the prefixd that wrote it, choose another directory"
        elif page_bytes != PAGE_BYTES:
            fault = f"{self.path} has pages of {page_bytes} bytes, this prefixd has pages of {PAGE_BYTES}"
            remedy = "choose another directory"
        else:
            fault = remedy = ""
        is_whole = found[_SUPERBLOCK.size :] == _CHECK.pack(xxhash.xxh3_64_intdigest(found[: _SUPERBLOCK.size]))
        if not fault:
            return ("", "") if is_whole else (f"{name} is damaged", anew)
        remedy = f"{remedy}, or {anew}"
        if is_whole:
            raise FormatError(f"{fault}; {remedy}")
        return fault, remedy  # also for a later format with other fields after the version

    def _write_superblock(self, name: Path, content: bytes) -> None:
        replace_file(name, content, self._ops)
        with contextlib.suppress(OSError):  # this user may lack the right to open the parent
            self._ops.sync_directory(self.path.parent)


def _content(version: int) -> bytes:
    """A superblock."""
    fields = _SUPERBLOCK.pack(MAGIC, version, PAGE_BYTES)
    return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields))


def _version(superblock: Path) -> int:
    """The format that a whole superblock names."""
    version: int = _SUPERBLOCK.unpack_from(superblock.read_bytes())[1]
    return version


def _refuse_foreign(path: Path) -> None:
    """Refuse a directory that was never prefixd's: it has files and no superblock."""
    names = {entry.name for entry in path.iterdir()}
    leftovers = {f"{name}.new" for name in SUPERBLOCKS}  # of a crash, like a lone LOCK
    foreign = sorted(names - leftovers - {"LOCK"})
    if foreign and names.isdisjoint(SUPERBLOCKS):
        raise FormatError(
            f"{path} has no superblock but holds {foreign[0]!r}; choose an empty directory, "
            "or delete this one if it was prefixd's"
        )
