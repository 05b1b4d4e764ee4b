"""A shared store in this process's memory, which fails as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prefixd_swap import RemoteFullError, RemoteStoreError
from prefixd_swap.stores import ObjectStore, Read, Write
from prefixd_swap.stores.base import first_bytes


class MemoryStore(ObjectStore):
    """Objects in a dict. Several caches, each with an object of this class, may share one.

    Attributes:
        objects: what is there.
        away: every call fails.
        full: every put fails.
        read_only: every put fails in another way.
        once: a put of a name that is there changes nothing.
        held: no call ends, until it is false again.
        latency_s: what every call takes; one that takes longer than its deadline fails then.
    """

    kind = "memory"
    address = "in this process"

    def __init__(self, objects: dict[bytes, bytes] | None = None) -> None:
        self.objects: dict[bytes, bytes] = {} if objects is None else objects
        self.away = self.full = self.read_only = self.once = self.held = False
        self.latency_s = 0.0
        self.asked: list[int] = []
        self.calls = self.puts = self.gets = 0

    async def _answer(self, deadline_s: float) -> None:
        self.calls += 1
        while self.held:
            await asyncio.sleep(0.001)
        await asyncio.sleep(min(self.latency_s, deadline_s))
        if self.away or self.latency_s > deadline_s:
            raise RemoteStoreError("the store is away, as the test says")

    async def exists(self, names: Sequence[bytes], deadline_s: float) -> list[bool]:
        await self._answer(deadline_s)
        self.asked.append(len(names))
        return [name in self.objects for name in names]

    async def get(self, reads: Sequence[Read], deadline_s: float) -> list[int | None]:
        self.gets += 1
        await self._answer(deadline_s)
        return [self._get(read) for read in reads]

    def _get(self, read: Read) -> int | None:
        value = self.objects.get(read.name)
        if value is None or len(value) > read.nbytes:
            return None
        start = 0
        for piece in first_bytes(read.into, len(value)):
            piece[:] = value[start : start + piece.nbytes]
            start += piece.nbytes
        return start

    async def put(self, writes: Sequence[Write], ttl_s: float, deadline_s: float) -> None:
        await self._answer(deadline_s)
        if self.full:
            raise RemoteFullError("the store is full, as the test says")
        if self.read_only:
            raise RemoteStoreError("the store is read only, as the test says")
        self.puts += len(writes)
        for write in writes:
            if self.once and write.name in self.objects:
                continue
            self.objects[write.name] = b"".join(write.pieces)

    async def delete(self, names: Sequence[bytes], deadline_s: float) -> None:
        await self._answer(deadline_s)
        for name in names:
            self.objects.pop(name, None)

    async def ping(self, deadline_s: float) -> None:
        await self._answer(deadline_s)

    async def close(self) -> None:
        pass
