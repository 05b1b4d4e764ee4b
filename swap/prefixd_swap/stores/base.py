"""What prefixd asks of a store that it shares with other hosts: get, put, exists and delete, for many objects at once.

An object is immutable and named by its content: whoever puts a name again puts an object that serves as well, so puts
need no order, and two hosts that write the same one do no harm. A store may lose any object at any time.

Nothing that comes out of a store is trusted: whoever calls verifies it.
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
        into: writable memory, one piece after the other, that is together exactly as long as the object has to be.
            Contiguous bytes (format "B"). They stay until the call has returned, and are garbage when it failed.
    """

    name: bytes
    into: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """How long the object has to be."""
        return sum(piece.nbytes for piece in self.into)


@dataclass(frozen=True, slots=True)
class Write:
    """An object to put.

    Args:
        name: `NAME_BYTES` bytes that look random.
        pieces: its bytes, one piece after the other. They stay as they are until the call has returned.
    """

    name: bytes
    pieces: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """How long the object is."""
        return sum(piece.nbytes for piece in self.pieces)


class ObjectStore(ABC):
    """A store, whatever it is. One event loop makes all calls, several at a time; it connects with the first.

    Every call takes a deadline in seconds from now, and has returned or raised soon after it: whatever it waits for is
    cancelled, and nothing is written into a `Read`'s memory any more.

    Raises (every call):
        RemoteStoreError: it is away, refuses, or does not answer in time.
    """

    kind: str
    """Which store it is, in messages and metrics, for example "valkey"."""

    address: str
    """Where it is, in messages; without secrets."""

    copied_bytes = 0
    """Bytes of objects that this side has copied in memory since the start, between the client library and the caller's
    memory."""

    @abstractmethod
    async def exists(self, names: Sequence[bytes], deadline_s: float) -> list[bool]:
        """Whether each object is there now, in as few round trips as the store allows."""

    @abstractmethod
    async def get(self, reads: Sequence[Read], deadline_s: float) -> list[bool]:
        """Reads objects; whether each was there with the length that was expected."""

    @abstractmethod
    async def put(self, writes: Sequence[Write], ttl_s: float, deadline_s: float) -> None:
        """Stores objects, each whole or not at all.

        Args:
            writes: different names.
            ttl_s: how long the store keeps them; 0: as long as it likes.
            deadline_s: see above.

        Raises:
            RemoteFullError: there is no room; some may be stored.
        """

    @abstractmethod
    async def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        """Deletes objects; unknown ones are ignored."""

    @abstractmethod
    async def ping(self, deadline_s: float) -> None:
        """Whether it answers."""

    def register(self, address: int, nbytes: int) -> None:
        """Says that most reads and writes will be of this memory, so that a store that needs to know can prepare it.

        Args:
            address: where it begins in this process.
            nbytes: how long it is. It stays mapped until the store is closed.
        """
        del address, nbytes

    @abstractmethod
    async def close(self) -> None:
        """Ends all connections. Never raises, never waits for the store."""
