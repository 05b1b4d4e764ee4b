"""The interface of a store that hosts share: get, put, exists and delete, each for many objects at once.

An object is immutable and named by its content: two objects of one name are equally good. So puts need no order, and
two hosts may write the same object. A store may lose any object at any time.

Callers must verify every object that they get.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

NAME_BYTES = 32


@dataclass(frozen=True, slots=True)
class Read:
    """An object to get.

    Args:
        name: `NAME_BYTES` bytes that look random.
        into: writable pieces of memory, together as long as the object is at most. Contiguous bytes (format "B"). They
            stay until the call has returned, and are garbage when it failed, and behind a shorter object's end.
    """

    name: bytes
    into: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the object has at most."""
        return sum(piece.nbytes for piece in self.into)


@dataclass(frozen=True, slots=True)
class Write:
    """An object to put.

    Args:
        name: `NAME_BYTES` bytes that look random.
        pieces: its bytes, in order. They must not change until the call has returned.
    """

    name: bytes
    pieces: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the object."""
        return sum(piece.nbytes for piece in self.pieces)


class ObjectStore(ABC):
    """A store. One event loop makes all calls, several at a time; the store connects with the first call.

    Every call has a deadline in seconds from now, and returns or raises soon after it: then its work is cancelled, and
    nothing is written into a `Read`'s memory any more.

    Raises (every call):
        RemoteStoreError: the store cannot be reached, refuses, or does not answer in time.
    """

    kind: str
    """The kind of store, in messages and metrics, for example "valkey"."""

    address: str
    """Its address, in messages; without secrets."""

    copied_bytes = 0
    """Bytes of objects copied since the start between the client library and the caller's memory."""

    @abstractmethod
    async def exists(self, names: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Whether each object is there now, in as few round trips as the store allows."""

    @abstractmethod
    async def get(self, reads: Sequence[Read], deadline_s: float) -> list[int | None]:
        """Reads objects; returns the bytes of each, None if it is not there or longer than its memory."""

    @abstractmethod
    async def put(self, writes: Sequence[Write], ttl_s: float, deadline_s: float) -> None:
        """Stores objects, each whole or not at all.

        Args:
            writes: different names.
            ttl_s: the store keeps them for this time; 0: until it evicts them.
            deadline_s: as for every call.

        Raises:
            RemoteFullError: there is no room; some may be stored.
        """

    @abstractmethod
    async def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        """Deletes objects; unknown ones are ignored."""

    @abstractmethod
    async def ping(self, deadline_s: float) -> None:
        """Checks that the store answers."""

    def register(self, address: int, nbytes: int) -> None:
        """Announces the memory of most reads and writes, for a store that has to prepare it.

        Args:
            address: its address in this process.
            nbytes: its size. It stays mapped until the store is closed.
        """
        del address, nbytes

    @abstractmethod
    async def close(self) -> None:
        """Ends all connections. Never raises, never waits for the store."""


def first_bytes(pieces: tuple[memoryview, ...], nbytes: int) -> tuple[memoryview, ...]:
    """The first `nbytes` bytes of memory in pieces, without empty pieces."""
    first = []
    for piece in pieces:
        if nbytes > 0 and len(piece):
            first.append(piece[:nbytes])
        nbytes -= len(piece)
    return tuple(first)
