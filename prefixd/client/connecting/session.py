"""A session: a stream to the daemon. When the stream ends, the daemon ends the client's leases and reservations."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import grpc

from prefixd.client.connecting.connection import Connection
from prefixd.client.connecting.mapped_arena import Arena, fetch_arena
from prefixd.client.errors import MemoryUnavailable, ServerUnavailable
from prefixd.v1 import cache_pb2

log = logging.getLogger(__name__)

_END: Any = grpc.aio.EOF

MemoryMode: TypeAlias = Literal["auto", "shared", "streamed"]


@dataclass(frozen=True, slots=True)
class NewSession:
    """A session was opened to replace one that has ended.

    Attributes:
        lost_because: why the last session ended.
        other_data: the daemon has refused our ticket since the last session was opened: it has another data directory.
    """

    lost_because: str
    other_data: bool

    def __str__(self) -> str:
        if self.other_data:
            return "it was replaced by a daemon with another data directory, which has none of the cached blocks"
        return self.lost_because


class Holder(Protocol):
    """A lease or reservation, which a session informs of its end."""

    def on_session_lost(self, reason: str) -> None:
        """The session has ended: the holder must not read or fill blocks any more."""

    async def before_close(self) -> None:
        """The client is being closed, after `on_session_lost`; the holder can still call the daemon in the session."""


class Session:
    """An open session. `arena` is None when bytes travel in the stream of Get and Put. `tenant`, `server_version` and
    `max_ttl_s` are what the daemon answered, for callers of `AsyncClient.session`."""

    def __init__(
        self, stream: Any, opened: cache_pb2.SessionOpened, arena: Arena | None, connection: Connection
    ) -> None:
        self.session_id = opened.session_id
        self.tenant = opened.tenant
        self.server_version = opened.server_version
        self.max_ttl_s = opened.max_ttl_s
        self.default_ttl_s = opened.default_ttl_s
        self.arena_bytes = opened.arena_bytes
        self.arena = arena
        self.draining = False
        self.lost_because: str | None = None
        self.connection = connection
        self._stream = stream
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._watcher = asyncio.create_task(self._watch(), name="prefixd-session")

    @classmethod
    async def open(cls, connection: Connection, name: str, memory: MemoryMode) -> Session:
        """Opens a session and maps the arena, depending on `memory`.

        Raises `ServerUnavailable`, or `MemoryUnavailable` if `memory` is "shared" and the arena cannot be mapped.
        """
        request = cache_pb2.OpenSessionRequest(client_name=name, pid=os.getpid(), reopens_namespaces=True)
        late = f"the daemon at {connection.address} opened no session within {connection.timeout_s:g} s"
        async with _limit(connection.timeout_s, late):
            stream, event = await connection.begin(connection.cache.OpenSession, request)
        try:
            if event is _END or event.WhichOneof("event") != "opened":
                raise ServerUnavailable(f"the daemon at {connection.address} ended the session as it began")
            async with _limit(connection.timeout_s, late):
                arena = await _map_arena(event.opened, memory, connection.timeout_s)
        except BaseException:
            stream.cancel()
            raise
        return cls(stream, event.opened, arena, connection)

    @property
    def alive(self) -> bool:
        """True until the end of the session is known here."""
        return self.lost_because is None

    def add(self, holder: Holder) -> None:
        """Informs `holder` when the session ends."""
        self._holders.add(holder)

    def discard(self, holder: Holder) -> None:
        """Forgets a holder that has ended before the session."""
        self._holders.discard(holder)

    def disown(self, reason: str) -> None:
        """Ends a session that the daemon does not know, before its stream reports the end."""
        self._lose(reason)
        self._stream.cancel()

    async def close(self) -> None:
        """Ends the session; its leases and reservations end with it."""
        holders = list(self._holders) if self.alive else []
        self._lose("the client was closed")
        await asyncio.gather(*(holder.before_close() for holder in holders))
        self._stream.cancel()
        self._watcher.cancel()
        with suppress(asyncio.CancelledError):
            await self._watcher

    async def _watch(self) -> None:
        reason = f"the daemon at {self.connection.address} ended the session"
        try:
            while (event := await self._stream.read()) is not _END:
                if (kind := event.WhichOneof("event")) in ("draining", "undrained"):
                    self.draining = kind == "draining"
        except grpc.aio.AioRpcError as error:
            reason = f"{reason}: {error.details() or error.code().name}"
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self.lost_because is not None:
            return
        self.lost_because = reason
        for holder in list(self._holders):
            holder.on_session_lost(reason)
        if self.arena is not None:
            self.arena.close()


@asynccontextmanager
async def _limit(seconds: float, late: str) -> AsyncGenerator[None]:
    timeout = asyncio.timeout(seconds)
    try:
        async with timeout:
            yield
    except TimeoutError as error:
        if timeout.expired():
            raise ServerUnavailable(late) from error
        raise


async def _map_arena(opened: cache_pb2.SessionOpened, memory: MemoryMode, timeout_s: float) -> Arena | None:
    if memory == "streamed":
        return None
    if not opened.memory_socket or not opened.arena_bytes:
        if memory == "shared":
            raise MemoryUnavailable(
                "the daemon shares memory on its unix socket only, and only if it has a CPU tier (cpu.bytes): connect "
                "there, or use memory='streamed' in the SDK"
            )
        return None
    try:
        return await asyncio.to_thread(fetch_arena, opened.memory_socket, opened.session_id, timeout_s)
    except (MemoryUnavailable, RuntimeError) as error:
        # Another mount or user namespace, or no thread for the call: bytes can still be streamed.
        why = str(error)
        if isinstance(error, RuntimeError):
            why = f"the arena cannot be fetched ({error}); raise the limit of processes (`ulimit -u`)"
        if memory == "shared":
            raise MemoryUnavailable(why) from error
        log.warning("prefixd: bytes are streamed, which is slower: the daemon's memory cannot be mapped: %s", why)
        return None
