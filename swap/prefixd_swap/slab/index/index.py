"""The durable index of the disk tier: LMDB with the sub-databases `blocks`, `namespaces` and `pins`.

A pin is the key of a block that will be pinned again after a restart. One transaction removes a block and its pin.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import lmdb

from prefixd_swap.errors import DiskFullError, FormatError, StorageError
from prefixd_swap.slab.files.file_ops import FileOps, storage_error
from prefixd_swap.slab.files.mapped_file import MappedFile
from prefixd_swap.slab.index.packed_rows import PackedRows, RowCollector
from prefixd_swap.slab.index.page_check import check_pages
from prefixd_swap.slab.index.rows import (
    CHUNK_ROWS,
    USED_CODECS,
    USED_KEYS,
    Change,
    Edit,
    IndexDamagedError,
    Row,
    decode_used_keys,
)
from prefixd_swap.slab.index.set_aside import note_loss, set_aside, set_copy_aside

_DATABASES = 3
MAP_BYTES = 16 << 20
"""First size of the memory map; it doubles when it is full."""
_MAPPED_BYTES = 4 << 20
"""About the most bytes of the index that stay mapped, and so count as this process's memory."""

_Result = TypeVar("_Result")

_DAMAGE = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError)

log = logging.getLogger(__name__)


class SlabIndex:
    """Raw keys and values in durable transactions. Thread-safe: one transaction at a time.

    One lock instead of LMDB's own: the directory belongs to this process, and the map may be resized only
    while no transaction is open.
    """

    def __init__(self, path: Path, ops: FileOps) -> None:
        """Open the environment in the folder `path`, or make it there.

        A damaged environment is set aside (`set_aside.py`) and replaced by an empty one; `bring_back` then enters the
        readable records.

        Raises:
            FormatError: it is another LMDB's.
            StorageError: it cannot be made or opened.
        """
        self._path = path
        self._ops = ops
        self._lock = threading.Lock()
        self.damage = ""
        """The damage of the environment that was found; empty when it was good or absent."""
        self.aside: Path | None = None
        """The folder of the damaged environment that was set aside last."""
        self.broken = False
        """Whether a commit has failed with unknown outcome; only reopening tells what is on disk."""
        self._rows: RowCollector | None = None  # until `packed` or a change
        try:
            if not (path / "data.mdb").exists():
                _create(path, ops)
            try:
                self._check_readable()
                self._open()
            except _DAMAGE as error:
                self._replace(str(error))
        except lmdb.VersionMismatchError as error:
            raise FormatError(
                f"the index in {path} is of another LMDB ({error}); use the one that wrote it, or delete {path.parent} "
                "to start with an empty cache"
            ) from error
        except lmdb.Error as error:
            raise self._translated("opening", error) from error
        except OSError as error:
            raise storage_error(f"making the index in {path}", error) from error

    def replace(self, damage: str) -> None:
        """Set the environment aside, because of `damage`, and start an empty one.

        Raises:
            StorageError: it cannot be made.
        """
        with self._lock:
            self._env.close()
            self.broken = True  # until the new one is open; if this fails, `reopen` continues
            try:
                self._replace(damage)
            except lmdb.Error as error:
                raise self._translated("opening", error) from error
            except OSError as error:
                raise storage_error(f"replacing the index in {self._path}", error) from error
            self.broken = False

    def apply(self, changes: Sequence[Change]) -> list[bytes | None]:
        """Make the changes in order, in one transaction; returns the values that they replaced or removed.

        All changes are durable when this returns, and none after an error.

        Raises:
            DiskFullError: no room for the index's pages.
            StorageError: any other failure.
        """

        def one(txn: lmdb.Transaction[bytes], key: bytes, value: bytes | Edit | None) -> bytes | None:
            found: bytes | None
            if value is None:
                found = txn.pop(key, db=self._blocks)
                txn.delete(key, db=self._pins)
            elif isinstance(value, bytes):
                found = txn.replace(key, value, db=self._blocks)
            elif (found := txn.get(key, db=self._blocks)) is not None:
                txn.put(key, value(found), db=self._blocks)
            return found

        def change(txn: lmdb.Transaction[bytes]) -> list[bytes | None]:
            return [one(txn, key, value) for key, value in changes]

        return self._write(change, len(changes))

    def get(self, key: bytes) -> bytes | None:
        """A block's value, None when there is none.

        Raises:
            StorageError: LMDB failed.
        """
        with self._lock:
            try:
                with self._env.begin(db=self._blocks) as txn:
                    value: bytes | None = txn.get(key)
                self._mapped.touch(1)
                return value
            except lmdb.Error as error:
                raise self._translated("reading", error) from error

    def chunks(self) -> Iterator[list[Row]]:
        """Every block's key and value as of now, in key order, some thousands at a time.

        Until the iterator is done or closed, nothing else can use the index.

        Raises:
            IndexDamagedError: LMDB found its pages broken.
            StorageError: any other failure.
        """
        with self._lock:
            try:
                with self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
                    rows = iter(cursor)
                    while chunk := list(islice(rows, CHUNK_ROWS)):
                        yield chunk
                self._mapped.let_go()
            except _DAMAGE as error:
                raise IndexDamagedError(f"{error} while reading the index in {self._path}") from error
            except lmdb.Error as error:
                raise self._translated("reading", error) from error

    def packed(self) -> PackedRows:
        """Every block's key and value, read from the file's pages without LMDB; `chunks` takes ten times as long.

        The first call before a change returns what the check of the pages has read.

        Raises:
            IndexDamagedError: pages are not what they were when they were checked.
            StorageError: the device refuses.
        """
        with self._lock:
            rows, self._rows = self._rows, None
            if rows is None:
                rows = RowCollector()
                try:
                    self._check_pages(rows)
                except lmdb.CorruptedError as error:
                    raise IndexDamagedError(str(error)) from error
                except OSError as error:
                    raise storage_error(f"reading the index in {self._path}", error) from error
        if not rows.found:
            raise IndexDamagedError(f"the index in {self._path} has no tree of blocks")
        return rows.packed()

    def put_namespaces(self, specs: Mapping[bytes, bytes]) -> None:
        """Store the specs of namespaces durably, in one transaction.

        Raises:
            StorageError: as `apply`.
        """

        def change(txn: lmdb.Transaction[bytes]) -> None:
            for namespace, spec in specs.items():
                txn.put(namespace, spec, db=self._namespaces)

        self._write(change, len(specs))

    def remove_namespaces(self, namespaces: Iterable[bytes]) -> None:
        """Remove namespaces durably; unknown ones are ignored.

        Raises:
            StorageError: as `apply`.
        """

        def change(txn: lmdb.Transaction[bytes]) -> None:
            for namespace in namespaces:
                txn.delete(namespace, db=self._namespaces)

        self._write(change)

    def namespaces(self) -> dict[bytes, bytes]:
        """The specs of all namespaces, by id.

        Raises:
            StorageError: LMDB failed.
        """
        found = self._named()
        found.pop(USED_KEYS, None)
        found.pop(USED_CODECS, None)
        return found

    def used_keys(self) -> list[int]:
        """Ids of all keys that have encrypted blocks.

        Raises:
            StorageError: LMDB failed.
        """
        return decode_used_keys(self._named().get(USED_KEYS, b""))

    def add_used_keys(self, key_ids: Iterable[int]) -> None:
        """Note that keys encrypt blocks, durably, before the first of these blocks.

        Raises:
            StorageError: as `apply`.
        """
        used = self.used_keys()
        if more := sorted(set(key_ids).difference(used)):
            self.put_namespaces({USED_KEYS: b"".join(key_id.to_bytes(4, "little") for key_id in (*used, *more))})

    def used_codecs(self) -> list[int]:
        """Numbers of all codecs that have made blocks smaller.

        Raises:
            StorageError: LMDB failed.
        """
        return list(self._named().get(USED_CODECS, b""))

    def add_used_codecs(self, numbers: Iterable[int]) -> None:
        """Note that codecs make blocks smaller, durably, before the first of these blocks.

        Raises:
            StorageError: as `apply`.
        """
        used = self.used_codecs()
        if more := sorted(set(numbers).difference(used)):
            self.put_namespaces({USED_CODECS: bytes((*used, *more))})

    def _named(self) -> dict[bytes, bytes]:
        with self._lock:
            try:
                with self._env.begin(db=self._namespaces) as txn, txn.cursor() as cursor:
                    return dict(cursor)
            except lmdb.Error as error:
                raise self._translated("reading", error) from error

    def pin(self, keys: Sequence[bytes], pinned: bool) -> int:
        """Pin or unpin blocks in one transaction; returns the number of keys that are blocks.

        Raises:
            StorageError: as `apply`.
        """

        def change(txn: lmdb.Transaction[bytes]) -> int:
            there = [key for key in keys if txn.get(key, db=self._blocks) is not None]
            for key in there:
                if pinned:
                    txn.put(key, b"", db=self._pins)
                else:
                    txn.delete(key, db=self._pins)
            return len(there)

        return self._write(change, len(keys))

    def pins(self) -> list[bytes]:
        """The keys of all pinned blocks.

        Raises:
            StorageError: LMDB failed.
        """
        with self._lock:
            try:
                with self._env.begin(db=self._pins) as txn, txn.cursor() as cursor:
                    return list(cursor.iternext(values=False))
            except lmdb.Error as error:
                raise self._translated("reading", error) from error

    def set_copy_aside(self, reason: str, blocks: int) -> Path:
        """Copy the environment to a folder beside it, before `blocks` blocks are removed as lost; returns the folder.

        Raises:
            StorageError: the copy cannot be made; nothing of it stays.
        """
        with self._lock:
            try:
                return set_copy_aside(self._path, self._ops, reason, blocks, lambda to: self._env.copy(str(to)))
            except lmdb.Error as error:
                raise self._translated("copying", error) from error
            except OSError as error:
                raise storage_error(f"copying the index in {self._path}", error) from error

    def correct_copy(self, aside: Path, reason: str, blocks: int) -> None:
        """Note that only `blocks` blocks were removed since `set_copy_aside`; delete the copy if none was."""
        if blocks:
            note_loss(aside, self._ops, reason, blocks)
        else:
            shutil.rmtree(aside, ignore_errors=True)

    def probe(self) -> None:
        """Commit a change that changes nothing.

        Raises:
            StorageError: as `apply`.
        """

        def change(txn: lmdb.Transaction[bytes]) -> None:
            txn.put(b"probe", b"", db=self._namespaces)
            txn.delete(b"probe", db=self._namespaces)

        self._write(change)

    def reopen(self) -> None:
        """Open the environment again after a commit of unknown outcome.

        A damaged or missing environment is replaced by an empty one.

        Raises:
            StorageError: the device refuses; try again when it works.
        """
        with self._lock:
            try:
                self._env.close()
                if not (self._path / "data.mdb").exists():  # `replace` failed after setting it aside
                    _create(self._path, self._ops)
                try:
                    self._check_pages()
                    self._open()
                except _DAMAGE as error:
                    self._replace(str(error))
                self.broken = False
            except lmdb.Error as error:
                raise self._translated("opening", error) from error
            except OSError as error:
                raise storage_error(f"opening the index in {self._path}", error) from error

    def close(self) -> None:
        """Close the environment."""
        with self._lock:
            self._env.close()

    def _write(self, change: Callable[[lmdb.Transaction[bytes]], _Result], rows: int = 1) -> _Result:
        with self._lock:
            self._rows = None
            while True:
                if self.broken:
                    raise StorageError(f"the index in {self._path} failed in a commit; restart to recover it")
                try:
                    txn = self._env.begin(write=True)
                    try:
                        result = change(txn)
                        self._ops.commit(txn)
                    except BaseException:
                        txn.abort()
                        raise
                    self._mapped.touch(rows)
                    return result
                except lmdb.MapFullError:
                    self._grow()
                except lmdb.Error as error:
                    try:
                        self._env.begin(write=True).abort()
                    except lmdb.Error:
                        # After a failed write of a meta page LMDB refuses every transaction.
                        self.broken = True
                    raise self._translated("writing", error) from error
                except OSError as error:  # not of LMDB: the commit's outcome is unknown
                    self.broken = True
                    raise storage_error(f"writing the index in {self._path}", error) from error

    def _grow(self) -> None:
        try:
            self._env.set_mapsize(2 * self._env.info()["map_size"])
        except lmdb.Error as error:
            raise self._translated("growing", error) from error
        self._mapped.moved()

    def _replace(self, damage: str) -> None:
        self.damage = damage
        self._rows = None
        self.aside = set_aside(self._path, self._ops, damage)
        _create(self._path, self._ops)
        self._open()

    def _check_readable(self) -> None:
        """Treat bytes that the device cannot read as damage: a start does not wait for the device to recover."""
        rows = RowCollector()
        try:
            self._check_pages(rows)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise lmdb.CorruptedError(f"data.mdb cannot be read: {error.strerror}") from error
        self._rows = rows

    def _check_pages(self, rows: RowCollector | None = None) -> None:
        """Read and check all pages in use before LMDB does, which ends the process where it stumbles over one.

        Raises:
            CorruptedError: the file is empty, or a page is damaged or missing.
            OSError: the device refuses.
        """

        def pread(fd: int, buffer: memoryview, offset: int) -> int:
            try:
                return self._ops.pread(fd, buffer, offset)
            except OSError as error:
                raise OSError(error.errno, f"{error.strerror} at byte {offset}") from error

        fd = self._ops.open(self._path / "data.mdb", os.O_RDONLY)
        try:
            nbytes = os.fstat(fd).st_size
            damage = check_pages(fd, pread, nbytes, rows) if nbytes else "data.mdb is empty"  # LMDB would initialize it
        finally:
            os.close(fd)
        if damage:
            raise lmdb.CorruptedError(damage)

    def _open(self) -> None:
        env = lmdb.open(os.fsencode(self._path), map_size=MAP_BYTES, max_dbs=_DATABASES, mode=0o600, lock=False)
        try:
            self._blocks = env.open_db(b"blocks")
            self._namespaces = env.open_db(b"namespaces")
            self._pins = _pins(env)
        except BaseException:
            env.close()
            raise
        self._env = env
        self._mapped = MappedFile(self._path / "data.mdb", _MAPPED_BYTES)

    def _translated(self, doing: str, error: lmdb.Error) -> StorageError:
        action = f"{doing} the index in {self._path}"
        if isinstance(error, lmdb.DiskError):
            return DiskFullError(f"no room left while {action}; free space or lower the disk capacity")
        code = getattr(error, "code", 0)  # since lmdb 2
        if code == errno.EIO:
            return StorageError(f"{error} while {action}; the disk is full (a short write is EIO to LMDB) or failing")
        if code in errno.errorcode:
            return storage_error(action, OSError(code, str(error)))
        return StorageError(f"{error} while {action}; restart to recover it")


def _pins(env: lmdb.Environment) -> lmdb._Database:
    """The sub-database of pins; created in an index of an older prefixd, which had none."""
    try:
        return env.open_db(b"pins")
    except lmdb.MapFullError:
        env.set_mapsize(2 * env.info()["map_size"])
        return env.open_db(b"pins")


def _create(path: Path, ops: FileOps) -> None:
    """Make an empty environment, under another name first: a power cut leaves a whole one or none."""
    fresh = path.with_name(path.name + ".new")
    for leftover in (path, fresh):
        if leftover.exists():
            shutil.rmtree(leftover)
    ops.mkdir(fresh)
    with lmdb.open(os.fsencode(fresh), map_size=MAP_BYTES, max_dbs=_DATABASES, mode=0o600, lock=False) as env:
        for name in (b"blocks", b"namespaces", b"pins"):
            env.open_db(name)
    ops.sync_directory(fresh)
    ops.rename(fresh, path)
    ops.sync_directory(path.parent)
