"""Objects for the tests of stores: random bytes in several pieces, and memory to read them into."""

from __future__ import annotations

import os
from collections.abc import Sequence

from prefixd_swap.stores import NAME_BYTES, Read, Write

LATE_S = 5.0
"""Calls that should end at their deadlines of at most 2 s have done so by then, on a busy machine, too. Calls that
waited for each other have not."""


def new_name() -> bytes:
    """A name that no other object has."""
    return os.urandom(NAME_BYTES)


def new_write(*sizes: int) -> Write:
    """An object with pieces of so many bytes."""
    return Write(new_name(), tuple(memoryview(os.urandom(size)) for size in sizes))


def read_of(write: Write, *sizes: int) -> Read:
    """Where to read that object into: pieces of the same sizes, or of others."""
    lengths = sizes or tuple(len(piece) for piece in write.pieces)
    return Read(write.name, tuple(memoryview(bytearray(b"\xaa" * size)) for size in lengths))


def joined(item: Read | Write) -> bytes:
    """All its bytes."""
    return b"".join(item.into if isinstance(item, Read) else item.pieces)


def assert_read(reads: Sequence[Read], writes: Sequence[Write]) -> None:
    """Each object was read as it was written."""
    assert [joined(read) for read in reads] == [joined(write) for write in writes]
