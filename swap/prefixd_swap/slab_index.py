"""The durable index of the disk tier: LMDB with the sub-databases `blocks` and `namespaces`."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import lmdb

from prefixd_swap.errors import DiskFullError, FormatError, StorageError
from prefixd_swap.file_ops import storage_error

MAP_BYTES = 16 << 20
"""First size of the memory map; it doubles when it is full."""

Change = tuple[bytes, bytes | None]
"""A key and its new value; None removes the key."""

_Result = TypeVar("_Result")


class SlabIndex:
    """Raw keys and values in durable transactions. Thread-safe: one transaction at a time.

    One lock instead of LMDB's own: the directory belongs to this process, and the map may be resized only
    while no transaction is open.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the environment in the folder `path`.

        Raises:
            FormatError: the files are not LMDB's, or damaged.
            StorageError: they cannot be opened.
        """
        self._path = path
        self._lock = threading.Lock()
        self.broken = False
        """A commit failed so that LMDB does not know what is on disk; only reopening tells."""
        try:
            self._env = lmdb.open(
                str(path), map_size=MAP_BYTES, max_dbs=2, mode=0o600, lock=False, sync=True, metasync=True
            )
            self._blocks = self._env.open_db(b"blocks")
            self._namespaces = self._env.open_db(b"namespaces")
        except (lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.CorruptedError) as error:
            raise FormatError(
                f"the index in {path} is damaged ({error}); delete {path.parent} to start with an empty cache"
            ) from error
        except lmdb.Error as error:
            raise self._translated("opening", error) from error

    def apply(self, changes: Sequence[Change]) -> list[bytes | None]:
        """Make the changes in order, in one transaction; the values that they replaced or removed.

        Durable when this returns. On any error nothing of it is.

        Raises:
            DiskFullError: no room for the index's pages.
            StorageError: any other failure.
        """

        def change(txn: lmdb.Transaction[bytes]) -> list[bytes | None]:
            return [
                txn.pop(key, db=self._blocks) if value is None else txn.replace(key, value, db=self._blocks)
                for key, value in changes
            ]

        return self._write(change)

    def rows(self) -> list[tuple[bytes, bytes]]:
        """Every block's key and value, in key order."""
        with self._lock:
            try:
                with self._env.begin(db=self._blocks) as txn, txn.cursor() as cursor:
                    return list(cursor)
            except lmdb.Error as error:
                raise self._translated("reading", error) from error

    def put_namespace(self, namespace: bytes, spec: bytes) -> None:
        """Store what a namespace stands for, durably.

        Raises:
            StorageError: as `apply`.
        """
        self._write(lambda txn: txn.put(namespace, spec, db=self._namespaces))

    def namespaces(self) -> dict[bytes, bytes]:
        """What every namespace stands for."""
        with self._lock, self._env.begin(db=self._namespaces) as txn, txn.cursor() as cursor:
            return dict(cursor)

    def close(self) -> None:
        """Close the environment."""
        with self._lock:
            self._env.close()

    def _write(self, change: Callable[[lmdb.Transaction[bytes]], _Result]) -> _Result:
        with self._lock:
            while True:
                if self.broken:
                    raise StorageError(f"the index in {self._path} failed in a commit; restart to recover it")
                try:
                    with self._env.begin(write=True) as txn:
                        return change(txn)
                except lmdb.MapFullError:
                    self._env.set_mapsize(2 * self._env.info()["map_size"])
                except lmdb.Error as error:
                    self._probe()
                    raise self._translated("writing", error) from error

    def _probe(self) -> None:
        """Once writing a meta page failed, LMDB refuses every transaction: what is durable is not known."""
        try:
            self._env.begin(write=True).abort()
        except lmdb.Error:
            self.broken = True

    def _translated(self, doing: str, error: lmdb.Error) -> StorageError:
        what = f"{doing} the index in {self._path}"
        if isinstance(error, lmdb.DiskError):
            return DiskFullError(f"no room left while {what}; free space or lower the disk capacity")
        code = getattr(error, "code", 0)  # since lmdb 2
        if code == errno.EIO:
            return StorageError(
                f"{error} while {what}; the disk is full (a short write is EIO to LMDB) or failing"
            )
        if code in errno.errorcode:
            return storage_error(what, OSError(code, str(error)))
        return StorageError(f"{error} while {what}; restart to recover it")
