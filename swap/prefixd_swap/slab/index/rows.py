"""Rows of the index, and changes to them. Does not import LMDB, which only an open store needs."""

from __future__ import annotations

import struct
from collections.abc import Callable

from prefixd_swap.errors import StorageError

CHUNK_ROWS = 4096
"""Rows read together: so few stay in the processor's cache; twice as fast as 65,536."""

USED_KEYS = b"keys"
"""The key in `namespaces` of the ids of all keys that have encrypted blocks."""
USED_CODECS = b"codecs"
"""The key in `namespaces` of the numbers of all codecs that have made blocks smaller, a byte each."""

Row = tuple[bytes, bytes]
"""A block's key and value."""
Edit = Callable[[bytes], bytes]
"""Makes a key's new value from its present one."""
Change = tuple[bytes, bytes | Edit | None]
"""A key and its new value; None removes the key. An edit does nothing if the key is absent."""


def decode_used_keys(value: bytes) -> list[int]:
    """The key ids in the value of `USED_KEYS`: u32 each, little-endian."""
    return [key_id for (key_id,) in struct.iter_unpack("<I", value[: len(value) // 4 * 4])]


class IndexDamagedError(StorageError):
    """The index's file cannot be read; `SlabIndex.replace` it."""
