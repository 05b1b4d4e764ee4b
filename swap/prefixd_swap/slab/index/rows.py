"""Rows of the index, and changes to them. Does not import LMDB, which only an open store needs."""

from __future__ import annotations

from collections.abc import Callable

from prefixd_swap.errors import StorageError

CHUNK_ROWS = 4096
"""Rows read together: so few stay in the processor's cache; twice as fast as 65,536."""

Row = tuple[bytes, bytes]
"""A block's key and value."""
Edit = Callable[[bytes], bytes]
"""Makes a key's new value from its present one."""
Change = tuple[bytes, bytes | Edit | None]
"""A key and its new value; None removes the key. An edit does nothing if the key is absent."""


class IndexDamagedError(StorageError):
    """The index's file cannot be read; `SlabIndex.replace` it."""
