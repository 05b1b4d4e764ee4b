"""Objects for the tests of stores: random bytes in several pieces, and memory to read them into."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prefixd_swap.stores import NAME_BYTES, ObjectStore, Read, StoreOptions, Write, open_store

DEADLINE_S = 20.0
LATE_S = 7.0
"""Four calls that ended at their deadlines of 2 s, but one after the other, would take a second more."""


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


async def found(store: ObjectStore, reads: Sequence[Read], deadline_s: float = DEADLINE_S) -> list[bool]:
    """Reads objects; whether each fills its memory."""
    came = await store.get(reads, deadline_s)
    return [nbytes == read.nbytes for nbytes, read in zip(came, reads, strict=True)]


@asynccontextmanager
async def opened(options: StoreOptions) -> AsyncIterator[ObjectStore]:
    """A store that is closed at the end."""
    store = open_store(options)
    try:
        yield store
    finally:
        await store.close()


async def assert_works(store: ObjectStore) -> None:
    """Round trips of two objects give right answers."""
    writes = [new_write(64, 100_000), new_write(70_000)]
    await store.put(writes, 0, DEADLINE_S)
    names = [writes[0].name, new_name(), writes[1].name]
    assert await store.exists(names, DEADLINE_S) == [True, False, True]
    reads = [read_of(write) for write in writes]
    assert await found(store, reads) == [True, True]
    assert_read(reads, writes)
    await store.delete(names, DEADLINE_S)
    assert await store.exists(names, DEADLINE_S) == [False] * 3
