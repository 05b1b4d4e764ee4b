"""Rows of the index, and changes to them. Without LMDB: only who opens a store needs it."""

from __future__ import annotations

from collections.abc import Callable

from prefixd_swap.errors import StorageError

CHUNK_ROWS = 4096
"""Rows read at once: few enough to stay in the processor's cache, twice as fast as 65,536."""

Row = tuple[bytes, bytes]
"""A block's key and value."""
Edit = Callable[[bytes], bytes]
"""The new value of a key from the one that it has."""
Change = tuple[bytes, bytes | Edit | None]
"""A key and its new value; None removes the key. An edit does nothing where the key is not there."""


class IndexDamagedError(StorageError):
    """The index's file cannot be read; `SlabIndex.replace` it."""
