"""The free space of the file systems that have the slabs, and which of them have refused one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefixd_swap.slab.files.file_ops import FileOps, storage_error


class FreeSpace:
    """Free space by folder, each folder by its place in `folders`.

    A file system that has refused a slab is full until it has gained room for one: asking it again would fail again.
    """

    def __init__(self, folders: Sequence[Path], ops: FileOps) -> None:
        self._folders = folders
        self._ops = ops
        self._full_at: dict[int, int] = {}  # bytes that were left at the last refusal

    def left(self, folder: int) -> int:
        """Bytes that are free.

        Raises:
            StorageError: the file system does not say.
        """
        try:
            return self._ops.free_bytes(self._folders[folder])
        except OSError as error:
            raise storage_error(f"asking for the free space of {self._folders[folder]}", error) from error

    def refused(self, folder: int, left: int) -> None:
        """Note that a slab was refused while `left` bytes were free."""
        self._full_at[folder] = left

    def granted(self, folder: int) -> None:
        """Note that a slab was made."""
        self._full_at.pop(folder, None)

    def freed(self) -> None:
        """Note that a slab was deleted."""
        self._full_at.clear()

    def is_full(self, folder: int, gain: int) -> bool:
        """Whether a slab was refused, and fewer than `gain` more bytes are free since.

        Raises:
            StorageError: the file system does not say.
        """
        full_at = self._full_at.get(folder)
        return full_at is not None and self.left(folder) < full_at + gain
